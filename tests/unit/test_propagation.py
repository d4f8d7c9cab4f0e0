"""What a worker gets in its environment, how it is merged with what is there, and how a difference is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.conftest import make_patch
from verl_fixes import toggles
from verl_fixes.errors import ToggleError
from verl_fixes.identity import Identity
from verl_fixes.propagation import (
    EXTERNAL_MODULES,
    difference,
    excluded_by,
    extend_runtime_env,
    missing_package,
    with_package,
    worker_environment,
)

CATALOG = (make_patch(name="first-fix"), make_patch(name="second-fix", default=False))
MINE = Identity("1.0", {"first-fix": "applied", "second-fix": "disabled"})


def environment(environ: dict[str, str], **arguments: Any) -> dict[str, str]:
    return worker_environment(environ, toggles.read(environ, CATALOG, **arguments), CATALOG, MINE)


def test_decisions_travel_however_they_were_made() -> None:
    plain = environment({})
    assert plain == {
        EXTERNAL_MODULES: "verl_fixes",
        "VERL_FIXES": "1",
        "VERL_FIXES_FIRST_FIX": "1",
        "VERL_FIXES_SECOND_FIX": "0",
        "VERL_FIXES_DRIVER": "1.0;first-fix=applied;second-fix=disabled",
    }
    argued = environment({}, disable=["first-fix"], enable=["second-fix"], strict=True)
    assert argued == {
        **plain,
        "VERL_FIXES_FIRST_FIX": "0",
        "VERL_FIXES_SECOND_FIX": "1",
        "VERL_FIXES_STRICT": "1",
    }
    set_by_variable = environment({"VERL_FIXES_FIRST_FIX": "0", "VERL_FIXES_SECOND_FIX": "1", "VERL_FIXES_STRICT": "1"})
    assert set_by_variable == argued


def test_a_worker_decides_as_its_driver_did() -> None:
    driver = toggles.read({}, CATALOG, disable=["first-fix"], enable=["second-fix"], strict=True)
    worker = toggles.read(worker_environment({}, driver, CATALOG, MINE), CATALOG)
    assert {n: d.enabled for n, d in worker.patches.items()} == {n: d.enabled for n, d in driver.patches.items()}
    assert (worker.strict, worker.log) == (driver.strict, driver.log)


def test_what_is_not_passed_on() -> None:
    off = environment({"VERL_FIXES": "0"})
    assert off == {"VERL_FIXES": "0", "VERL_FIXES_DRIVER": MINE.encode()}
    assert worker_environment({}, None, CATALOG, MINE) == {}


def test_the_first_driver_of_a_chain_is_the_one_that_is_compared_with() -> None:
    assert environment({"VERL_FIXES_DRIVER": "0.9;first-fix=failed"})["VERL_FIXES_DRIVER"] == "0.9;first-fix=failed"


@pytest.mark.parametrize(
    "environ, excluded",
    [
        ({}, False),
        ({"VERL_USE_EXTERNAL_PLUGINS": " Auto "}, False),
        ({"VERL_USE_EXTERNAL_PLUGINS": "VERL_FIXES"}, False),
        ({"VERL_USE_EXTERNAL_PLUGINS": ""}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": " other, verl_fixes"}, False),
        ({"VERL_USE_EXTERNAL_PLUGINS": "other"}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "none", EXTERNAL_MODULES: "a,verl_fixes"}, False),
    ],
)
def test_a_restrictive_plugin_policy_is_respected(environ: dict[str, str], excluded: bool) -> None:
    assert bool(excluded_by(environ)) is excluded


names = st.sampled_from(["A", "B", "VERL_FIXES_FIRST_FIX", EXTERNAL_MODULES])
variables = st.dictionaries(names, st.sampled_from(["0", "x", "y,z"]), max_size=4)


class RuntimeEnv(dict[str, Any]):
    """As Ray's: a dict that must keep its type."""


rest_of_it = st.dictionaries(st.sampled_from(["pip", "working_dir"]), st.text(max_size=2))


