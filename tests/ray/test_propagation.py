"""Every process of a Ray job runs the driver's fixes, or says that it does not. Real clusters, stock verl."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.processes import call
from tests.ray.clusters import running_cluster
from tests.stock.conftest import RELEASE

JOBS = "tests.ray.jobs"
TIMEOUT_S = 280
OLD = RELEASE < "0.8"

pytestmark = [
    pytest.mark.skipif(RELEASE not in ("0.7.1", "0.8.0", "0.9.1"), reason="one release of each kind"),
    pytest.mark.timeout(300),
]


def is_patched(process: dict[str, Any]) -> bool:
    return process["states"].get("scalar-metrics") in ("applied", "refined")


@pytest.mark.parametrize("running", [False, True], ids=["started by the driver", "running already"])
def test_a_stock_worker_group_reports_numbers(running: bool) -> None:
    with_plugin = call(f"{JOBS}:training", running=running, plugin=True, timeout=TIMEOUT_S)
    assert with_plugin["grad_norm"] == "float"
    assert is_patched(with_plugin)
    assert with_plugin["environment"]["MINE"] == "kept"
    assert with_plugin["environment"]["VERL_USE_EXTERNAL_MODULES"] == "tests.ray.cpu_worker,verl_fixes"
    if OLD:  # later releases convert grad_norm by themselves, and find the plugin by its entry point
        without = call(f"{JOBS}:training", running=running, plugin=False, timeout=TIMEOUT_S)
        assert without["grad_norm"] == "Tensor"
        assert without["states"] == {}


@pytest.fixture(scope="module")
def survival() -> Any:
    return call(f"{JOBS}:survival", timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    "actor",
    [
        "subclass pickled by value",
        "colocated WorkerDict",
        "plain actor",
        "restarted after SIGKILL",
        "child of an actor",
        "threads",
    ],
)
def test_the_fixes_run_in_every_kind_of_actor(survival: Any, actor: str) -> None:
    assert is_patched(survival[actor])
    driver = survival[actor]["environment"]["VERL_FIXES_DRIVER"]
    assert driver == survival["plain actor"]["environment"]["VERL_FIXES_DRIVER"]
    assert survival[actor].get("said", []) == []  # no drift


def test_wrappers_survive_pickling(survival: Any) -> None:
    for group in ("subclass pickled by value", "colocated WorkerDict"):
        assert survival[group]["grad_norm"] == "float"
    assert survival["subclass pickled by value"]["loss_function"] == ["called"]
    assert survival["method registered with verl's decorator"] == ["float"]
    assert survival["partial"]["VERL_USE_EXTERNAL_MODULES"] == "tests.ray.cpu_worker,verl_fixes"
    assert survival["remote function of verl"]["VERL_FIXES_DRIVER"]  # only a patched worker answers so
    assert survival["async method"] == 2


def test_a_killed_worker_comes_back_patched(survival: Any) -> None:
    assert survival["restarted after SIGKILL"]["pid"] != survival["plain actor"]["pid"]


def test_threads_that_import_at_once_do_not_deadlock(survival: Any) -> None:
    assert survival["threads"]["deadlock"] is False


@pytest.fixture(scope="module")
def drivers() -> Any:
    """Drivers with different switches, two at a time on one running cluster, and what their workers run."""
    off, policy = "VERL_FIXES_DETACH_OUTPUTS", {"VERL_USE_EXTERNAL_PLUGINS": "other"}
    plans: dict[str, dict[str, Any]] = {
        "plain": {},
        "argument": {"arguments": {"disable": ["detach-outputs"]}},
        "everything off": {"environment": {"VERL_FIXES": "0"}},
        "differs": {"job": {off: "0"}},
        "differs, strict": {"job": {off: "0"}, "environment": {"VERL_FIXES_STRICT": "1"}},
        "plugins": {"environment": policy, "job": policy},
    }
    empty: dict[str, Any] = {"environment": {}, "job": {}, "arguments": {}}
    with running_cluster() as address, ThreadPoolExecutor(2) as pool:
        pending = {
            name: pool.submit(call, f"{JOBS}:toggled", timeout=120, address=address, **{**empty, **plan})
            for name, plan in plans.items()
        }
        return {name: future.result() for name, future in pending.items()}


def test_drivers_with_different_switches_do_not_influence_each_other(drivers: Any) -> None:
    assert is_patched(drivers["plain"])
    assert drivers["plain"]["states"]["detach-outputs"] == "pending"
    assert is_patched(drivers["argument"])
    assert drivers["argument"]["states"]["detach-outputs"] == "disabled"
    assert drivers["plain"]["said"] == drivers["argument"]["said"] == []


def test_everything_off_is_passed_on(drivers: Any) -> None:
    states = drivers["everything off"]["states"]
    assert {state for name, state in states.items() if name != "ray-propagation"} <= {"disabled"}
    assert drivers["everything off"]["environment"]["VERL_FIXES"] == "0"


def test_a_worker_that_differs_says_so_with_both_sides(drivers: Any) -> None:
    said = " ".join(drivers["differs"]["said"])
    assert "do not run the same fixes" in said
    driver, worker = said.split("the driver runs ")[1].split("this process runs ")
    assert "detach-outputs disabled" not in driver
    assert "detach-outputs disabled" in worker


def test_a_worker_that_differs_fails_in_strict_mode(drivers: Any) -> None:
    error = drivers["differs, strict"]["error"]
    assert "StrictError" in error
    assert "the driver runs verl-fixes 0.1.0" in error
    assert "this process runs verl-fixes 0.1.0" in error


def test_a_restrictive_plugin_policy_is_respected_and_reported(drivers: Any) -> None:
    if RELEASE < "0.9":  # verl has no plugins, and the variable is nobody's
        assert is_patched(drivers["plugins"])
        return
    assert drivers["plugins"]["states"] == {}
    said = " ".join(drivers["plugins"]["driver said"])
    assert "VERL_USE_EXTERNAL_PLUGINS=other does not name verl_fixes" in said


def test_a_node_without_the_plugin_says_what_to_install_where() -> None:
    answer = call(f"{JOBS}:two_nodes", timeout=TIMEOUT_S)
    assert is_patched(answer["with"]), json.dumps(answer)[:2000]
    assert "No module named 'verl_fixes'" in answer["without"]["error"]
    note = " ".join(answer["without"]["notes"])
    assert "pip install verl-fixes==0.1.0" in note
    assert "node with IP" in note
