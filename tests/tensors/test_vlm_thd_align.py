"""How vlm-thd-align pads rows, on its own."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_fixes.patches.vlm_thd_align import covered_lengths, pad_rows

rows = st.lists(st.integers(0, 40), min_size=1, max_size=5)
multiples = st.sampled_from([1, 2, 3, 4, 8, 12])


def up(length: int, multiple: int) -> int:
    return length + -length % multiple


@given(rows, multiples)
def test_the_mask_covers_real_tokens_where_tp_and_cp_alone_decide(lengths: list[int], multiple: int) -> None:
    assert covered_lengths(lengths, [up(length, multiple) for length in lengths], multiple) == lengths


@given(rows, multiples, st.integers(1, 6), st.integers(0, 9))
def test_packing_what_is_covered_makes_the_padded_lengths(
    lengths: list[int], multiple: int, coarser: int, bucket: int
) -> None:
    padded = [up(length, multiple * coarser) for length in lengths]
    padded[-1] += bucket * multiple
    covered = covered_lengths(lengths, padded, multiple)
    assert [up(length, multiple) for length in covered] == padded
    assert all(old <= new for old, new in zip(lengths, covered, strict=True))


def test_covering_never_leaves_a_token_out() -> None:
    assert covered_lengths([7, 0], [6, 0], 4) == [7, 0]


@given(rows, multiples, st.integers(0, 9), st.sampled_from([torch.bool, torch.int64]))
def test_rows_keep_their_tokens(lengths: list[int], multiple: int, bucket: int, dtype: torch.dtype) -> None:
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).to(dtype)
    ids = torch.arange(1, 1 + mask.numel()).view_as(mask)
    before = ids.clone(), mask.clone()
    padded = [up(length, multiple) for length in lengths]
    padded[-1] += bucket * multiple
    new_ids, new_mask = pad_rows(ids, mask, padded, multiple, pad_token_id=0)
    assert (ids.equal(before[0]), mask.equal(before[1])) == (True, True)
    assert new_mask is not None
    assert new_ids.shape == new_mask.shape == (len(lengths), max(padded))
    assert new_ids[:, :width].equal(ids)
    assert not new_ids[:, width:].any()
    assert new_mask.dtype is dtype
    assert new_mask.sum(dim=1).tolist() == covered_lengths(lengths, padded, multiple)
    assert bool((new_mask.int().diff(dim=1) <= 0).all())


def test_an_absent_mask_stays_absent() -> None:
    ids, mask = pad_rows(torch.ones(2, 5, dtype=torch.long), None, [6, 2], 2, pad_token_id=9)
    assert mask is None
    assert ids.tolist() == [[1] * 5 + [9]] * 2
