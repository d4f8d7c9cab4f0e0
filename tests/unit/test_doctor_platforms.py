"""verl's platform against the installed torch: each mismatch, and the neighbours that are none. No verl, no torch."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest

from tests.unit.conftest import Disk, only
from verl_fixes.doctor import loaded, platforms

MODULES = "VERL_USE_EXTERNAL_MODULES"
BUILTIN = ("nvidia", "huawei", "amd")


def check(wanted: str, detected: str | None = None) -> list[platforms.Finding]:
    return platforms.platform({"VERL_PLATFORM": wanted} if wanted else {}, frozenset(BUILTIN), detected)


class Case(NamedTuple):
    platform: str
    severity: str
    words: str
    hip: str | None = None
    cuda: str | None = None
    npu: bool = False


CASES = [
    Case("nvidia", "info", "not checked against torch, which is built for CPUs only"),
    Case("nvidia", "ok", "torch is built for CUDA 12.8", cuda="12.8"),
    Case("nvidia", "error", "torch is built for ROCm 6.4", hip="6.4"),
    Case("nvidia", "error", "torch_npu is installed: torch is not built for CUDA", npu=True),
    Case("nvidia", "warning", "torch_npu is installed beside a torch for CUDA 12.8", cuda="12.8", npu=True),
    Case("huawei", "ok", "torch_npu is installed", npu=True),
    Case("huawei", "error", "torch_npu is not installed"),
    Case("huawei", "error", "torch_npu is not installed", cuda="12.8"),
    Case("amd", "ok", "torch is built for ROCm 6.4", hip="6.4"),
    Case("amd", "error", "torch is built for CUDA 12.8", cuda="12.8"),
    Case("amd", "warning", "torch is built for CPUs only"),
]


@pytest.mark.parametrize("imported", [False, True], ids=["by its files", "imported"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.platform}-{case.hip}-{case.cuda}-{case.npu}")
def test_each_platform_with_each_torch(disk: Disk, monkeypatch: pytest.MonkeyPatch, case: Case, imported: bool) -> None:
    disk.verl(platforms=BUILTIN)
    disk.torch(case.hip, case.cuda)
    if case.npu:
        disk.write("torch_npu/__init__.py", "raise SystemExit('torch_npu was imported')")
    if imported:  # then this one counts, whatever the files say
        disk.torch("1.0", "1.0")
        torch = ModuleType("torch")
        torch.version = SimpleNamespace(hip=case.hip, cuda=case.cuda)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch", torch)
    asked = [only(check(case.platform.upper())), only(check(case.platform, case.platform))]
    for finding in asked:
        assert (str(finding.severity), case.words in finding.message) == (case.severity, True), finding
        assert finding.message.startswith(f"VERL_PLATFORM={case.platform}")
        assert bool(finding.way_out) is (case.severity in ("error", "warning"))
    if (case.platform, case.severity) != ("amd", "ok"):  # of which there is more to say
        finding = only(check("", case.platform))
        assert (str(finding.severity), case.words in finding.message) == (case.severity, True), finding
        assert f"verl takes this machine for {case.platform}" in finding.message


def test_what_nobody_asked_for_and_nobody_detected(disk: Disk) -> None:
    disk.verl(platforms=BUILTIN)
    disk.torch()
    assert check("") == []
    disk.torch("6.4")
    for detected in (None, "amd"):  # right in this process; another one may see no GPU
        finding = only(check("", detected))
        assert (str(finding.severity), "VERL_PLATFORM is not set" in finding.message) == ("warning", True)


def test_the_fallback_is_named(disk: Disk) -> None:
    disk.verl(platforms=BUILTIN)
    disk.torch()
    assert "where it finds no accelerator" in only(check("", "nvidia")).message
    assert "where it finds no accelerator" not in only(check("nvidia", "nvidia")).message


def test_a_platform_that_was_replaced(disk: Disk) -> None:
    disk.verl(platforms=BUILTIN)
    disk.torch(cuda="12.8")
    finding = only(check("nvidia", "huawei"))
    assert (str(finding.severity), "a plugin has replaced" in finding.message) == ("warning", True)


def test_platforms_of_a_plugin_and_a_verl_without_platforms(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.verl()
    disk.torch("6.4")
    assert platforms.platform({}, None) == []
    assert only(platforms.platform({"VERL_PLATFORM": "metax"}, None)).severity == "info"
    disk.verl(platforms=("nvidia",))
    assert "has no platform for it" in only(platforms.platform({}, None)).message
    metax = {"VERL_PLATFORM": "metax", MODULES: "verl_metax"}
    known = only(platforms.platform(metax, frozenset({"metax"})))
    assert (str(known.severity), "not checked against torch" in known.message) == ("info", True)
    unknown = only(platforms.platform(metax, frozenset({"nvidia"})))
    assert (str(unknown.severity), "Registered: nvidia" in unknown.message) == ("error", True)
    assert "not checked" in only(platforms.platform(metax, None)).message
    monkeypatch.setattr(platforms.metadata, "entry_points", lambda group: ())
    assert only(platforms.platform({"VERL_PLATFORM": "metax"}, None)).severity == "error"


def test_the_platform_of_this_process_by_its_registered_name(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded.detected_platform() == (None, "")

    class Rocm:
        vendor_name = "a vendor"

    class Replaced(Rocm): ...

    manager = ModuleType("verl.plugin.platform.platform_manager")
    registry = SimpleNamespace(registered_names=lambda: ("nvidia", "amd"), get={"nvidia": int, "amd": Rocm}.get)
    manager.PlatformRegistry, manager.get_platform = registry, Rocm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, manager.__name__, manager)
    assert loaded.detected_platform() == (None, "")  # verl's own import failed after this module
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    assert loaded.detected_platform() == ("amd", "")
    manager.get_platform = Replaced  # type: ignore[attr-defined]
    assert loaded.detected_platform() == ("a vendor", "")
    manager.get_platform = lambda: 1 / 0  # type: ignore[attr-defined]
    assert loaded.detected_platform() == (None, "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    "wanted, words", [("huawei", "torch_npu is not installed"), ("nvidia", "no driver"), ("", "no driver")]
)
def test_a_platform_that_cannot_be_made(disk: Disk, wanted: str, words: str) -> None:
    disk.verl(platforms=BUILTIN)
    disk.torch(cuda="12.8")
    variables = {"VERL_PLATFORM": wanted} if wanted else {}
    finding = only(platforms.platform(variables, frozenset(BUILTIN), None, "RuntimeError: no driver"))
    assert (str(finding.severity), words in finding.message) == ("error", True)
