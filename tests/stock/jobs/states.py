"""Imports every module that a patch targets and says what became of the targets."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import verl_fixes
from tests.stock.optional_engines import optional_packages
from verl_fixes.catalog import CATALOG
from verl_fixes.patch import Target
from verl_fixes.probe import fingerprint, locate


def import_targets() -> None:
    """Import all modules with a target that this release has, optional packages as stand-ins."""
    with optional_packages():
        for name in dict.fromkeys(target.module for patch in CATALOG for target in patch.targets):
            source = locate(name.partition(".")[0])
            if source is not None and source.file(name):
                importlib.import_module(name)


def _found(target: Target) -> Any:
    try:
        owner: Any = importlib.import_module(target.module)
    except ImportError:
        return None
    *classes, name = target.qualname.split(".")
    for cls in classes:
        owner = getattr(owner, cls, None)
    return owner and inspect.getattr_static(owner, name, None)


def states() -> dict[str, Any]:
    """State of each patch and target with everything imported, and whether ``deactivate()`` puts the originals back."""
    verl_fixes.deactivate()
    import_targets()
    targets = [target for patch in CATALOG for target in patch.targets]
    before = [_found(target) for target in targets]
    records = verl_fixes.activate(enable=[patch.name for patch in CATALOG])
    during = [_found(target) for target in targets]
    installed = {
        t.module + ":" + t.qualname for r in records for t in r.targets if t.state.value in ("applied", "refined")
    }
    changed = {str(target) for target, old, new in zip(targets, before, during, strict=True) if old is not new}
    verl_fixes.deactivate()
    after = [_found(target) for target in targets]
    return {
        "patches": {r.name: str(r.state) for r in records},
        "targets": {
            r.name: {t.module.split(".")[-2:][0] + "." + t.qualname: str(t.state) for t in r.targets} for r in records
        },
        "installed but not changed": sorted(installed - changed),
        "changed but not installed": sorted(changed - installed),
        "not restored": [str(t) for t, old, new in zip(targets, before, after, strict=True) if old is not new],
        "disabled": sorted({str(record.state) for record in verl_fixes.status()}),
    }


def judgements() -> list[list[str]]:
    """For each target of this release: the verdict by fingerprint, and by the structural question."""
    answers = []
    for patch in CATALOG:
        for target in patch.targets:
            source = locate(target.module.partition(".")[0])
            if target.question is None or source is None or not target.known:
                continue
            function = source.function(target.module, target.judged)
            if function is not None:
                known = target.known.get(fingerprint(function))
                answers.append([str(target), known.name if known else "", target.question(function, source).name])
    return answers
