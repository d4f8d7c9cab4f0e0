"""The counting and the guards of per-token-loss, on their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_fixes.errors import UnsupportedSettingError
from verl_fixes.router_losses import active_router_losses, reject_unsupported
from verl_fixes.token_counts import (
    alignment_padding,
    local_share,
    routed_tokens,
)

lengths_of_a_batch = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum)


def jagged(lengths: list[int], fill: Any = 1) -> torch.Tensor:
    rows = [torch.full((length,), fill) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@given(lengths_of_a_batch, st.integers(0, 3))
def test_routed_tokens_of_every_layout(lengths: list[int], padding: int) -> None:
    width = max(lengths) + padding
    dense = (torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]).long()
    ids = jagged(lengths)
    everything = torch.zeros(len(lengths), width)
    assert routed_tokens({"input_ids": ids}).item() == sum(lengths)
    assert routed_tokens({"input_ids": everything}).item() == everything.numel()
    for mask in (dense, dense.bool(), dense.float(), jagged(lengths), jagged(lengths, fill=True)):
        tokens = routed_tokens({"attention_mask": mask, "input_ids": everything})
        assert tokens.dtype is torch.int64
        assert tokens.dim() == 0
        assert tokens.item() == sum(lengths)


def test_a_nested_mask_may_have_zeros_and_jagged_ids_may_have_holes() -> None:
    mask = torch.nested.as_nested_tensor([torch.tensor([1, 0, 1]), torch.tensor([0, 1])], layout=torch.jagged)
    assert routed_tokens({"attention_mask": mask}).item() == 3
    ids = torch.nested.narrow(torch.ones(2, 6), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), layout=torch.jagged)
    assert routed_tokens({"input_ids": ids}).item() == 5
    assert routed_tokens({"attention_mask": ids, "input_ids": torch.ones(2, 6)}).item() == 5


def test_strided_nested_ids() -> None:
    ids = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)], layout=torch.strided)
    assert routed_tokens({"input_ids": ids}).item() == 7


def test_an_absent_mask_may_also_be_none() -> None:
    assert routed_tokens({"attention_mask": None, "input_ids": jagged([2, 3])}).item() == 5


@given(lengths_of_a_batch, st.sampled_from([1, 2, 4, 6, 8, 32]))
def test_padding_makes_every_sequence_a_multiple(lengths: list[int], multiple: int) -> None:
    padding = alignment_padding({"input_ids": jagged(lengths)}, multiple)
    assert padding == sum(
        next(n for n in range(length, length + multiple) if n % multiple == 0) for length in lengths
    ) - sum(lengths)
    assert alignment_padding({"input_ids": torch.ones(2, 5)}, multiple) == 0  # not packed


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), st.integers(1, 9))
def test_shares_are_even_and_add_up_exactly(micro_batches: list[int], cp_size: int) -> None:
    for tokens in micro_batches:
        shares = [local_share(torch.tensor(tokens), cp_size, rank) for rank in range(cp_size)]
        assert {share.dtype for share in shares} == {torch.int}
        counts = [int(share) for share in shares]
        assert sum(counts) == tokens
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)


def config(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(num_moe_experts=8, **settings)


@pytest.mark.parametrize(
    "settings, active",
    [
        ({}, 0),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}, 0),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, 0),
        ({"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.1}, 0),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}, 1),
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}, 1),
        ({"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": [0.1]}, 1),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.0, 0.0]}, 0),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.0, 0.1]}, 1),
        ({"moe_router_load_balancing_type": ["none", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.0]}, 0),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": 0.1}, 2),
        ({"moe_z_loss_coeff": None}, 0),
        ({"moe_z_loss_coeff": 0.0}, 0),
        ({"moe_z_loss_coeff": 1e-3}, 1),
        ({"moe_z_loss_coeff": 1e-3, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}, 2),
    ],
    ids=str,
)
def test_which_router_losses_are_active(settings: dict[str, Any], active: int) -> None:
    assert len(active_router_losses(config(**settings))) == active
    dense = SimpleNamespace(**settings, num_moe_experts=None)
    assert active_router_losses(dense) == []


@pytest.mark.parametrize("use_remove_padding", [True, False])
@pytest.mark.parametrize("z_loss", [None, 1e-3])
def test_bshd_is_rejected_only_while_a_router_loss_is_active(use_remove_padding: bool, z_loss: float | None) -> None:
    if use_remove_padding or not z_loss:
        reject_unsupported(use_remove_padding, config(moe_z_loss_coeff=z_loss))
        return
    with pytest.raises(UnsupportedSettingError) as error:
        reject_unsupported(use_remove_padding, config(moe_z_loss_coeff=z_loss))
    for part in ("per-token-loss", "moe_z_loss_coeff=0.001", "use_remove_padding=True", "VERL_FIXES_PER_TOKEN_LOSS=0"):
        assert part in str(error.value)
    assert isinstance(error.value, ValueError)
