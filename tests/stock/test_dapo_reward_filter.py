"""dapo-reward-filter: verl#7792. The release's own replay buffers on a TransferQueue.

verl 0.9.1 is asked without the patch and gives the same numbers, where nothing else is said.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.stock.async_trainers import BUGGY, EXISTS, PHASES, measured

pytestmark = pytest.mark.skipif(not EXISTS, reason="this release filters no groups")
only_buggy = pytest.mark.skipif(not BUGGY, reason="fixed upstream")

EVERY = PHASES if BUGGY else ("stock",)
RIGHT = "fixed" if BUGGY else "stock"
BY_REWARD = [["ones", "spread", "tenths", "zeros"], [[0.0, 1], [pytest.approx(0.1), 1], [0.5, 1], [1.0, 1]]]
BY_NAME = ("ones", "zeros", "differ", "alone", "tenths", "nan", "infinite", "spread")
MISSING = "RuntimeError: Finished groups are missing DAPO metric 'reward': "
UNSET = "ValueError: algorithm.filter_groups.metric must be set when group filtering is enabled"


def answer(case: str, phase: str = RIGHT) -> Any:
    measurement = measured()["dapo-reward-filter"][phase]
    assert isinstance(measurement, dict), measurement
    return measurement[case]


@only_buggy
@pytest.mark.parametrize("phase", ["stock", "back"])
def test_stock_knows_no_reward(phase: str) -> None:
    for case in ("reward", "reward, async", "reward, with acc"):
        (message,) = answer(case, phase)
        assert message.startswith(MISSING)
    assert answer("sample, sync", phase).startswith(MISSING)
    assert answer("null", phase) == answer("resolve null", phase) == UNSET


@pytest.mark.parametrize("case", ["reward", "reward, async"])
def test_groups_are_filtered_by_the_sum_of_rm_scores(case: str) -> None:
    """One trajectory, different rewards, NaN and infinite ones are kept; tokens and their number do not matter."""
    assert answer(case) == [BY_REWARD]


@only_buggy
def test_null_means_reward_and_the_config_says_so() -> None:
    assert answer("null") == [BY_REWARD]
    assert answer("resolve null") == ["reward", "reward"]


@pytest.mark.parametrize("case", ["sample, sync", "sample, async", "sample, acc"])
def test_a_batch_is_sampled_and_the_filtered_group_is_replaced(case: str) -> None:
    assert answer(case) == {"groups": ["differ", "new0"], "evicted": 1, "rewards": [[1.0, 1]]}


@pytest.mark.parametrize("phase", EVERY)
def test_acc_is_as_before_where_the_reward_would_filter_other_groups(phase: str) -> None:
    assert answer("acc", phase) == [[["right"], [[1.0, 1]]]]
    assert answer("resolve acc", phase) == ["acc", "acc"]


def test_reward_is_not_taken_from_acc() -> None:
    assert answer("reward, with acc") == [[["mixed"], [[1.0, 1]]]]


@pytest.mark.parametrize("phase", EVERY)
def test_other_metrics_are_as_before_and_so_are_their_errors(phase: str) -> None:
    assert answer("score", phase) == [[["same"], [[3.0, 1]]]]
    assert answer("seq_reward", phase) == [MISSING.replace("'reward'", "'seq_reward'") + str(sorted(BY_NAME)[:5])]


@pytest.mark.parametrize("phase", EVERY)
def test_nothing_is_filtered_where_nothing_is_asked_for(phase: str) -> None:
    assert answer("off", phase) == [[[], []]]
    assert answer("resolve off", phase) == [None, None]
    assert answer("validation", phase) == [[], []]


@pytest.mark.parametrize("phase", EVERY)
def test_the_trainer_still_refuses_what_cannot_work(phase: str) -> None:
    assert answer("resolve empty", phase) == UNSET
    assert "requires the reward metric at sampling time" in answer("resolve reward, colocated model", phase)
    if phase == "fixed":
        assert "requires the reward metric at sampling time" in answer("resolve null, colocated model", phase)


@pytest.mark.parametrize("phase", EVERY)
def test_trainers_and_buffers_with_methods_of_their_own_are_left_alone(phase: str) -> None:
    assert answer("own trainer", phase) == ("acc" if BUGGY else "reward")  # the default is null and reward
    assert answer("own buffer", phase) == [["without"], [[None, 1]]]


@only_buggy
@pytest.mark.parametrize("phase", PHASES)
def test_a_key_of_ones_own_called_reward_keeps_its_meaning(phase: str) -> None:
    assert answer("own", phase) == [[["same"], [[2.0, 1]]]]
    assert answer("own, then without", phase) == [[["same"], [[2.0, 1]]], MISSING + "['without']"]
    assert answer("own for some", phase) == [MISSING + "['without']"]


@pytest.mark.skipif(BUGGY, reason="about verl 0.9.1")
def test_verl_091_reads_rm_scores_even_so() -> None:
    assert answer("own") == [[["differ"], [[1.0, 1]]]]


def test_it_is_decided_once_per_buffer() -> None:
    assert answer("without, then own") == [[["ones"], [[1.0, 1]]], [["differ", "ones"], [[1.0, 2]]]]


def test_each_group_is_fetched_once_and_the_reward_function_s_keys_once_per_buffer() -> None:
    first = [["extra_fields", 3]] if BUGGY else []
    assert answer("fetches") == [[], [*first, ["rm_scores", 3]], [], [["rm_scores", 2]]]


def test_a_group_that_comes_again_is_looked_at_again() -> None:
    assert answer("after eviction") == [[["again"], [[1.0, 1]]], [[], []]]


def test_failed_and_unfinished_groups_may_lack_rewards() -> None:
    assert answer("other states") == [["ones"], [[1.0, 1]]]


@pytest.mark.parametrize("phase", EVERY)
def test_a_finished_group_without_trajectories_is_an_error_as_before(phase: str) -> None:
    assert answer("no rows", phase) == [MISSING + "['empty']"]


@pytest.mark.parametrize("case", ["some rows lack scores", "all rows lack scores"])
def test_finished_trajectories_without_a_reward_are_named(case: str) -> None:
    """verl 0.9.1 ends with a KeyError of the TransferQueue's answer."""
    (message,) = answer(case)
    if BUGGY:
        assert message.startswith("RuntimeError: verl-fixes, dapo-reward-filter: algorithm.filter_groups.metric=reward")
        assert "trajectories without them: ['lacking']. Way out: " in message
    else:
        assert message.startswith("KeyError")
