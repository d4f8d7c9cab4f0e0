"""Under calculate_per_token_loss, Megatron gets ``(loss sum, token count, output)`` instead of ``(loss, output)``.

What goes wrong: with ``calculate_per_token_loss`` on (Megatron-Bridge turns it on by itself at CP>1) the MoE router
multiplies its aux and z loss by the number of tokens, and ``finalize_model_grads`` divides every gradient by the
total number of tokens that the loss functions report. verl up to 0.8.0 reports none: nothing is divided, and
grad_norm is larger by orders of magnitude. verl 0.9.0 and 0.9.1 report ``tokens // cp_size``, which loses the
remainder of every micro-batch, and refuse settings that are valid.

What the wrappers do: count the routed tokens of the mini-batch once over data parallel ranks (``routed``), and return
``(loss * routed / dp_size, local tokens, output)`` for each micro-batch. verl's loss already is the mean over the
global batch times ``dp_size``, so after Megatron's division by ``routed`` the gradient is the one of the flag being
off, whatever is counted, as long as the local tokens add up to ``routed``. What is counted decides how much the
router's losses weigh: the router sees, and multiplies by, the padding to a multiple of TP and CP as well, so this is
counted, too. Where tokens do not divide evenly (BSHD), context parallel rank r reports ``n // cp + (r < n % cp)`` of
the n tokens that it shares with its group. The loss of multi-token prediction layers is a mean over response tokens;
it is weighed so that it stays one.

When it can go: not yet, as of verl 0.9.1. The 3-tuple: with 0.9.0.
Sources: https://github.com/verl-project/verl/pull/6836, guards as of https://github.com/verl-project/verl/pull/7914
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

from verl_fixes.arguments import Call
from verl_fixes.errors import UncountedError, UnsupportedSettingError
from verl_fixes.mtp_normalisation import mtp_loss_normalised
from verl_fixes.patch import Patch, Target
from verl_fixes.patches import legacy_per_token_loss
from verl_fixes.probe import Function, Source, Verdict, mentions, returns
from verl_fixes.router_losses import reject_unsupported
from verl_fixes.token_counts import (
    alignment_padding,
    counted_tokens,
    local_share,
    packing_multiple,
    reported_to_megatron,
)

_MINI_BATCH = ("self", "data", "loss_function", "forward_only")
_MICRO_BATCH = ("self", "output", "data", "forward_only", "loss_function")
_ROUTED = "routed_num_tokens"
"""Upstream's key, from 0.9.0 on, for the routed tokens of the mini-batch over all data parallel ranks."""


def _in_force(engine: Any, loss_function: Any) -> bool:
    config = getattr(engine, "tf_config", None)
    return loss_function is not None and bool(getattr(config, "calculate_per_token_loss", False))


def _dynamic_context_parallel(engine: Any) -> bool:
    return bool(getattr(engine.engine_config, "dynamic_context_parallel", False))


def _reject_dynamic_context_parallel() -> NoReturn:
    raise UnsupportedSettingError(
        "per-token-loss: dynamic_context_parallel=True with calculate_per_token_loss=True. This release of verl does "
        "not count the tokens of a dynamic context parallel group, so every gradient would be wrong. Way out: "
        "dynamic_context_parallel=False, or calculate_per_token_loss=False, or verl 0.9.0 or later. "
        "VERL_FIXES_PER_TOKEN_LOSS=0 runs stock verl, without this check and without the fix."
    )


def count_mini_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``forward_backward_batch(self, data, loss_function, forward_only)`` of verl up to 0.8.0.

    One all-reduce over data parallel ranks per mini-batch; the sum travels with the micro-batches. Below an override
    that calls ``super()`` it is counted again, for the data that the override passed on.
    """
    call = Call(original, _MINI_BATCH, args, kwargs)
    engine, data = call["self"], call["data"]
    if not _in_force(engine, call["loss_function"]):
        return call()
    if _dynamic_context_parallel(engine):
        _reject_dynamic_context_parallel()
    reject_unsupported(engine.engine_config.use_remove_padding, engine.tf_config)

    import torch
    from verl.utils import tensordict_utils as tu
    from verl.utils.device import get_device_id

    routed = counted_tokens(engine, data).to(get_device_id())
    torch.distributed.all_reduce(routed, group=engine.get_data_parallel_group())
    tu.assign_non_tensor(data, **{_ROUTED: routed.item()})
    with reported_to_megatron(), mtp_loss_normalised(engine, data):
        return call()


def check_mini_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``forward_backward_batch`` of verl 0.9, which counts by itself: today's guard on every rank, and padding.

    Upstream's own guard sits in the last pipeline stage; the other stages would wait for it until NCCL times out.
    """
    call = Call(original, _MINI_BATCH, args, kwargs)
    engine, data = call["self"], call["data"]
    if not _in_force(engine, call["loss_function"]) or _dynamic_context_parallel(engine):
        return call()
    reject_unsupported(engine.engine_config.use_remove_padding, engine.tf_config)
    with _padding_counted(engine), mtp_loss_normalised(engine, data):
        return call()


