"""Settings of router replay with which a run cannot work are refused at start: R2 with bypass_mode, 0.7.1's engine.

R2 replays the routes that the actor records while it recomputes ``old_log_probs``. Bypass mode takes the rollout's log
probabilities instead and skips that pass, so there are no routes, and the run stops at the first update, after a whole
rollout. verl 0.9.1 refuses it in ``validate_config``. The fully asynchronous trainer, whose configuration has
bypass_mode on, and recipes with a task runner of their own do not go through ``validate_config``; they start in
``run_ppo``.

Source: https://github.com/verl-project/verl/pull/7805
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any

from verl_fixes import probe
from verl_fixes.arguments import Call
from verl_fixes.errors import UnsupportedSettingError
from verl_fixes.patch import Target
from verl_fixes.probe import Function, Source, Verdict, mentions

_ACTOR = "actor_rollout_ref.actor"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_CONFIG = "verl.utils.config"


def reject_r2_with_bypass_mode(config: Any, legacy: bool) -> None:
    """Stop before anything runs when routes are to be replayed that nobody records.

    Args:
        config: verl's whole configuration.
        legacy: whether this release has the legacy workers, which read another setting than the engines.

    Raises:
        UnsupportedSettingError: R2 is on where the run reads it, and so is bypass_mode.
    """
    if not _at(config, _BYPASS):
        return
    setting = replay_setting(config, legacy)
    if _at(config, setting) == "R2":
        raise UnsupportedSettingError(
            f"r2-replay: {setting}=R2 with {_BYPASS}=True. R2 replays the routes that the actor records while it "
            "recomputes old_log_probs, and bypass_mode skips this pass: the first update would find no routes. Way "
            f"out: {_BYPASS}=False, or {setting}=R3, which replays the rollout's routes "
            "(actor_rollout_ref.rollout.enable_rollout_routing_replay=True), or disabled. VERL_FIXES_R2_REPLAY=0 runs "
            "stock verl, without this check and without the fix."
        )


def replay_setting(config: Any, legacy: bool) -> str:
    """Dotted name of the router replay mode that the actor of this run reads; the others have no effect."""
    strategy = _at(config, f"{_ACTOR}.strategy")
    if legacy and strategy == "megatron" and _at(config, "trainer.use_legacy_worker_impl") != "disable":
        return f"{_ACTOR}.router_replay.mode"
    return f"{_ACTOR}.{strategy}.router_replay.mode"


def engine_cannot_record(source: Source) -> str:
    """Why the Megatron engine of this verl cannot record routes, in words; empty where it can. True of verl 0.7.1."""
    record = source.function("verl.utils.megatron.router_replay_utils", "merge_router_topk_indices")
    for wanted, name in _unpacked_calls(record) if record else ():
        called = source.function("verl.models.mcore.util", name)
        values = probe.returns(called) if called else []
        returned = {len(value.elts) for value in values if isinstance(value, ast.Tuple)}
        if returned and wanted not in returned:
            return f"it unpacks {wanted} values of {name}(), which returns {max(returned)}"
    return ""


def _unpacked_calls(function: Function) -> Iterator[tuple[int, str]]:
    """``a, b = name(...)``: how many values are unpacked, and the name."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
            continue
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            yield len(node.targets[0].elts), node.value.func.id


@functools.cache
def refuse_broken_engine() -> None:
    """Router replay is on in a Megatron engine: stop where it cannot work, R3 included.

    Raises:
        UnsupportedSettingError: the engine of verl 0.7.1.
    """
    source = probe.locate("verl")
    if source is not None and (why := engine_cannot_record(source)):
        raise UnsupportedSettingError(
            f"r2-replay: router replay cannot work with this verl's Megatron engine: {why}. Way out: the legacy "
            "workers (trainer.use_legacy_worker_impl=auto and "
            f"{_ACTOR}.router_replay.mode), or {_ACTOR}.megatron.router_replay.mode=disabled, or verl 0.8.0 or later. "
            "VERL_FIXES_R2_REPLAY=0 runs stock verl, without this check and without the fix."
        )


def _at(config: Any, dotted: str) -> Any:
    """A value of the configuration, None where a part of its name is missing."""
    return functools.reduce(lambda node, name: getattr(node, name, None), dotted.split("."), config)


def check_settings(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``validate_config(config, ...)`` and ``run_ppo(config, ...)``."""
    call = Call(original, ("config",), args, kwargs)
    config, legacy = call["config"], _has_legacy_workers(probe.locate("verl"))
    setting = replay_setting(config, legacy)
    if setting.endswith(".megatron.router_replay.mode") and _at(config, setting) in ("R2", "R3"):
        refuse_broken_engine()
    reject_r2_with_bypass_mode(config, legacy)
    return call()


def _has_legacy_workers(source: Source | None) -> bool:
    return source is not None and source.file("verl.workers.megatron_workers") is not None


def _validates(function: Function, source: Source) -> Verdict:
    if not mentions(function, "actor_rollout_ref"):
        return Verdict.DRIFTED
    return Verdict.FIXED if _refuses(function, source, _CONFIG) else Verdict.BUGGY


def _starts(function: Function, source: Source) -> Verdict:
    if not (mentions(function, "task_runner_class") and mentions(function, "remote")):
        return Verdict.DRIFTED
    if _refuses(function, source, "verl.trainer.main_ppo"):
        return Verdict.FIXED
    validate = source.function(_CONFIG, "validate_config")
    if validate is None:
        return Verdict.DRIFTED
    if not _refuses(validate, source, _CONFIG):
        return Verdict.BUGGY
    return Verdict.FIXED if mentions(function, "validate_config") else Verdict.INCOMPLETE


def _refuses(function: Function, source: Source, module: str) -> bool:
    """Whether it, or a function of its module that it calls, looks at both settings."""
    called = [
        source.function(module, node.func.id)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return any(
        each is not None and mentions(each, "bypass_mode") and mentions(each, "R2") for each in (function, *called)
    )


TARGETS = (
    Target(
        module=_CONFIG,
        qualname="validate_config",
        wrapper=check_settings,
        question=_validates,
        known={
            "4502644526525be8": Verdict.BUGGY,  # 0.7.0
            "3a5611254aff1fd2": Verdict.BUGGY,  # 0.7.1
            "e231819d39efbc57": Verdict.BUGGY,  # 0.8.0, 0.9.0
            "6c974b9a820b2694": Verdict.FIXED,  # 0.9.1
        },
        unit="settings",
    ),
    Target(
        module="verl.trainer.main_ppo",
        qualname="run_ppo",
        wrapper=check_settings,
        question=_starts,
        known={
            "4cf51803c90316d0": Verdict.BUGGY,  # 0.7.0 to 0.8.0
            "db38cab95e9effb0": Verdict.BUGGY,  # 0.9.0
            "0653a58bf6e91ab0": Verdict.INCOMPLETE,  # 0.9.1
        },
        unit="settings",
    ),
)
