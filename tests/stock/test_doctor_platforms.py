"""The doctor on verl's real platform layer: what verl detects, and what it gives to workers. Only verl 0.9.

Torch builds and accelerator packages are not here: ``torch.version.hip`` is set before verl is imported, and torch_npu
and vllm_ascend are stubs on the path, whose registration with torch's real ``Library`` is all that they do.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.processes import environment, script
from tests.stock.conftest import RELEASE

pytestmark = pytest.mark.skipif(RELEASE < "0.9", reason="this release has no platform layer")

IN_ONE_PROCESS = """
import json, os
import torch
if {hip!r}:
    torch.version.hip = {hip!r}
environ = dict(os.environ)
import verl
{then}
from verl_fixes.doctor import determinism, loaded, platforms
found = platforms.platform(environ, loaded.registered_platforms(), *loaded.detected_platform())
found += determinism.determinism(environ, loaded.forwarded_to_workers())
found += determinism.batch_invariance()
print(json.dumps([[f.check, str(f.severity), f.message] for f in found]))
"""


def _findings(hip: str = "", then: str = "", **variables: str) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for check, severity, message in script(IN_ONE_PROCESS.format(hip=hip, then=then), **variables):
        found.setdefault(check, []).append((severity, message))
    return found


def test_rocm_that_verl_takes_for_nvidia() -> None:
    """No GPU and no rocm-smi here, as on a head node: verl falls back to nvidia."""
    [(severity, message)] = _findings("6.4")["platform"]
    assert (severity, message) == ("error", "verl takes this machine for nvidia, and torch is built for ROCm 6.4")


def test_rocm_that_is_told_so_and_workers_that_agree() -> None:
    found = _findings("6.4", VERL_PLATFORM="amd", VLLM_BATCH_INVARIANT="1", VERL_FULL_DETERMINISM="1")
    assert found["platform"] == [("ok", "VERL_PLATFORM=amd, and torch is built for ROCm 6.4")]
    assert [severity for severity, _ in found["determinism"]] == ["ok", "ok"]
    assert found["determinism"][1][1].endswith("VERL_FULL_DETERMINISM=1, VLLM_BATCH_INVARIANT=1")


def test_no_accelerator_and_a_module_that_switches_invariance_on_behind_the_drivers_back() -> None:
    found = _findings(then="os.environ['VLLM_BATCH_INVARIANT'] = '1'")
    [(severity, message)] = found["platform"]
    assert (severity, "not checked against torch" in message) == ("info", True)
    assert [severity for severity, _ in found["determinism"]] == ["info", "error"]
    assert "main_ppo would give its workers VLLM_BATCH_INVARIANT=1" in found["determinism"][1][1]


TORCH_NPU = """
import sys, types
import torch
torch.npu = sys.modules["torch.npu"] = types.ModuleType("torch.npu")
torch.npu.is_available, torch.npu.device_count = lambda: False, lambda: 0
"""
VLLM_ASCEND = """
import os
import torch
def init_batch_invariance():
    global library
    if int(os.environ["VLLM_BATCH_INVARIANT"]):
        library = torch.library.Library("aten", "IMPL")
        library.impl("aten::mm", lambda a, b: a, "PrivateUse1")
        library.impl("aten::bmm", lambda a, b: a, "PrivateUse1")
"""


@pytest.fixture
def ascend(tmp_path: Path) -> str:
    """The path with stubs of torch_npu and vllm_ascend at its head."""
    for file, text in (("torch_npu/__init__", TORCH_NPU), ("vllm_ascend/batch_invariant", VLLM_ASCEND)):
        (tmp_path / file).parent.mkdir()
        (tmp_path / f"{file.partition('/')[0]}/__init__.py").touch()
        (tmp_path / f"{file}.py").write_text(text)
    return os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])


def test_huawei_and_the_operators_of_vllm_ascend(ascend: str) -> None:
    found = _findings(PYTHONPATH=ascend)
    assert found["platform"] == [("ok", "verl takes this machine for huawei, and torch_npu is installed")]
    message = "init_batch_invariance registers 2 operators with VLLM_BATCH_INVARIANT=1, none with 0"
    assert found["batch invariance"] == [("ok", message)]


def test_huawei_without_torch_npu() -> None:
    """Stock verl can be imported then; whatever asks for the device fails, its engines among them."""
    found = _findings(VERL_PLATFORM="huawei")
    [(severity, message)] = found["platform"]
    assert (severity, "torch_npu is not installed" in message) == ("error", True)
    [(severity, message)] = found["batch invariance"]
    assert (severity, message.startswith("not checked: ")) == ("info", True)
    severity, message = found["determinism"][1]
    assert (severity, message.startswith("not checked: verl does not say")) == ("info", True)
