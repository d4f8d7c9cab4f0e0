"""Validation survives a session that lacks a value which others have.

What goes wrong: ``_validate`` of the V1 trainer (verl 0.8.0's ``main_ppo_sync``) puts None where a session's reward
has no entry for a key that other sessions have, as when data sources have different reward functions. A reward
function may also return None itself, on every release. ``process_validation_metrics`` takes the mean over these lists
and stops the run with ``TypeError: unsupported operand type(s) for +: 'NoneType' ...``.

What the wrapper does: where an info list contains None, the metrics are taken over the values that are there, as in
verl 0.9.1. ``n`` in ``mean@n`` is their number. ``maj`` is left out for prompts of which a session has no ``pred``, or
lacks the value that is voted about, also where stock let None vote as if it were an answer. Without None nothing
changes.

When it can go: with verl 0.9.1.
Source: https://github.com/verl-project/verl/pull/7781
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_fixes.arguments import Call
from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict
from verl_fixes.validation_metrics import PARAMETERS, by_prompt, metrics_of, takes_none


def leave_none_out(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``process_validation_metrics(data_sources, sample_uids, infos_dict, seed=42)``."""
    call = Call(original, PARAMETERS, args, kwargs)
    infos = call["infos_dict"]
    if not any(value is None for values in infos.values() for value in values):
        return call()
    return metrics_of(by_prompt(call["data_sources"], call["sample_uids"], infos), call)


def _verdict(function: Function, source: Source) -> Verdict:
    return takes_none(function)


PATCH = Patch(
    name="val-none-safe",
    title="Validation survives sessions that lack a reward key",
    hurts=(
        "Validation stops the run with a TypeError about NoneType when a session's reward lacks a key that other "
        "sessions have: data sources with different reward functions in the V1 trainer (0.9.0) and in main_ppo_sync "
        "(0.8.0), or, on every release, a reward function that returns None for a key."
    ),
    does=(
        "Takes the validation metrics over the values that are there, as verl 0.9.1 does; n in mean@n is their "
        "number. maj is left out for prompts of which a session lacks pred or the value, also where stock let None "
        "vote as if it were an answer. Without None nothing changes."
    ),
    removable="With verl 0.9.1.",
    upstream=("https://github.com/verl-project/verl/pull/7781",),
    fixed_in="0.9.1",
    targets=(
        Target(
            module="verl.trainer.ppo.metric_utils",
            qualname="process_validation_metrics",
            wrapper=leave_none_out,
            question=_verdict,
            known={
                "75d7bdc94fed5907": Verdict.BUGGY,  # 0.7.0
                "5d52172047a4461f": Verdict.BUGGY,  # 0.7.1, 0.8.0, 0.9.0
                "b0b2f27acdeb1fcf": Verdict.FIXED,  # 0.9.1
            },
        ),
    ),
)
