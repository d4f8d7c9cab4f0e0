"""Plain-torch stand-ins for the two Transformer Engine modules that Megatron has no full replacement for.

:class:`CpuAttention` is a causal core attention that takes packed (THD) and padded (SBHD) inputs and works under
context parallelism; :class:`CpuRMSNorm` is an RMSNorm that works under sequence parallelism. Megatron's own local
modules, ``DotProductAttention`` and ``WrappedTorchNorm``, refuse exactly these three things.

Both are written to be read, not to be fast: attention materialises every score.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup


class CpuRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked, as Transformer Engine's is, when each TP rank sees only a part of the tokens.

    ``finalize_model_grads`` sums the gradients of marked weights over the tensor-parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


class CpuAttention(MegatronModule):
    """Causal attention in plain torch.

    Padding sits at the right end of every sequence in verl's layouts, so that the causal mask alone keeps it away from
    real tokens and ``attention_mask`` is not needed.
    """

    def __init__(
        self, config: Any, layer_number: int, *args: Any, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(  # noqa: PLR0917  Megatron's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend over whole sequences.

        Args:
            query: ``[tokens, heads, dim]`` packed or ``[sequence, batch, heads, dim]`` padded; this CP rank's share.
            key, value: the same with ``groups`` in place of ``heads``.
            packed_seq_params: with it the input is packed; its ``cu_seqlens_q_padded`` counts the tokens of whole
                sequences, over all CP ranks. Under dynamic context parallelism it names the CP group as well.

        Returns:
            ``[tokens, 1, heads * dim]`` packed or ``[sequence, batch, heads * dim]`` padded.
        """
        group = getattr(packed_seq_params, "cp_group", None) or parallel_state.get_context_parallel_group()
        if packed_seq_params is None:
            return self._attend(query, *_gather_from_cp(key, value, group), group)

        lengths = (packed_seq_params.cu_seqlens_q_padded.diff() // group.size()).tolist()
        keys, values = _gather_from_cp(key, value, group)
        queries = query.unsqueeze(1).split(lengths)
        keys = keys.unsqueeze(2).split(lengths, dim=1)
        values = values.unsqueeze(2).split(lengths, dim=1)
        return torch.cat([self._attend(q, k, v, group) for q, k, v in zip(queries, keys, values, strict=True)])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> Tensor:
        """``query`` ``[local, batch, heads, dim]``; ``key``, ``value`` ``[cp, local, batch, groups, dim]``."""
        per_rank = [zigzag_positions(query.shape[0], rank, group.size()) for rank in range(group.size())]
        query_positions = per_rank[group.rank()]
        key_positions, order = torch.cat(per_rank).sort()  # undo the zigzag

        heads_per_group = query.shape[2] // key.shape[3]
        key = key.flatten(0, 1)[order].repeat_interleave(heads_per_group, dim=2)
        value = value.flatten(0, 1)[order].repeat_interleave(heads_per_group, dim=2)

        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        future = key_positions[None, :] > query_positions[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


def zigzag_positions(local_length: int, cp_rank: int, cp_size: int) -> Tensor:
    """Which positions of a whole sequence a CP rank holds: chunks ``r`` and ``2 * cp_size - 1 - r`` of ``2 * cp_size``.

    ``local_length`` is the number of tokens that one rank holds; it is even when ``cp_size`` is above 1.
    """
    if cp_size == 1:
        return torch.arange(local_length)
    half = local_length // 2
    first, last = half * cp_rank, half * (2 * cp_size - 1 - cp_rank)
    return torch.cat([torch.arange(first, first + half), torch.arange(last, last + half)])


def _gather_from_cp(key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of all CP ranks, stacked in a new first dimension of length ``cp_size``."""
    return _GatherFromRanks.apply(key, group), _GatherFromRanks.apply(value, group)


class _GatherFromRanks(torch.autograd.Function):
    """All-gather whose backward returns to each rank the sum of what all ranks' losses say about its tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()], None
