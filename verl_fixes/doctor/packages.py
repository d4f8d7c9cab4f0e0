"""Which version of a package this Python would import, and from where. Reads files and metadata; imports nothing."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from verl_fixes import probe, report

VERL = "verl"
MEGATRON_CORE = "megatron-core"

PACKAGES = {
    VERL: "verl",
    "torch": "torch",
    MEGATRON_CORE: "megatron.core",
    "ray": "ray",
    "megatron-bridge": "megatron.bridge",
    "mbridge": "mbridge",
    "transformer-engine": "transformer_engine",
}
"""Distributions that decide what a fix meets, with the module that each of them is for."""

_VERSION_FILES = ("package_info.py", "version.py", "_version.py", "__init__.py")
_UNKNOWN = "of unknown version"


@dataclass(frozen=True)
class Installed:
    """A package that can be imported: its version and its folder."""

    name: str
    version: str
    folder: Path


def installed(name: str) -> Installed | None:
    """Look a package of :data:`PACKAGES` up; None when it cannot be imported.

    The folder that would be imported decides. Metadata counts only when it describes that folder: a checkout on
    PYTHONPATH hides an installed wheel, and the wheel's version says nothing about the checkout.
    """
    folder = _folder(PACKAGES[name])
    if folder is None:
        return None
    if name == VERL:
        return Installed(name, report.installed_verl() or _UNKNOWN, folder)
    return Installed(name, _version_by_metadata(name, folder) or _version_by_files(folder) or _UNKNOWN, folder)


def _folder(module: str) -> Path | None:
    package, *parts = module.split(".")
    source = probe.locate(package)
    folders = (root.joinpath(*parts) for root in source.roots) if source else iter(())
    return next((folder for folder in folders if folder.is_dir()), None)


def _version_by_metadata(name: str, folder: Path) -> str | None:
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return None
    described = Path(str(distribution.locate_file(PACKAGES[name].replace(".", "/"))))
    if described.resolve() != folder.resolve() and not _is_editable(distribution):
        return None
    return distribution.version


def _is_editable(distribution: metadata.Distribution) -> bool:
    return '"editable": true' in (distribution.read_text("direct_url.json") or "")


def _version_by_files(folder: Path) -> str | None:
    for file in (folder / name for name in _VERSION_FILES):
        constants = constants_of(file)
        if isinstance(constants.get("__version__"), str):
            return str(constants["__version__"])
        if all(isinstance(constants.get(part), int) for part in ("MAJOR", "MINOR", "PATCH")):
            return "{MAJOR}.{MINOR}.{PATCH}".format(**constants)  # as megatron-core has it
    return None


def constants_of(file: Path) -> dict[str, Any]:
    """The plain values that a module assigns to names at its top level; empty when the file cannot be read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    found = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if isinstance(statement.value, ast.Constant):
            found.update({target.id: statement.value.value for target in targets if isinstance(target, ast.Name)})
    return found


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, for a comparison; empty when it has none."""
    match = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in match.groups()) if match else ()
