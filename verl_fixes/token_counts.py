"""Token counts for Megatron: what the MoE router sees of a batch, and each context parallel rank's share of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


_ENGINE = "verl.workers.engine.megatron.transformer_impl"
_reporting = 0


@contextmanager
def reported_to_megatron() -> Iterator[None]:
    """While it lasts, token counts are reported, so ``finalize_model_grads`` divides by them."""
    global _reporting
    _reporting += 1
    try:
        yield
    finally:
        _reporting -= 1


def are_reported() -> bool:
    """Whether Megatron divides gradients by token counts: one of our patches reports them, or verl 0.9 by itself."""
    engine = getattr(sys.modules.get(_ENGINE), "MegatronEngine", None)
    return _reporting > 0 or hasattr(engine, "_routed_num_tokens")


def counted_tokens(engine: Any, data: Any) -> torch.Tensor:
    """What the router sees of ``data`` over all TP and CP ranks, padding included; 0-d int64."""
    return routed_tokens(data) + alignment_padding(data, packing_multiple(engine))


def routed_tokens(data: Any) -> torch.Tensor:
    """Number of real tokens that a batch feeds to the MoE router, as a 0-d int64 tensor on the batch's device.

    ``attention_mask`` decides when there is one (dense, or nested as in the no-padding path); SFT data without one
    counts its packed ``input_ids``. Not ``loss_mask``: it counts response tokens, and the router sees prompts, too.
    """
    import torch

    mask = data.get("attention_mask", None)
    if mask is not None:
        if mask.is_nested:
            return torch.stack([row.sum() for row in mask.unbind()]).sum().to(torch.int64)
        return mask.sum().to(torch.int64)
    ids = data["input_ids"]
    if ids.is_nested and ids.layout is torch.jagged:
        return _lengths(ids).sum().to(torch.int64)
    return torch.tensor(ids.numel(), dtype=torch.int64, device=ids.device)


def alignment_padding(data: Any, multiple: int) -> torch.Tensor | int:
    """Number of tokens that are added when each packed sequence is padded to a multiple of ``multiple`` tokens."""
    import torch

    ids = data["input_ids"]
    if multiple == 1 or not (ids.is_nested and ids.layout is torch.jagged):
        return 0
    return (-_lengths(ids) % multiple).sum()


def _lengths(jagged: torch.Tensor) -> torch.Tensor:
    lengths = jagged.lengths()
    return jagged.offsets().diff() if lengths is None else lengths


def counted_rows(mask: torch.Tensor, multiple: int) -> torch.Tensor:
    """What the router sees of the rows of a dense ``[rows, width]`` mask, each padded to a multiple; 0-d int64."""
    import torch

    lengths = mask.sum(dim=-1).to(torch.int64)
    return (lengths + -lengths % multiple).sum()


def packing_multiple(engine: Any) -> int:
    """What verl pads each packed sequence of an engine to a multiple of, so that its ranks share it evenly.

    1 for BSHD. Not counted is what fp8 and ``pad_to_length_bucket`` append to a micro-batch as a whole: how the
    mini-batch will be split is not known when it is counted. The policy gradient does not depend on it.
    """
    if not engine.engine_config.use_remove_padding:
        return 1
    from verl.models.mcore import util

    fp8 = engine.tf_config.fp8 if hasattr(util, "_compute_fp8_thd_align_size") else None  # engines pad for it since
    return layout_multiple(fp8, zigzag=_zigzag(engine))


def layout_multiple(fp8: str | None, zigzag: bool = True, local_cp_size: int | None = None) -> int:
    """TP, or 2 x TP x CP where each CP rank holds two chunks of a sequence; with fp8 a multiple of 16 as well.

    ``local_cp_size`` is that of the micro-batch, with dynamic context parallelism.
    """
    from megatron.core import parallel_state as mpu

    tp_size: int = mpu.get_tensor_model_parallel_world_size()
    cp_size: int = local_cp_size or mpu.get_context_parallel_world_size()
    multiple = tp_size * cp_size * (2 if cp_size > 1 and zigzag else 1)
    return math.lcm(16, multiple) if fp8 in ("e4m3", "hybrid") else multiple


def _zigzag(engine: Any) -> bool:
    """Each CP rank holds two chunks of a sequence, except for attention variants that verl 0.9.1 lays out in one."""
    if not hasattr(engine, "_get_context_parallel_layout"):
        return True
    from verl.utils.megatron_utils import unwrap_model

    return bool(engine._get_context_parallel_layout(unwrap_model(engine.module[0])) == "zigzag")


def local_share(tokens: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """This context parallel rank's share of ``tokens``; the shares of the group add up to ``tokens`` exactly."""
    import torch

    return (tokens // cp_size + (tokens % cp_size > cp_rank)).to(torch.int)
