"""A resumed asynchronous run submits only the prompts that its queue lacks.

What goes wrong: the V1 trainers ``colocate_async`` and ``separate_async`` save their TransferQueue with a checkpoint
and restore it on resume. ``on_train_begin`` then submits ``num_warmup_batches`` batches all the same. The pool of
prompts grows by the whole warm-up with each resume, and because older prompts are trained on first, every trajectory
waits that much longer: it is more off-policy, and with ``max_off_policy_strategy=drop`` more of them are thrown away.

What the wrapper does: counts the prompt groups in the queue once the checkpoint is loaded and submits what is missing
to the target, in whole dataloader batches, rounded down. Every group counts, whatever its status and its
``global_steps``: unfinished ones are issued again, and the replay buffer replaces each one that it evicts (stale,
failed, filtered) by one new prompt. A pool above the target is kept. Without restored groups the original runs.

What is left in verl 0.9.1: what is missing may be no multiple of ``data.gen_batch_size``, and ``_next_train_batch``
raises ValueError then. Its own ``_init_dataloader`` sets the size to 1 in these modes, so this takes a trainer with a
dataloader of its own.

When it can go: with verl 0.9.1, where nobody has such a trainer.
Sources: https://github.com/verl-project/verl/pull/7762, issue https://github.com/verl-project/verl/issues/7759
"""

from __future__ import annotations

import ast
import logging
import math
from collections.abc import Callable
from typing import Any

from verl_fixes.patch import Patch, Target, Wrapper
from verl_fixes.probe import Function, Source, Verdict, mentions

_BASE = "verl.trainer.ppo.v1.trainer_base"
_RESTORED = "_restored_tq_prompt_count"
_WARM_UP = "_add_async_warmup_batches"
_PARTITION = "train"


def missing_prompts(
    warmup_batches: float, train_batch_size: int, gen_batch_size: int, restored: int
) -> tuple[int, int]:
    """The target of the warm-up and what to submit, in prompts.

    Args:
        warmup_batches: ``num_warmup_batches``, in batches of ``train_batch_size``.
        train_batch_size: prompts of a training step.
        gen_batch_size: prompts that the dataloader hands out at once.
        restored: prompt groups that are in the queue.

    Returns:
        Both are multiples of ``gen_batch_size``; ``restored`` and the second never exceed the target together.
    """
    target = max(0, math.floor(warmup_batches * train_batch_size / gen_batch_size)) * gen_batch_size
    missing = max(0, target - restored)
    return target, missing - missing % gen_batch_size


