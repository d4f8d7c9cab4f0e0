"""full_determinism and VLLM_BATCH_INVARIANT, in driver, workers and vllm-ascend. What is outside are stubs on disk."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tests.unit.conftest import Disk, only
from verl_fixes.doctor import determinism, loaded, nodes
from verl_fixes.doctor.nodes import Cluster, Node

INVARIANT, FULL = "VLLM_BATCH_INVARIANT", "VERL_FULL_DETERMINISM"
KNOWS = f'KEYS = ("{INVARIANT}",)'


@pytest.mark.parametrize(
    "variables, severity, words",
    [
        ({}, "info", "is not set"),
        ({"PYTHONHASHSEED": "random"}, "info", "is not set"),
        ({FULL: "0"}, "info", "is not set"),
        ({FULL: "0", INVARIANT: "0"}, "info", f"{INVARIANT}=0"),
        ({"PYTHONHASHSEED": "0"}, "warning", "PYTHONHASHSEED=0 ask"),
        ({FULL: "1"}, "warning", f"{FULL}=1 ask"),
        ({FULL: "1", INVARIANT: "0"}, "warning", f"{INVARIANT}=0"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8", INVARIANT: "0"}, "warning", "CUBLAS_WORKSPACE_CONFIG=:16:8 ask"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8", INVARIANT: "1"}, "ok", f"{INVARIANT}=1"),
        ({INVARIANT: "1"}, "ok", f"{INVARIANT}=1"),
        ({INVARIANT: " 1 ", FULL: "1"}, "ok", INVARIANT),
        ({INVARIANT: "1", FULL: "0"}, "warning", "not to be deterministic"),
        ({INVARIANT: "true"}, "error", "is no number"),
    ],
)
def test_the_environment(disk: Disk, variables: dict[str, str], severity: str, words: str) -> None:
    disk.verl(constants=KNOWS)
    finding = only(determinism.determinism(variables))
    assert (str(finding.severity), words in finding.message) == (severity, True), finding
    disk.verl(constants="KEYS = ()")
    assert determinism.determinism(variables, {}) == []


@pytest.mark.parametrize(
    "variables, forwarded, severity, words",
    [
        ({}, {INVARIANT: "0", FULL: "0"}, "ok", f"{INVARIANT}=0"),
        ({INVARIANT: "1", FULL: "1"}, {INVARIANT: "1", FULL: "1"}, "ok", f"{INVARIANT}=1"),
        ({INVARIANT: "1"}, {INVARIANT: "0", FULL: "0"}, "error", f"workers {INVARIANT}=0"),
        ({INVARIANT: "1"}, {}, "error", f"workers {INVARIANT} is not set"),
        ({}, {INVARIANT: "1", FULL: "0"}, "error", f"started with {INVARIANT}=0"),
        ({FULL: "0"}, {INVARIANT: "0", FULL: "1"}, "error", f"started with {FULL}=0"),
    ],
)
def test_what_the_workers_get(
    disk: Disk, variables: dict[str, str], forwarded: dict[str, str], severity: str, words: str
) -> None:
    disk.verl(constants=KNOWS)
    _, finding = determinism.determinism(variables, forwarded)
    assert (str(finding.severity), words in finding.message) == (severity, True), finding


def test_what_is_forwarded_is_asked_of_verl(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.verl(constants="def get_ppo_ray_runtime_env(): return {'env_vars': {'A': 1}}")
    assert loaded.forwarded_to_workers() is None
    verl = ModuleType("verl")
    verl.__path__ = [str(disk.folder / "verl")]
    monkeypatch.setitem(sys.modules, "verl", verl)
    try:
        assert loaded.forwarded_to_workers() == {"A": "1"}
        del sys.modules["verl.trainer.constants_ppo"].get_ppo_ray_runtime_env
        reason = loaded.forwarded_to_workers()
    finally:
        for name in [name for name in sys.modules if name.startswith("verl.")]:
            del sys.modules[name]
    assert isinstance(reason, str)
    monkeypatch.delitem(sys.modules, "verl")
    disk.verl(constants=KNOWS)
    _, finding = determinism.determinism({}, reason)
    assert (str(finding.severity), finding.message.startswith("not checked: ")) == ("info", True)


ANSWER = dict.fromkeys((*nodes.COLUMNS, "trouble", INVARIANT, FULL), "") | {"verl_fixes": "0.1.0"}


def node(**variables: str) -> Node:
    return Node("ab" * 14, "10.0.0.2", "gpu-2", {**ANSWER, **variables})


@pytest.mark.parametrize(
    "there, here, words",
    [
        ({}, {}, ""),
        ({INVARIANT: "0"}, {}, ""),
        ({INVARIANT: "1"}, {INVARIANT: "1", FULL: "0"}, ""),
        ({INVARIANT: "1"}, {}, f"{INVARIANT}=1 (here 0)"),
        ({}, {INVARIANT: "1"}, f"{INVARIANT}=0 (here 1)"),
        ({FULL: "1"}, {FULL: "0"}, f"{FULL}=1 (here 0)"),
    ],
)
def test_a_node_that_differs(there: dict[str, str], here: dict[str, str], words: str) -> None:
    finding = only(nodes.findings("auto", Cluster(node(**here), (node(**there),)), {}))
    assert str(finding.severity) == ("warning" if words else "ok")
    assert words in finding.message
    silent = Node("cd" * 14, "10.0.0.3", "gpu-3", failure="did not answer")
    assert len(nodes.findings("auto", Cluster(node(**here), (silent,)), {})) == 1


TORCH = """
from types import SimpleNamespace
class Library:
    def __init__(self, *args): ...
    def impl(self, name, function, key): ...
