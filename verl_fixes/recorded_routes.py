"""Tensors of recorded MoE routes: which experts each token went to in each layer that has a router.

verl holds them as ``[rows, j, layers, topk]`` (jagged, engines) or ``[rows, width, layers, topk]`` (legacy workers).
Needs torch, and no verl.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_fixes.errors import RoutesError

if TYPE_CHECKING:
    from torch import Tensor

UINT8_EXPERTS = 256
"""How many experts fit into what verl up to 0.9.0 stores a route in."""


def as_bytes(indices: Tensor) -> Tensor:
    """``[tokens, topk]`` of any integer type as ``[tokens, 2 * topk]`` uint8: what verl casts to uint8 survives."""
    import torch

    return indices.to(torch.int16).contiguous().view(torch.uint8)


def from_bytes(routes: Tensor) -> Tensor:
    """Undo :func:`as_bytes` after verl has merged the layers.

    Jagged routes become int16, as in verl 0.9.1. Padded ones, which the legacy actor broadcasts over pipeline stages,
    become int32, because NCCL has no int16.
    """
    import torch

    if routes.is_nested:
        return _jagged(routes.values().contiguous().view(torch.int16), routes)
    return routes.contiguous().view(torch.int16).to(torch.int32)


def no_layers(input_ids: Tensor, attention_mask: Tensor | None, width: int) -> Tensor:
    """The share of a model chunk without a router: ``[rows, tokens, 0, width]``."""
    import torch

    if input_ids.is_nested:
        tokens = int(input_ids.offsets()[-1])
        empty = torch.empty((tokens, 0, width), dtype=torch.uint8)
        return torch.nested.nested_tensor_from_jagged(empty, offsets=input_ids.offsets().cpu())
    rows, columns = (input_ids if attention_mask is None else attention_mask).shape[:2]
    return torch.empty((rows, columns, 0, width), dtype=torch.uint8)


def gather(routes: Tensor, layer_numbers: Sequence[int], group: Any) -> Tensor:
    """The routes of all pipeline stages, ordered by layer number, on the CPU. Stages may have none.

    Args:
        routes: this stage's share, one row along the layers for each of ``layer_numbers``.
        layer_numbers: Megatron's, counted over the whole model.
        group: the pipeline's process group; all its ranks call this.

    Raises:
        RoutesError: a layer was recorded by two stages, or not all that a stage says.
    """
    import torch

    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    part = routes.values() if routes.is_nested else routes
    torch.distributed.all_gather_object(everyone, (list(layer_numbers), part.cpu()), group=group)
    for stage, (numbers, part) in enumerate(everyone):
        if part.shape[-2] != len(numbers):
            raise RoutesError(
                f"r2-replay: pipeline stage {stage} recorded {part.shape[-2]} layers and has routers in layers "
                f"{numbers}. {WAY_OUT}"
            )
    numbers = [number for theirs, _ in everyone for number in theirs]
    refuse_duplicates(numbers, "two pipeline stages")
    merged = torch.cat([part for _, part in everyone], dim=-2)
    merged = merged.index_select(-2, torch.tensor(numbers).argsort())
    return _jagged(merged, routes) if routes.is_nested else merged


def select_layers(routes: Tensor, rows: Sequence[int]) -> Tensor:
    """Routes whose layers are ``rows`` of those that are there, in this order."""
    import torch

    values = routes.values() if routes.is_nested else routes
    chosen = values.index_select(-2, torch.tensor(rows, dtype=torch.long, device=values.device))
    return _jagged(chosen, routes) if routes.is_nested else chosen


def _jagged(values: Tensor, like: Tensor) -> Tensor:
    import torch

    return torch.nested.nested_tensor_from_jagged(values, offsets=like.offsets().to(values.device))


WAY_OUT = (
    "Way out: router_replay.mode=disabled, or VERL_FIXES_R2_REPLAY=0 for stock verl, without this check and without "
    "the fix."
)


def refuse_duplicates(layer_numbers: Sequence[int], where: str) -> None:
    """Routes are stored by layer number: two routers with one number cannot be told apart."""
    twice = sorted({number for number in layer_numbers if layer_numbers.count(number) > 1})
    if twice:
        raise RoutesError(f"r2-replay: layer numbers {twice} belong to more than one router in {where}. {WAY_OUT}")


def moe_layers(config: Any) -> list[int]:
    """Layers of the whole model that have a router, from 0, by ``moe_layer_freq``."""
    every = config.moe_layer_freq
    if isinstance(every, int):
        return [layer for layer in range(config.num_layers) if layer % every == 0]
    return [layer for layer, has_router in enumerate(every) if has_router]


def refuse_incomplete(routes: Tensor | None, tokens: Tensor | None, config: Any) -> None:
    """Stop before routes are replayed that are not there, or do not cover the model.

    A replay of them would fail in one pipeline stage while the others wait, or route on its own without a word.

    Args:
        routes: ``routed_experts`` of the batch.
        tokens: ``input_ids`` of the same batch, whose rows have to be as long; None where they may differ.
        config: Megatron's transformer config.
    """
    if routes is None:
        raise RoutesError(
            "r2-replay: this batch is to replay MoE routes and has no routed_experts. With R2 compute_log_prob records "
            f"them and the trainer has to keep them for the update; with R3 they come from the rollout. {WAY_OUT}"
        )
    values = routes.values() if routes.is_nested else routes
    layers, topk = values.shape[-2:]
    with_router, all_layers = len(moe_layers(config)), config.num_layers
    more = with_router == all_layers and layers > all_layers  # the rest is nobody's
    if layers not in (with_router, all_layers) and not more:
        raise RoutesError(
            f"r2-replay: routed_experts has routes of {layers} layers; the model has {all_layers} layers, "
            f"{with_router} of them with a router. {WAY_OUT}"
        )
    if topk != config.moe_router_topk:
        raise RoutesError(
            f"r2-replay: routed_experts names {topk} experts for each token, and moe_router_topk is "
            f"{config.moe_router_topk}. {WAY_OUT}"
        )
    if tokens is not None and not _as_long(routes, tokens):
        raise RoutesError(f"r2-replay: rows of routed_experts and of input_ids differ in length. {WAY_OUT}")


def _as_long(routes: Tensor, tokens: Tensor) -> bool:
    if routes.is_nested != tokens.is_nested:
        return True  # verl brings them into one layout later
    if not routes.is_nested:
        return tuple(routes.shape[:2]) == tuple(tokens.shape[:2])
    return bool(routes.offsets().tolist() == tokens.offsets().tolist())