@given(variables, variables, rest_of_it, st.booleans())
def test_what_is_there_stays(own: dict[str, str], inherited: dict[str, str], rest: dict[str, Any], typed: bool) -> None:
    before: Any = {**rest, "env_vars": dict(own)}
    given_env = RuntimeEnv(before) if typed else dict(before)
    additions = environment({})
    result = extend_runtime_env(given_env, additions, inherited)
    assert type(result) is type(given_env)
    assert given_env == before
    assert {key: value for key, value in result.items() if key != "env_vars"} == rest
    effective = {**inherited, **result["env_vars"]}
    present = {**inherited, **own}
    for name, value in present.items():
        assert effective[name] == (with_package(value) if name == EXTERNAL_MODULES else value)
    for name, value in additions.items():
        assert effective[name] == value or name in present
    assert "verl_fixes" in effective[EXTERNAL_MODULES].split(",")


def test_what_the_driver_runs_is_told_anew() -> None:
    """The job was started before the driver changed its mind: the old switch stays, and shows as a difference."""
    before, after = environment({}), environment({}, disable=["first-fix"])
    after["VERL_FIXES_DRIVER"] = Identity("1.0", {"first-fix": "disabled", "second-fix": "disabled"}).encode()
    env_vars = {**before, **extend_runtime_env(None, after, before)["env_vars"]}
    assert env_vars["VERL_FIXES_FIRST_FIX"] == "1"
    assert env_vars["VERL_FIXES_DRIVER"] == after["VERL_FIXES_DRIVER"]


def test_a_worker_ignores_switches_that_only_a_newer_driver_knows() -> None:
    unknown = {"VERL_FIXES_FROM_THE_FUTURE": "1"}
    with pytest.raises(ToggleError):
        toggles.read(unknown, CATALOG)
    decided = toggles.read({**unknown, "VERL_FIXES_DRIVER": "2.0;from-the-future=applied"}, CATALOG)
    assert decided.patches["first-fix"].enabled


def test_no_runtime_env_and_nothing_to_add() -> None:
    assert extend_runtime_env(None, {"A": "1"}) == {"env_vars": {"A": "1"}}
    assert extend_runtime_env({"env_vars": None}, {"A": "1"}) == {"env_vars": {"A": "1"}}
    untouched = {"worker_process_setup_hook": "mine"}
    assert extend_runtime_env(untouched, {}) is untouched
    assert extend_runtime_env(None, {}) is None
    assert extend_runtime_env(untouched, {"A": "1"})["worker_process_setup_hook"] == "mine"


def test_identities_travel_and_compare() -> None:
    assert Identity.decode(MINE.encode()) == MINE
    assert len(MINE.digest) == 12
    assert MINE.digest in str(MINE)
    other = Identity("1.0", {"first-fix": "applied", "second-fix": "applied"})
    assert other.digest != MINE.digest
    assert Identity("1.0", dict(reversed(MINE.states.items()))).digest == MINE.digest


@pytest.mark.parametrize(
    "driver, words",
    [
        (None, None),
        (MINE, None),
        (Identity("1.1", MINE.states), "verl-fixes 1.1"),
        (Identity("1.0", {**MINE.states, "second-fix": "applied"}), "second-fix applied"),
        (Identity("1.0", {"first-fix": "applied"}), "the driver runs verl-fixes 1.0"),
    ],
)
def test_a_difference_is_told_with_both_sides(driver: Identity | None, words: str | None) -> None:
    told = difference(MINE, {} if driver is None else {"VERL_FIXES_DRIVER": driver.encode()})
    if words is None:
        assert told is None
    else:
        assert told is not None
        assert words in told
        assert str(MINE) in told


def test_a_driver_of_another_kind() -> None:
    told = difference(MINE, {"VERL_FIXES_DRIVER": "2.0;nonsense"})
    assert told is not None
    assert "cannot read" in told


@pytest.mark.parametrize(
    "text, address",
    [
        ("(pid=7, ip=10.0.0.7, actor_id=1) No module named 'verl_fixes'", "the node with IP 10.0.0.7"),
        ("node ip: 10.0.0.8 died. No module named 'verl_fixes'", "the node with IP 10.0.0.8"),
        ("No module named 'verl_fixes'", "the node named in this error"),
        ("No module named 'verl_fixes' in lib.zip=, x", "the node named in this error"),
    ],
)
def test_a_missing_package_says_what_to_install_where(text: str, address: str) -> None:
    message = missing_package(RuntimeError(text))
    assert message is not None
    assert f"`pip install verl-fixes==0.1.0` on {address}" in message
    assert missing_package(RuntimeError("No module named 'verl'")) is None
