"""``verl-fixes doctor --ray`` on a real cluster: three raylets on this machine, one without the plugin on its path."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.processes import python, script

CLUSTER = """
import json, os, signal, subprocess, sys, tempfile
import ray
from ray._private import state
from ray.cluster_utils import Cluster

folder = tempfile.mkdtemp()
with open(os.path.join(folder, "verl_fixes.py"), "w") as file:
    file.write('raise ModuleNotFoundError("No module named \\'verl_fixes\\'", name="verl_fixes")')
without = {"PYTHONPATH": folder + os.pathsep + os.environ["PYTHONPATH"]}

def doctor(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-m", "verl_fixes", "doctor", "--ray", cluster.address, *arguments],
        env={**os.environ, **variables}, cwd=os.path.expanduser("~"), capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return {"code": done.returncode, "out": done.stdout}

def footprint():
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        mine = ray.get_runtime_context().get_job_id()
        return {
            "alive nodes": sum(node["Alive"] for node in ray.nodes()),
            "resources": {name: value for name, value in ray.available_resources().items() if "memory" not in name},
            "actors": len(state.actors()),
            "running jobs": sum(not job["IsDead"] for job in state.jobs() if job["JobID"] != mine),
        }
    finally:
        ray.shutdown()

hung = None
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
try:
    cluster.add_node(num_cpus=1, env_vars=without)
    third = cluster.add_node(num_cpus=1, env_vars={"VERL_FIXES_SCALAR_METRICS": "0", "VLLM_BATCH_INVARIANT": "1"})
    before = footprint()
    answers = {"json": doctor("--json"), "table": doctor(), "after": footprint() == before and before}
    answers["strict"] = doctor(
        "--json", VERL_FIXES_SCALAR_METRICS="0", VERL_FIXES_RAY_PROPAGATION="0", VLLM_BATCH_INVARIANT="1")
    hung = third.all_processes["raylet"][0].process.pid
    os.kill(hung, signal.SIGSTOP)
    answers["hung"] = doctor("--json", "--timeout", "8")
    os.kill(hung, signal.SIGCONT)
    hung = None
    answers["after a hang"] = footprint() == before
finally:
    if hung:
        os.kill(hung, signal.SIGCONT)
    cluster.shutdown()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return script(CLUSTER, timeout=280)


def ray_findings(answer: dict[str, Any]) -> list[dict[str, str]]:
    return [finding for finding in json.loads(answer["out"])["findings"] if finding["check"] == "ray"]


def test_node_by_node(answers: dict[str, Any]) -> None:
    assert answers["json"]["code"] == 1
    answer = json.loads(answers["json"]["out"])
    assert len({node["node_id"] for node in answer["nodes"]}) == 3
    versions = [node["answer"]["verl_fixes"] for node in answer["nodes"]]
    assert sorted(versions) == ["", answer["verl_fixes"], answer["verl_fixes"]]
    assert {node["answer"]["verl"] for node in answer["nodes"]} == {answer["verl"]}
    assert {node["failure"] for node in answer["nodes"]} == {""}
    # A job of this driver gives its workers the driver's switches, so what `ray start` was given does not count.
    finding = ray_findings(answers["json"])
    assert [f["severity"] for f in finding] == ["error", "warning"]
    [missing] = [node for node in answer["nodes"] if not node["answer"]["verl_fixes"]]
    assert f"pip install verl-fixes=={answer['verl_fixes']}` on {missing['ip']}" in finding[0]["way_out"]


def test_the_table_marks_what_differs(answers: dict[str, Any]) -> None:
    table = answers["table"]["out"]
    assert answers["table"]["code"] == 1
    assert "this machine" in table
    assert table.count("not installed *") == 1


def test_the_cluster_is_left_as_it_was(answers: dict[str, Any]) -> None:
    assert answers["after"]
    assert answers["after"]["actors"] == 0
    assert answers["after"]["alive nodes"] == 3
    assert answers["after a hang"]


def test_fixes_that_differ_are_shown_with_both_sides(answers: dict[str, Any]) -> None:
    messages = [finding["message"] for finding in ray_findings(answers["strict"])]
    unlike = [message for message in messages if "this machine runs" in message]
    assert len(unlike) == 1  # the head; the third node has the same switch as this driver
    theirs, ours = unlike[0].split("this machine runs")
    assert "scalar-metrics disabled" in ours
    assert "scalar-metrics disabled" not in theirs


def test_batch_invariance_that_driver_and_nodes_do_not_share(answers: dict[str, Any]) -> None:
    """Only the third node was started with it: it is alone with it, or, where the driver has it, the others are."""
    third = "VLLM_BATCH_INVARIANT=1 (here 0)"
    others = "VLLM_BATCH_INVARIANT=0 (here 1)"
    for answer, words, count in (("json", third, 1), ("strict", others, 2)):
        messages = [f["message"] for f in ray_findings(answers[answer]) if "BATCH_INVARIANT" in f["message"]]
        assert len(messages) == count
        assert all(words in message for message in messages)


def test_a_node_that_hangs_is_unreachable_and_the_others_are_shown(answers: dict[str, Any]) -> None:
    assert answers["hung"]["code"] == 1
    nodes = json.loads(answers["hung"]["out"])["nodes"]
    assert sorted(bool(node["answer"]) for node in nodes) == [False, True, True]
    assert any("is unreachable: did not answer within 8 s" in f["message"] for f in ray_findings(answers["hung"]))


def test_nothing_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    done = python("-m", "verl_fixes", "doctor", "--ray", address, "--json", timeout=100)
    assert done.returncode == 1
    [finding] = ray_findings({"out": done.stdout})
    assert f"cannot ask the cluster at {address}: ConnectionError: nothing answers at" in finding["message"]


def test_something_listens_that_never_answers() -> None:
    with socket.socket() as silent:
        silent.bind(("", 0))  # Ray turns 127.0.0.1 into this machine's other address
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = python("-m", "verl_fixes", "doctor", "--ray", address, "--json", "--timeout", "5", timeout=100)
    assert done.returncode == 1
    [finding] = ray_findings({"out": done.stdout})
    assert finding["message"].endswith("the cluster did not answer within 5 s")