@contextmanager
def _padding_counted(engine: Any) -> Iterator[None]:
    """Upstream's own count, which it asks for once a mini-batch and once a micro-batch, includes the padding."""
    upstream = engine._routed_num_tokens
    if isinstance(upstream, _WithPadding):  # below an override that calls super()
        yield
        return
    own = "_routed_num_tokens" in vars(engine)
    engine._routed_num_tokens = _WithPadding(upstream, packing_multiple(engine))
    try:
        yield
    finally:
        del engine._routed_num_tokens
        if own:
            engine._routed_num_tokens = upstream


class _WithPadding:
    """Upstream's count of a batch, plus the padding to a multiple."""

    def __init__(self, upstream: Callable[..., Any], multiple: int) -> None:
        self._upstream = upstream
        self._multiple = multiple

    def __call__(self, data: Any) -> Any:
        return self._upstream(data) + alignment_padding(data, self._multiple)


class _RecordedLoss:
    """A loss function that remembers what it returned: the loss before verl scales it for Megatron's schedule."""

    def __init__(self, loss_function: Callable[..., Any]) -> None:
        self._loss_function = loss_function
        self.loss: Any = None
        self.scaled: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._loss_function(*args, **kwargs)
        self.loss = result[0]
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss_function, name)


def return_three_tuple(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``postprocess_micro_batch_func`` of verl up to 0.8.0, which returns ``(scaled loss, output)``.

    Returns:
        ``(loss * routed / dp_size, local tokens, output)`` while the flag is on and there is a loss function; what
        the original returns otherwise.
    """
    return _three_tuple(original, args, kwargs, upstream_has_it=False)


def refine_three_tuple(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``postprocess_micro_batch_func`` of verl 0.9: exact counts, today's guards.

    The original computes as with the flag off, so its older guards do not refuse what is valid, and the 3-tuple is
    built as for earlier releases. Dynamic context parallelism has counts of its own and is left to upstream.
    """
    return _three_tuple(original, args, kwargs, upstream_has_it=True)


def _three_tuple(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], upstream_has_it: bool
) -> Any:
    call = Call(original, _MICRO_BATCH, args, kwargs)
    engine, data, loss_function = call["self"], call["data"], call["loss_function"]
    if isinstance(loss_function, _RecordedLoss):  # reached through super() from a subclass's override
        result = call()
        loss_function.scaled = result[0]
        return result
    if not _in_force(engine, loss_function):
        return call()
    if _dynamic_context_parallel(engine):
        if upstream_has_it:
            return call()
        _reject_dynamic_context_parallel()
    reject_unsupported(engine.engine_config.use_remove_padding, engine.tf_config)

    recorded = _RecordedLoss(loss_function)
    with _flag_hidden(engine) if upstream_has_it else nullcontext():
        result = call(loss_function=recorded)
    if len(result) != 2:  # an override that returns the 3-tuple by itself
        return result
    scaled, output = result
    loss = _unscaled(original, scaled, recorded, data)

    from megatron.core import parallel_state as mpu
    from verl.utils import tensordict_utils as tu

    tokens = engine._routed_num_tokens(data) if upstream_has_it else counted_tokens(engine, data)
    routed = tu.get_non_tensor_data(data, key=_ROUTED, default=None)
    dp_size = tu.get_non_tensor_data(data, key="dp_size", default=1)
    if routed is None:
        if dp_size != 1 or data["num_micro_batch"] != 1:
            raise UncountedError(
                "per-token-loss: the routed tokens of this mini-batch were not counted, because an override of "
                "forward_backward_batch passes other data on than what it got. Way out: call "
                "super().forward_backward_batch() in it, or calculate_per_token_loss=False, or "
                "VERL_FIXES_PER_TOKEN_LOSS=0 for stock verl without the fix."
            )
        routed = tokens
    local = local_share(tokens, mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank())
    return loss * routed / dp_size, local, output


