"""Whether driver and workers agree on determinism, and whether vLLM's batch invariant operators follow the switch.

``rollout.full_determinism`` makes ``run_ppo`` set ``VLLM_BATCH_INVARIANT``, which ``get_ppo_ray_runtime_env`` gives to
every worker, ``0`` where it is not set. Nothing is given where Ray was initialised before ``run_ppo``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from verl_fixes import probe
from verl_fixes.doctor import invariant_operators
from verl_fixes.doctor.findings import Finding, error, info, ok, warning

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
FULL_DETERMINISM = "VERL_FULL_DETERMINISM"
SWITCHES = (FULL_DETERMINISM, BATCH_INVARIANT)
"""What driver and workers have to agree on."""

CHECK = "determinism"
_ASKING = {"CUBLAS_WORKSPACE_CONFIG": ("",), "PYTHONHASHSEED": ("", "random"), FULL_DETERMINISM: ("", "0")}
"""Variables that ask for a deterministic run, and their values that do not. A hash seed of 0 is a seed."""

_ASCEND = ("torch_npu", "vllm_ascend")


def is_on(value: str) -> bool:
    """As vLLM reads it, for which 0 and no value are off. What is no number counts as off, as in older vLLMs."""
    try:
        return int(value or "0") != 0
    except ValueError:
        return False


def shown(environ: Mapping[str, str], name: str) -> str:
    """A switch and its value, for people."""
    return f"{name}={environ[name]}" if environ.get(name) else f"{name} is not set"


def _knows_the_switch() -> bool:
    source = probe.locate("verl")
    return source is not None and source.says("verl.trainer.constants_ppo", BATCH_INVARIANT)


def determinism(environ: Mapping[str, str], forwarded: Mapping[str, str] | str | None = None) -> list[Finding]:
    """Whether full_determinism can hold. Only releases that know VLLM_BATCH_INVARIANT, 0.9.0 on.

    The configuration of a run is not known here, only what the environment says.

    Args:
        environ: this process's environment.
        forwarded: what ``main_ppo`` would give to its workers, or why verl does not say; None: it was not imported.
    """
    if not _knows_the_switch():
        return []
    return [_environment(environ), *([] if forwarded is None else [_workers(environ, forwarded)])]


def _environment(environ: Mapping[str, str]) -> Finding:
    value = environ.get(BATCH_INVARIANT, "").strip()
    if value and not value.lstrip("-").isdigit():
        message = f"{shown(environ, BATCH_INVARIANT)} is no number: vLLM stops, or takes it for off"
        return error(CHECK, message, f"Set {BATCH_INVARIANT}=1 or {BATCH_INVARIANT}=0.")
    if is_on(value):
        full = environ.get(FULL_DETERMINISM, "").strip()
        if full and not is_on(full):
            message = f"{shown(environ, BATCH_INVARIANT)} and {shown(environ, FULL_DETERMINISM)}: vLLM registers its "
            message += "slower, batch invariant operators for a run that is not to be deterministic"
            return warning(CHECK, message, f"Set both to 1, or both to 0, or unset {FULL_DETERMINISM}.")
        return ok(CHECK, shown(environ, BATCH_INVARIANT))
    off = shown(environ, BATCH_INVARIANT)
    asked = [name for name, no in _ASKING.items() if environ.get(name, "").strip() not in no]
    way_out = f"Set {BATCH_INVARIANT}=1, or rollout.full_determinism=True, with which main_ppo sets it."
    if asked:
        asked_by = ", ".join(f"{name}={environ[name]}" for name in asked)
        message = f"{asked_by} ask for a deterministic run, and {off}: vLLM's samples depend on the batch they are in"
        return warning(CHECK, message, way_out)
    message = f"{off}: full_determinism=True of an engine without it gives no batch invariance in vLLM"
    return info(CHECK, message, way_out)


def _workers(environ: Mapping[str, str], forwarded: Mapping[str, str] | str) -> Finding:
    if isinstance(forwarded, str):
        return info(CHECK, f"not checked: verl does not say what main_ppo gives to its workers: {forwarded}")
    for name in SWITCHES:
        if is_on(environ.get(name, "")) != is_on(forwarded.get(name, "")):
            message = f"main_ppo would give its workers {shown(forwarded, name)}; this process was started with "
            message += f"{name}={environ.get(name) or '0'}"
            way_out = f"A plugin of verl, or a module that it imports, changes {name}: let it leave {name} alone."
            return error(CHECK, message, way_out)
    given = ", ".join(shown(forwarded, name) for name in SWITCHES)
    return ok(CHECK, f"main_ppo gives its workers what this process has: {given}")


def of_a_node(label: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[Finding]:
    """Where a worker of a node, started in the environment of ``ray start``, differs from this process."""
    unlike = [name for name in SWITCHES if is_on(theirs.get(name, "")) != is_on(ours.get(name, ""))]
    if not unlike:
        return []
    sides = ", ".join(f"{name}={theirs.get(name) or '0'} (here {ours.get(name) or '0'})" for name in unlike)
    message = f"{label} has {sides}. main_ppo of verl 0.9 overrides this, unless Ray is initialised before it"
    way_out = f"Give `ray start` on that node the same {' and '.join(unlike)} as the driver, or none."
    return [warning("ray", message, way_out)]


def batch_invariance(timeout: float = 300) -> list[Finding]:
    """Whether vllm-ascend registers batch invariant operators with the switch on, and none with it off.

    Runs the real ``init_batch_invariance`` in two processes of their own, because it cannot be undone.

    Args:
        timeout: seconds for each of them.
    """
    check = "batch invariance"
    if not _knows_the_switch():
        return []
    missing = [name for name in _ASCEND if probe.locate(name) is None]
    if missing:
        message = f"not checked: {' and '.join(missing)} not installed; vLLM's own operators are not looked at"
        return [info(check, message)]
    answers = {}
    for value in ("0", "1"):
        answers[value] = _operators(value, timeout)
        if isinstance(answers[value], str):
            return [info(check, f"not checked: with {BATCH_INVARIANT}={value} {answers[value]}")]
    off, on = answers["0"], answers["1"]
    if off:
        message = f"with {BATCH_INVARIANT}=0 init_batch_invariance still registers {', '.join(off)}"
        return [error(check, message, "Take another vllm-ascend: every run would be slower than it has to be.")]
    if not on:
        message = f"with {BATCH_INVARIANT}=1 init_batch_invariance registers no operator: samples depend on the batch"
        return [error(check, message, "Install what vllm-ascend needs for them: Triton, or its AscendC operators.")]
    return [ok(check, f"init_batch_invariance registers {len(on)} operators with {BATCH_INVARIANT}=1, none with 0")]


def _operators(value: str, timeout: float) -> list[str] | str:
    """The operators that a process with this value registers, or why that is not known."""
    try:
        done = subprocess.run(
            [sys.executable, "-"],
            input=Path(invariant_operators.__file__).read_text(),
            env={**os.environ, BATCH_INVARIANT: value},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"init_batch_invariance did not return within {timeout:g} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or not lines:
        return f"it fails: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}"
    operators: list[str] = json.loads(lines[-1])
    return operators
