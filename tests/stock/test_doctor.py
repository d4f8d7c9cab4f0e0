"""The doctor on a real release: what it says of a sound installation, and the faults that are planted for it."""

from __future__ import annotations

import json
from typing import Any

from tests.processes import python, script

PLUGIN = {"VERL_USE_EXTERNAL_MODULES": "verl_fixes"}


def _findings(*arguments: str, code: int, **variables: str) -> dict[str, list[dict[str, Any]]]:
    done = python("-m", "verl_fixes", "doctor", "--json", *arguments, **variables)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    findings: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        findings.setdefault(finding["check"], []).append(finding)
    return findings


def _severities(findings: list[dict[str, Any]]) -> set[str]:
    return {finding["severity"] for finding in findings}


def test_a_sound_installation(release: str) -> None:
    found = _findings(code=0, **PLUGIN)
    assert _severities(found["route"]) == {"ok"}
    assert f"verl {release} in " in found["versions"][0]["message"]
    assert _severities(found["early-bound names"]) == {"ok"}
    assert _severities(found["serialization"]) == {"ok"}
    assert _severities(found["patch scalar-metrics"]) == {"ok"}
    assert _severities(found["router losses"]) == {"ok"}
    assert "moe-aux-scale" in found["router losses"][0]["message"]
    assert ("router replay" in found) is (release == "0.7.1")  # whose Megatron engine cannot record
    for check in ("platform", "determinism", "batch invariance"):
        assert (check in found) is (release >= "0.9")
    if release >= "0.9":
        assert _severities(found["platform"]) <= {"ok", "info"}
        assert _severities(found["determinism"]) == {"info", "ok"}  # the environment, and what workers get
        assert found["batch invariance"][0]["message"].startswith("not checked: ")
    for name in ("torchtitan", "nemo_automodel"):  # not installed, so not checked: never in order
        said = [finding for finding in found.get("imports", []) if f"'{name}'" in finding["message"]]
        assert _severities(said) <= {"info"}


def test_the_route_and_the_platform(release: str) -> None:
    new = release >= "0.9"
    assert _severities(_findings(code=0)["route"]) == {"ok" if new else "warning"}
    found = _findings(code=1 if new else 0, VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM="metax")
    assert _severities(found["route"]) == {"warning"}
    assert _severities(found["platform"]) == {"error" if new else "info"}


FAULTS = """
import json
import verl_fixes
from verl_fixes import wrapping
from verl_fixes.doctor import loaded

if {early}:
    verl_fixes.deactivate()
    import verl.workers.engine_workers as workers
    class Report:
        postprocess = workers.TrainingWorker._postprocess_output
    workers.Report = Report
    verl_fixes.activate()
import verl.workers.engine_workers as workers
if {proxy}:
    import wrapt
    [stack] = [s for s in wrapping._stacks if s.spots[0][1] == "_postprocess_output"]
    stack.put = wrapt.FunctionWrapper(stack.base, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    workers.TrainingWorker._postprocess_output = stack.put
if {unpicklable}:
    import threading
    lock = threading.Lock()
    def method(self):
        return lock
    workers.TrainingWorker.method = method
print(json.dumps([[f.as_dict() for f in check()] for check in (loaded.early_bound, loaded.serialization)]))
"""


def _faults(**planted: bool) -> list[list[dict[str, str]]]:
    switches = {"early": False, "proxy": False, "unpicklable": False, **planted}
    return script(FAULTS.format(**switches))


def test_a_name_that_was_bound_early() -> None:
    early, sent = _faults(early=True)
    assert [finding["severity"] for finding in early] == ["error"]
    assert "__main__.Report.postprocess still is the function without scalar-metrics" in str(early)
    assert _severities(sent) == {"ok"}


def test_a_wrapper_that_ray_drops() -> None:
    _, sent = _faults(proxy=True)
    assert [finding["severity"] for finding in sent] == ["error"]
    assert "TrainingWorker would run _postprocess_output without the fix" in sent[0]["message"]


def test_a_class_that_ray_cannot_send() -> None:
    _, sent = _faults(unpicklable=True)
    assert [finding["severity"] for finding in sent] == ["error"]
    assert "Ray cannot send verl.workers.engine_workers.TrainingWorker: TypeError" in sent[0]["message"]