library = SimpleNamespace(Library=Library)
"""
ASCEND = """
import os, torch
print("[noise]" * 0, "loading")
torch.library.Library("aten", "IMPL").impl("aten::of_the_import", None, "NPU")
def init_batch_invariance():
    on = {condition}
    if on:
        library = torch.library.Library("aten", "IMPL")
        library.impl("aten::mm", None, "NPU")
        library.impl("aten::sum", None, "NPU")
"""
FOLLOWS = "int(os.environ['VLLM_BATCH_INVARIANT']) != 0"


@pytest.mark.parametrize(
    "condition, severity, words",
    [
        (FOLLOWS, "ok", "registers 2 operators with VLLM_BATCH_INVARIANT=1, none with 0"),
        ("True", "error", "with VLLM_BATCH_INVARIANT=0 init_batch_invariance still registers aten::mm, aten::sum"),
        ("False", "error", "with VLLM_BATCH_INVARIANT=1 init_batch_invariance registers no operator"),
        ("1 / 0", "info", "not checked: with VLLM_BATCH_INVARIANT=0 it fails: ZeroDivisionError"),
        ("__import__('time').sleep(60)", "info", "not checked: with VLLM_BATCH_INVARIANT=0 init_batch_invariance did"),
    ],
)
def test_vllm_ascend(disk: Disk, monkeypatch: pytest.MonkeyPatch, condition: str, severity: str, words: str) -> None:
    """The stub registers where its condition holds; it stands for vllm-ascend, which needs an NPU's packages."""
    disk.verl(constants=KNOWS)
    disk.write("torch/__init__.py", TORCH)
    disk.write("torch_npu/__init__.py")
    disk.write("vllm_ascend/__init__.py")
    disk.write("vllm_ascend/batch_invariant.py", ASCEND.format(condition=condition))
    monkeypatch.setenv("PYTHONPATH", str(disk.folder))
    monkeypatch.setenv(INVARIANT, "1")
    finding = only(determinism.batch_invariance(timeout=2 if "sleep" in condition else 60))
    assert (str(finding.severity), words in finding.message) == (severity, True), finding


def test_vllm_ascend_is_not_called_in_order_where_it_cannot_be_asked(disk: Disk) -> None:
    assert determinism.batch_invariance() == []  # no verl that knows the switch
    disk.verl(constants=KNOWS)
    for package in ("", "torch_npu", "vllm_ascend"):
        if package:
            disk.write(f"{package}/__init__.py")
        finding = only(determinism.batch_invariance())
        assert str(finding.severity) == "info"
        assert finding.message.startswith("not checked: ")
    assert "not checked: with VLLM_BATCH_INVARIANT=0 it fails: ModuleNotFoundError" in finding.message
