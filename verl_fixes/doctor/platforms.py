"""The platform that verl takes this machine for, against the torch that is installed. verl has platforms from 0.9.0 on.

verl asks nvidia, huawei and amd in this order, takes the first that answers, and nvidia where none does: the same
machine can be another platform to a process that sees neither a GPU nor the vendor's tool.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from verl_fixes import probe, propagation
from verl_fixes.doctor import packages
from verl_fixes.doctor.findings import Finding, error, info, ok, warning

PLATFORM = "VERL_PLATFORM"
CHECK = "platform"


@dataclass(frozen=True)
class Torch:
    """What torch can drive: the ROCm and the CUDA that it was built for, and whether torch_npu is installed."""

    hip: str = ""
    cuda: str = ""
    npu: bool = False

    @property
    def words(self) -> str:
        """What it was built for, for people."""
        builds = [f"ROCm {self.hip}" if self.hip else "", f"CUDA {self.cuda}" if self.cuda else ""]
        return " and ".join(filter(None, builds)) or "CPUs only"


def installed_torch() -> Torch:
    """The torch of this process, where it is imported, else what its files say."""
    module = sys.modules.get("torch")
    if module is not None:
        constants = vars(getattr(module, "version", None) or module)
    else:
        found = packages.installed("torch")
        constants = packages.constants_of(found.folder / "version.py") if found else {}
    return Torch(constants.get("hip") or "", constants.get("cuda") or "", probe.locate("torch_npu") is not None)


def platform(
    environ: Mapping[str, str],
    registered: frozenset[str] | None = None,
    detected: str | None = None,
    trouble: str = "",
) -> list[Finding]:
    """Whether verl takes the machine for what torch can drive.

    Args:
        environ: this process's environment.
        registered: the platforms that verl knows after its import, with those of plugins; None: only its files say.
        detected: the platform that verl has taken in this process; None: it was not imported, or could not make one.
        trouble: why verl could not make one.
    """
    source = probe.locate("verl")
    in_files = _platforms(source) if source else frozenset()
    wanted = environ.get(PLATFORM, "").strip().lower()
    if not in_files:
        return [info(CHECK, f"this verl has no platform layer; {PLATFORM} has no effect")] if wanted else []
    names = in_files | (registered or frozenset())
    if wanted and wanted not in names:
        known = ", ".join(sorted(names))
        message = f"{PLATFORM}={wanted} names a platform that verl does not know. Registered: {known}"
        if registered is None and _foreign_plugins(environ):
            return [info(CHECK, f"not checked: {message}; a plugin may register it, and verl was not imported here")]
        return [error(CHECK, message, f"Set {PLATFORM} to one of these, or install the plugin that registers it.")]
    if wanted and detected and wanted != detected:
        message = f"{PLATFORM}={wanted}, and verl takes this machine for {detected}: a plugin has replaced the platform"
        return [warning(CHECK, message, f"Set {PLATFORM}={detected}, or take the plugin out.")]
    torch = installed_torch()
    if trouble:
        mismatch = _mismatch(wanted, f"{PLATFORM}={wanted}", torch)
        way_out = f"Set {PLATFORM} to the platform of this machine."
        return [mismatch or error(CHECK, f"verl cannot make the platform of this machine: {trouble}", way_out)]
    return _against_torch(wanted, detected, names, torch)


def _against_torch(wanted: str, detected: str | None, names: frozenset[str], torch: Torch) -> list[Finding]:
    taken = wanted or detected
    said = f"{PLATFORM}={wanted}" if wanted else f"verl takes this machine for {detected}"
    if taken and (found := _mismatch(taken, said, torch)):
        return [found]
    if torch.hip and not wanted:
        return [_unset_on_rocm(torch.hip, names)]
    if not taken:
        return []
    if taken == "huawei":
        return [ok(CHECK, f"{said}, and torch_npu is installed")]
    if (taken == "nvidia" and torch.cuda) or (taken == "amd" and torch.hip):
        return [ok(CHECK, f"{said}, and torch is built for {torch.words}")]
    fallback = "" if wanted or taken != "nvidia" else ", as it does where it finds no accelerator"
    return [info(CHECK, f"{said}{fallback}; not checked against torch, which is built for {torch.words}")]


def _mismatch(taken: str, said: str, torch: Torch) -> Finding | None:
    """What is wrong with running on platform ``taken``; None where nothing is, and for platforms of plugins."""
    if taken == "nvidia" and torch.hip:
        return error(CHECK, f"{said}, and torch is built for ROCm {torch.hip}", f"Set {PLATFORM}=amd on every node.")
    if taken == "nvidia" and torch.npu:
        way_out = f"Set {PLATFORM}=huawei on every node, or uninstall torch_npu where there is no NPU."
        if torch.cuda:
            message = f"{said}, and torch_npu is installed beside a torch for CUDA {torch.cuda}: which one is meant?"
            return warning(CHECK, message, way_out)
        return error(CHECK, f"{said}, and torch_npu is installed: torch is not built for CUDA", way_out)
    if taken == "huawei" and not torch.npu:
        way_out = f"Install torch_npu, or unset {PLATFORM}."
        return error(CHECK, f"{said}, and torch_npu is not installed: verl's engines cannot be imported", way_out)
    if taken == "amd" and not torch.hip:
        way_out = f"Install torch for ROCm, or unset {PLATFORM}."
        say = error if torch.cuda else warning  # a driver without GPU may well have a torch for CPUs
        return say(CHECK, f"{said}, and torch is built for {torch.words}", way_out)
    return None


def _unset_on_rocm(hip: str, names: frozenset[str]) -> Finding:
    way_out = f"Set {PLATFORM}=amd on every node."
    if "amd" not in names:
        message = f"torch is built for ROCm {hip}, and this verl, which has no platform for it, takes it for nvidia"
        return warning(CHECK, message, f"Take a verl that registers amd. {way_out}")
    message = (
        f"torch is built for ROCm {hip} and {PLATFORM} is not set: verl takes a process that sees neither a GPU nor "
        "rocm-smi, such as a CPU-only actor, for nvidia"
    )
    return warning(CHECK, message, way_out)


def _platforms(source: probe.Source) -> frozenset[str]:
    """The names that verl's own files give to ``PlatformRegistry.register``."""
    files = (file for root in source.roots for file in sorted((root / "plugin" / "platform").glob("*.py")))
    return frozenset(name for file in files for name in _registered_in(file.read_bytes()))


def _registered_in(code: bytes) -> Iterator[str]:
    try:
        classes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef)]
    except (SyntaxError, ValueError):
        return
    for call in (decorator for cls in classes for decorator in cls.decorator_list if isinstance(decorator, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "register":
            values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "platform")]
            yield from (
                value.value.strip().lower()
                for value in values
                if isinstance(value, ast.Constant) and isinstance(value.value, str)
            )


def _foreign_plugins(environ: Mapping[str, str]) -> bool:
    modules = {name.strip() for name in environ.get(propagation.EXTERNAL_MODULES, "").split(",")}
    points = {point.name for point in metadata.entry_points(group="verl.plugins")}
    return bool((modules | points) - {"", propagation.PACKAGE})
