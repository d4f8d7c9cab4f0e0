"""Tensors of recorded routes, without verl."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl_fixes.errors import RoutesError
from verl_fixes.recorded_routes import (
    as_bytes,
    from_bytes,
    moe_layers,
    no_layers,
    refuse_duplicates,
    refuse_incomplete,
    select_layers,
)

LENGTHS = (3, 0, 2)


def jagged(values: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor((0, *LENGTHS)).cumsum(dim=0))


def padded(values: Tensor) -> Tensor:
    """``[3, 3, ...]``: the rows of ``jagged``, padded on the right."""
    rows = torch.zeros((len(LENGTHS), max(LENGTHS), *values.shape[1:]), dtype=values.dtype)
    rows[torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]] = values
    return rows


def config(**settings: Any) -> Any:
    return SimpleNamespace(**{"num_layers": 3, "moe_layer_freq": 1, "moe_router_topk": 2} | settings)


@given(st.lists(st.lists(st.integers(0, 32767), min_size=2, max_size=2), min_size=5, max_size=5), st.integers(1, 3))
def test_expert_ids_survive_the_cast_to_uint8(ids: list[list[int]], layers: int) -> None:
    recorded = [torch.tensor(ids).roll(layer, dims=0) for layer in range(layers)]
    cast = torch.stack([as_bytes(indices).to(torch.uint8) for indices in recorded], dim=1)
    merged = torch.stack(recorded, dim=1)
    assert torch.equal(from_bytes(jagged(cast)).values().long(), merged)
    assert torch.equal(from_bytes(padded(cast)).long(), padded(merged))


def test_types_are_those_that_verl_can_pass_on() -> None:
    cast = torch.stack([as_bytes(torch.arange(10).view(5, 2))], dim=1)
    assert from_bytes(jagged(cast)).dtype is torch.int16
    assert from_bytes(padded(cast)).dtype is torch.int32


def test_a_chunk_without_layers_has_rows_as_long_as_the_others() -> None:
    ids = jagged(torch.arange(5))
    empty = no_layers(ids, None, width=4)
    assert empty.offsets().tolist() == ids.offsets().tolist()
    assert empty.values().shape == (5, 0, 4)
    assert no_layers(torch.zeros(2, 3), torch.ones(2, 3), width=4).shape == (2, 3, 0, 4)


@pytest.mark.parametrize("layout", [jagged, padded])
def test_layers_are_taken_in_the_order_that_is_asked_for(layout: Any) -> None:
    values = torch.arange(5 * 3 * 2).view(5, 3, 2)
    chosen = select_layers(layout(values), [2, 0, 0])
    expected = layout(values[:, [2, 0, 0]])
    assert chosen.is_nested == expected.is_nested
    pairs = zip(chosen.unbind(), expected.unbind(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("every, layers", [(1, [0, 1, 2]), (2, [0, 2]), ([0, 1, 1], [1, 2]), ([0, 0, 0], [])])
def test_which_layers_have_a_router(every: Any, layers: list[int]) -> None:
    assert moe_layers(config(moe_layer_freq=every)) == layers


@pytest.mark.parametrize("layout", [jagged, padded])
@pytest.mark.parametrize(
    "layers, every, complete",
    [
        (3, 1, True),
        (2, 1, False),
        (4, 1, True),  # of a rollout that counts more layers; the rest is nobody's
        (2, [0, 1, 1], True),
        (3, [0, 1, 1], True),
        (1, [0, 1, 1], False),
        (4, [0, 1, 1], False),  # nobody knows which four
    ],
)
def test_routes_have_to_cover_the_model(layout: Any, layers: int, every: Any, complete: bool) -> None:
    routes, tokens = layout(torch.zeros(5, layers, 2)), layout(torch.arange(5))
    if complete:
        refuse_incomplete(routes, tokens, config(moe_layer_freq=every))
        return
    with pytest.raises(RoutesError, match=f"routes of {layers} layers; the model has 3 layers"):
        refuse_incomplete(routes, tokens, config(moe_layer_freq=every))


def test_other_shapes_are_refused() -> None:
    tokens = jagged(torch.arange(5))
    with pytest.raises(RoutesError, match="no routed_experts"):
        refuse_incomplete(None, tokens, config())
    with pytest.raises(RoutesError, match="names 3 experts for each token, and moe_router_topk is 2"):
        refuse_incomplete(jagged(torch.zeros(5, 3, 3)), tokens, config())
    shorter = torch.nested.nested_tensor_from_jagged(torch.zeros(4, 3, 2), offsets=torch.tensor([0, 2, 2, 4]))
    with pytest.raises(RoutesError, match="differ in length"):
        refuse_incomplete(shorter, tokens, config())
    with pytest.raises(RoutesError, match="differ in length"):
        refuse_incomplete(torch.zeros(3, 2, 3, 2), padded(torch.arange(5)), config())


def test_where_lengths_cannot_or_need_not_agree_they_are_not_compared() -> None:
    shorter = torch.nested.nested_tensor_from_jagged(torch.zeros(4, 3, 2), offsets=torch.tensor([0, 2, 2, 4]))
    refuse_incomplete(shorter, None, config())
    refuse_incomplete(shorter, padded(torch.arange(5)), config())


def test_a_layer_number_belongs_to_one_router() -> None:
    refuse_duplicates([2, 3, 5], "a model")
    with pytest.raises(RoutesError, match=r"layer numbers \[2\] belong to more than one router in a model"):
        refuse_duplicates([2, 3, 2], "a model")