def _unscaled(original: Callable[..., Any], scaled: Any, recorded: _RecordedLoss, data: Any) -> Any:
    """The loss that belongs to ``scaled``: exact where it is the loss function's, divided where an override added."""
    shipped = f"{original.__module__}:{original.__qualname__}" == str(_POSTPROCESS)
    if recorded.loss is not None and (shipped or scaled is recorded.scaled):
        return recorded.loss
    return scaled / data["num_micro_batch"]


class _FlagOff:
    """A transformer config that looks like another one with ``calculate_per_token_loss`` off."""

    calculate_per_token_loss = False

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


@contextmanager
def _flag_hidden(engine: Any) -> Iterator[None]:
    config = engine.tf_config
    engine.tf_config = _FlagOff(config)
    try:
        yield
    finally:
        engine.tf_config = config


def _mini_batch_verdict(function: Function, source: Source) -> Verdict:
    if mentions(function, _ROUTED):
        return Verdict.INCOMPLETE
    old = mentions(function, "batch_num_tokens") and mentions(function, "postprocess_micro_batch_func")
    return Verdict.BUGGY if old and not mentions(function, "calculate_per_token_loss") else Verdict.DRIFTED


def _micro_batch_verdict(function: Function, source: Source) -> Verdict:
    sizes = {len(value.elts) for value in returns(function) if isinstance(value, ast.Tuple)}
    flag = mentions(function, "calculate_per_token_loss")
    scales = mentions(function, "num_micro_batch") and mentions(function, "loss_function")
    if sizes == {2, 3} and flag and scales and mentions(function, _ROUTED):
        return Verdict.INCOMPLETE
    return Verdict.BUGGY if sizes == {2} and scales and not flag else Verdict.DRIFTED


_ENGINE = "verl.workers.engine.megatron.transformer_impl"
_POSTPROCESS = Target(
    module=_ENGINE,
    qualname="MegatronEngineWithLMHead.postprocess_micro_batch_func",
    wrapper=return_three_tuple,
    refine=refine_three_tuple,
    question=_micro_batch_verdict,
    known={
        "bb0f2815595539d8": Verdict.BUGGY,  # 0.7.0, 0.7.1
        "bc72b176d044b365": Verdict.BUGGY,  # 0.8.0
        "32cdae10ed839d3e": Verdict.INCOMPLETE,  # 0.9.0
        "cfc8590c0662508f": Verdict.INCOMPLETE,  # 0.9.1
    },
)

PATCH = Patch(
    name="per-token-loss",
    title="Gradients are right under calculate_per_token_loss",
    hurts=(
        "With calculate_per_token_loss on (Megatron-Bridge turns it on by itself at CP>1) verl up to 0.8.0 never "
        "tells Megatron how many tokens the loss was summed over. The MoE aux and z losses are then multiplied by the "
        "token count (grad_norm in the thousands instead of 0.3), and the policy gradient by DP x CP, which only "
        "clipping hides. verl 0.9.0 and 0.9.1 lose the remainder of every "
        "micro-batch at CP>1 (0.5 % of the policy gradient in our tests) and refuse BSHD for dense models and, on "
        "0.9.0, seq-mean-token-mean."
    ),
    does=(
        "Counts the routed tokens of the mini-batch once over data parallel ranks and gives Megatron "
        "(loss * routed / dp_size, local tokens, output) for each micro-batch, with counts that add up exactly over "
        "context parallel ranks. Refuses BSHD only while an MoE aux or z loss is active and, up to 0.8.0, dynamic "
        "context parallelism. On 0.7.0 and 0.7.1 the same for the legacy Megatron actor and critic; the critic packs "
        "whatever use_remove_padding says. With the flag off it does nothing."
    ),
    removable="Not yet, as of verl 0.9.1: its counts lose the remainder. The 3-tuple itself: with verl 0.9.0.",
    upstream=(
        "https://github.com/verl-project/verl/pull/6836",
        "https://github.com/verl-project/verl/pull/7914",
    ),
    fixed_in="0.9.0",
    targets=(
        Target(
            module=_ENGINE,
            qualname="MegatronEngine.forward_backward_batch",
            wrapper=count_mini_batch,
            refine=check_mini_batch,
            question=_mini_batch_verdict,
            known={
                "c4602821d56f9205": Verdict.BUGGY,  # 0.7.0
                "886af1f2f12f3690": Verdict.BUGGY,  # 0.7.1
                "fde14271878f9bb0": Verdict.BUGGY,  # 0.8.0
                "881a7f35c53cd481": Verdict.INCOMPLETE,  # 0.9.0
                "c9d1db2381b69c75": Verdict.INCOMPLETE,  # 0.9.1
            },
        ),
        _POSTPROCESS,
        *legacy_per_token_loss.TARGETS,
    ),
)
