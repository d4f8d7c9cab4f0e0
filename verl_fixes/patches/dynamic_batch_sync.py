"""The legacy FSDP workers split their batches into equally many micro-batches on every rank.

What goes wrong: with ``use_dynamic_bsz`` each rank packs its rows into micro-batches of up to ``max_token_len`` tokens.
``dp_actor`` and ``dp_critic`` do not pass ``dp_group`` to ``prepare_dynamic_batch``, and in verl 0.7.1 no group means
that nothing is agreed on (in 0.7.0 it means the default group). A rank with longer rows then makes more of them. FSDP
gathers parameters in each: the ranks wait for each other in different collectives until NCCL times out.

What the wrapper does: passes the default process group where the caller passes none. FSDP shards over all of its
ranks, and ranks of one Ulysses group hold the same rows, so this is the group that has to agree. It costs one
all-reduce of a number per split. A micro-batch's share of the loss is its share of the rows: with ``seq-mean-*`` the
gradient does not depend on the number, with ``token-mean`` it depends on the split, as on every release.

When it can go: with verl 0.8.0, which has no legacy workers.
Sources: https://github.com/verl-project/verl/pull/5591, issues
https://github.com/verl-project/verl/issues/6176 and https://github.com/verl-project/verl/issues/6178
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from verl_fixes.arguments import Call
from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict

_SPLIT = "prepare_dynamic_batch"


def agree_on_the_count(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``prepare_dynamic_batch(data, max_token_len, dp_group=None, ...)`` as the legacy workers call it."""
    import torch.distributed

    call = Call(original, ("data", "max_token_len", "dp_group"), args, kwargs)
    if call["dp_group"] is not None or not torch.distributed.is_initialized():
        return call()
    return call(dp_group=torch.distributed.group.WORLD)


def _verdict(function: Function, source: Source) -> Verdict:
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _SPLIT
    ]
    if not calls:
        return Verdict.DRIFTED
    split = source.function("verl.utils.seqlen_balancing", "rearrange_micro_batches")
    if split is None:
        return Verdict.DRIFTED
    passed = all(any(keyword.arg == "dp_group" for keyword in call.keywords) for call in calls)
    return Verdict.FIXED if passed or not _needs_a_group(split) else Verdict.BUGGY


def _needs_a_group(split: Function) -> bool:
    """Up to 0.7.0 no group means the default one; in 0.7.1 it means that nothing is synchronised."""
    return any(
        isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "dp_group"
        for node in ast.walk(split)
    )


PATCH = Patch(
    name="dynamic-batch-sync",
    title="No hang with dynamic batches in the legacy FSDP workers",
    hurts=(
        "With use_dynamic_bsz the legacy FSDP actor and critic of verl 0.7.1 split their rows into different "
        "numbers of micro-batches on different ranks. The ranks then wait for each other in different collectives, "
        "until NCCL times out."
    ),
    does="Lets all ranks agree on the largest number, with one all-reduce of a number per split.",
    removable="With verl 0.8.0, which has no legacy workers.",
    upstream=(
        "https://github.com/verl-project/verl/pull/5591",
        "https://github.com/verl-project/verl/issues/6176",
        "https://github.com/verl-project/verl/issues/6178",
    ),
    fixed_in="0.8.0",
    atomic=False,
    targets=(
        Target(
            module="verl.workers.actor.dp_actor",
            qualname=_SPLIT,
            caller="DataParallelPPOActor.update_policy",
            wrapper=agree_on_the_count,
            question=_verdict,
        ),
        Target(
            module="verl.workers.critic.dp_critic",
            qualname=_SPLIT,
            caller="DataParallelPPOCritic.update_critic",
            wrapper=agree_on_the_count,
            question=_verdict,
        ),
    ),
)
