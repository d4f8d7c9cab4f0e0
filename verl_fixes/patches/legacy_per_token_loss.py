"""per-token-loss for the legacy Megatron actor and critic, through which verl 0.7.0 and 0.7.1 run RL by default.

Their loss is the mean over a micro-batch, and nothing in verl multiplies it: with the flag off Megatron divides by the
number of micro-batches and DDP averages over DP x CP. So that the flag changes nothing, a micro-batch has to report
``(loss * routed / (micro-batches * dp_size), local tokens, stats)``, with ``routed`` the tokens of the mini-batch over
data parallel ranks. Each context parallel rank computes the whole loss, with a graph for its own tokens only. The loss
of multi-token prediction, whose mask is wrong in 0.7.1, is not corrected here.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from verl_fixes.arguments import Call
from verl_fixes.errors import UncountedError
from verl_fixes.patch import Target
from verl_fixes.probe import Function, Source, Verdict, mentions, returns
from verl_fixes.router_losses import reject_unsupported
from verl_fixes.token_counts import counted_rows, layout_multiple, local_share, reported_to_megatron


class _MiniBatch(NamedTuple):
    """What is being trained on. ``asked`` gets an item once a schedule was taken for it."""

    routed: int
    dp_size: int
    multiple: int
    asked: list[bool]


_current: ContextVar[_MiniBatch | None] = ContextVar("mini_batch", default=None)


def count_actor_mini_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``MegatronPPOActor.forward_backward_batch(self, data, forward_only=False, ...)``."""
    call = Call(original, ("self", "data", "forward_only"), args, kwargs)
    actor = call["self"]
    fused = bool(getattr(actor, "use_fused_kernels", False))  # they always pack, and do not pad for fp8
    packs = fused or actor.config.megatron.use_remove_padding
    return _count(call, actor.tf_config, packs, None if fused else actor.tf_config.fp8)


def count_critic_mini_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``MegatronPPOCritic.forward_backward_batch``; the critic packs whatever ``use_remove_padding`` says."""
    call = Call(original, ("self", "data", "forward_only"), args, kwargs)
    config = call["self"].tf_config
    return _count(call, config, True, config.fp8)


def _count(call: Call, config: Any, packs: bool, fp8: str | None) -> Any:
    if call.get("forward_only") or not config.calculate_per_token_loss:
        return call()
    reject_unsupported(packs, config)

    import torch
    from megatron.core import parallel_state as mpu
    from verl.utils.device import get_device_id

    multiple = layout_multiple(fp8) if packs else 1
    routed = counted_rows(call["data"].batch["attention_mask"], multiple).to(get_device_id())
    group = mpu.get_data_parallel_group()
    torch.distributed.all_reduce(routed, group=group)
    outer = _current.get()  # of an override that calls super()
    mini_batch = _MiniBatch(int(routed), group.size(), multiple, outer.asked if outer else [])
    token = _current.set(mini_batch)
    try:
        result = call()
    finally:
        _current.reset(token)
    if not mini_batch.asked:
        raise UncountedError(
            "per-token-loss: an override of forward_backward_batch takes get_forward_backward_func from elsewhere, so "
            "no tokens were reported and this gradient is wrong; the optimizer has not used it. Way out: call "
            "super().forward_backward_batch() in it, or calculate_per_token_loss=False, or "
            "VERL_FIXES_PER_TOKEN_LOSS=0 for stock verl without the fix."
        )
    return result


def report_tokens(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``get_forward_backward_func`` as the legacy modules imported it: a schedule whose losses report tokens."""
    schedule, mini_batch = original(*args, **kwargs), _current.get()
    if mini_batch is None:
        return schedule
    mini_batch.asked.append(True)
    return _with_tokens(schedule, mini_batch)


def _with_tokens(schedule: Callable[..., Any], mini_batch: _MiniBatch) -> Callable[..., Any]:
    from megatron.core import parallel_state as mpu

    cp_size, cp_rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()

    @functools.wraps(schedule)
    def run(*, forward_step_func: Callable[..., Any], num_microbatches: int, **kwargs: Any) -> Any:
        share = mini_batch.routed / (num_microbatches * mini_batch.dp_size)

        @functools.wraps(forward_step_func)
        def forward_step(*args: Any, **options: Any) -> Any:
            output, loss_function = forward_step_func(*args, **options)  # also with return_schedule_plan
            mask = loss_function.keywords["data"]["attention_mask"]

            def loss_and_tokens(*args: Any, **options: Any) -> Any:
                result = loss_function(*args, **options)
                if len(result) != 2:  # a subclass that reports tokens by itself
                    return result
                loss, stats = result
                return loss * share, local_share(counted_rows(mask, mini_batch.multiple), cp_size, cp_rank), stats

            return output, loss_and_tokens

        with reported_to_megatron():
            return schedule(forward_step_func=forward_step, num_microbatches=num_microbatches, **kwargs)

    return run


def _verdict(function: Function, source: Source) -> Verdict:
    """Its inner ``loss_func`` returns two values, and gets its micro-batch as ``data``."""
    inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node.name == "loss_func"]
    if len(inner) != 1 or not mentions(function, "get_forward_backward_func"):
        return Verdict.DRIFTED
    sizes = {len(value.elts) if isinstance(value, ast.Tuple) else 0 for value in returns(inner[0])}
    takes_data = "data" in {argument.arg for argument in inner[0].args.args}
    return Verdict.BUGGY if sizes == {2} and takes_data else Verdict.DRIFTED


def _targets(role: str, wrapper: Callable[..., Any], known: dict[str, Verdict]) -> tuple[Target, Target]:
    module = f"verl.workers.{role}.megatron_{role}"
    method = f"MegatronPPO{role.capitalize()}.forward_backward_batch"
    unit = f"legacy {role}"
    return (
        Target(module=module, qualname=method, wrapper=wrapper, question=_verdict, known=known, unit=unit),
        Target(
            module=module,
            qualname="get_forward_backward_func",
            caller=method,
            wrapper=report_tokens,
            question=_verdict,
            known=known,
            unit=unit,
        ),
    )


TARGETS = (
    *_targets(
        "actor",
        count_actor_mini_batch,
        {
            "a0c07abbe00debd3": Verdict.BUGGY,  # 0.7.0
            "a4b3404c3a15433c": Verdict.BUGGY,  # 0.7.1
        },
    ),
    *_targets(
        "critic",
        count_critic_mini_batch,
        {
            "a9885df2dca8b46d": Verdict.BUGGY,  # 0.7.0
            "e5144dff24d66031": Verdict.BUGGY,  # 0.7.1
        },
    ),
)