def count_restored(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``PPOTrainer._load_checkpoint(self)``: notes the prompt groups in the queue, 0 unless the run resumes."""
    result = original(self, *args, **kwargs)
    resumed = self.trainer_mode != "sync" and self.global_steps > 0
    setattr(self, _RESTORED, _prompt_groups() if resumed else 0)
    return result


def _prompt_groups() -> int:
    import transfer_queue

    tags = (transfer_queue.kv_list() or {}).get(_PARTITION, {})
    return sum(bool(tag.get("is_prompt", False)) for tag in tags.values())


def fill(mode: str, only_remainders: bool = False) -> Wrapper:
    """Around ``on_train_begin(self)`` of the trainer that ``trainer.v1`` configures under ``mode``.

    ``only_remainders`` for verl 0.9.1, which submits what is missing where that is a multiple of the generation batch.
    """

    def on_train_begin(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        return _fill(self, mode, lambda: original(self, *args, **kwargs), only_remainders)

    return on_train_begin


def _fill(self: Any, mode: str, original: Callable[[], Any], only_remainders: bool) -> Any:
    """Submit what is missing after a resume; everything else is left to the trainer's own warm-up."""
    restored = getattr(self, _RESTORED, 0)
    if not restored or self.config.skip.rollout_tq.enable:
        return original()
    data = self.config.data
    gen_batch_size = data.get("gen_batch_size", None) or data.train_batch_size
    batches = self.config.trainer.v1[mode].num_warmup_batches
    target, missing = missing_prompts(batches, data.train_batch_size, gen_batch_size, restored)
    if only_remainders and missing == max(0, target - restored):
        return original()
    if missing:
        self._add_prompts_to_generate(missing)
    logging.getLogger(_BASE).info(
        f"verl-fixes, resume-warmup: kept {restored} restored prompt groups and added {missing} prompts; "
        f"the warm-up's target is {target}"
    )
    return None


def _restores_the_queue(function: Function, source: Source) -> Verdict:
    if mentions(function, _RESTORED):
        return Verdict.FIXED
    if not mentions(function, "transfer_queue") or not mentions(function, "global_steps"):
        return Verdict.DRIFTED
    return Verdict.BUGGY


def _warms_up(function: Function, source: Source) -> Verdict:
    """Stock submits whole batches in a loop and does nothing else; the wrapper replaces that after a resume."""
    calls = {_called(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
    if calls == {_WARM_UP}:
        helper = source.function(_BASE, f"PPOTrainer.{_WARM_UP}")
        if helper is None or not mentions(helper, _RESTORED):
            return Verdict.DRIFTED
        return Verdict.FIXED if _rounds(helper) else Verdict.INCOMPLETE
    if "_add_batch_to_generate" in calls and calls <= {"_add_batch_to_generate", "range", "info"}:
        return Verdict.BUGGY
    return Verdict.DRIFTED


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _rounds(function: Function) -> bool:
    """Whether there is an integer division or a remainder; the target alone is rounded by ``math.floor``."""
    operators = (node.op for node in ast.walk(function) if isinstance(node, (ast.BinOp, ast.AugAssign)))
    return any(isinstance(operator, (ast.FloorDiv, ast.Mod)) for operator in operators)


PATCH = Patch(
    name="resume-warmup",
    title="A resumed asynchronous run submits only the prompts that are missing",
    hurts=(
        "After a resume the V1 trainers colocate_async and separate_async of verl 0.9.0 restore their prompts from "
        "the TransferQueue's checkpoint and submit the whole warm-up again. The pool grows with each resume, and "
        "trajectories are trained on later, so more off-policy, or are dropped as stale. In verl 0.9.1 a trainer "
        "with a dataloader of its own can stop with a ValueError instead."
    ),
    does=(
        "Counts the prompt groups that the checkpoint restored and submits what is missing to num_warmup_batches, in "
        "whole dataloader batches, rounded down. A restored pool above the target is kept and logged. Fresh starts "
        "and resumes without a queue checkpoint are left as they are."
    ),
    removable="With verl 0.9.1, where no trainer has a dataloader of its own with data.gen_batch_size above 1.",
    upstream=(
        "https://github.com/verl-project/verl/pull/7762",
        "https://github.com/verl-project/verl/issues/7759",
    ),
    fixed_in="0.9.1",
    targets=(
        Target(
            module=_BASE,
            qualname="PPOTrainer._load_checkpoint",
            wrapper=count_restored,
            question=_restores_the_queue,
            known={
                "e02677c380cd94c2": Verdict.BUGGY,  # 0.9.0
                "cec925972f960836": Verdict.FIXED,  # 0.9.1
            },
        ),
        Target(
            module="verl.trainer.ppo.v1.trainer_colocate_async",
            qualname="PPOTrainerColocateAsync.on_train_begin",
            wrapper=fill("colocate_async"),
            refine=fill("colocate_async", only_remainders=True),
            question=_warms_up,
            overrides=False,
        ),
        Target(
            module="verl.trainer.ppo.v1.trainer_separate_async",
            qualname="PPOTrainerSeparateAsync.on_train_begin",
            wrapper=fill("separate_async"),
            refine=fill("separate_async", only_remainders=True),
            question=_warms_up,
            overrides=False,
        ),
    ),
)
