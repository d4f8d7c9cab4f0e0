"""The pure logic of dapo-reward-filter."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_fixes.patches.dapo_reward_filter import has_own_key, shared_reward

rewards = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(rewards, min_size=1, max_size=8))
def test_a_shared_reward_is_that_of_all(values: list[float]) -> None:
    expected = values[0] if len(values) > 1 and len(set(values)) == 1 else None
    assert shared_reward(values) == expected


@given(rewards, st.integers(2, 64))
def test_many_equal_rewards_are_shared_as_verl_judges_them(value: float, count: int) -> None:
    """verl asks for a standard deviation of 0; a sum of up to 64 numbers of 32 bits is exact."""
    assert shared_reward([value] * count) == value
    assert float(np.std([value] * count)) == 0.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_not_shared(value: float) -> None:
    assert shared_reward([value, value]) is None


def test_a_key_of_ones_own() -> None:
    own = {"reward_extra_info": {"reward": 1.0}}
    assert has_own_key([own])
    assert has_own_key([{}, SimpleNamespace(data=own)])
    assert not has_own_key([])
    assert not has_own_key([None, "reward", {"reward": 1.0}, {"reward_extra_info": None}, {"reward_extra_info": {}}])
    assert not has_own_key([{"reward_extra_info": {"acc": 1.0, "rewards": 1.0}}])
