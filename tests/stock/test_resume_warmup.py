"""resume-warmup: verl#7762, issue verl#7759. Real trainers, dataloader and replay buffer on a real TransferQueue.

The numbers are the same on verl 0.9.1 without the patch, where nothing else is said.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.stock.async_trainers import BUGGY, EXISTS, PHASES, measured

pytestmark = pytest.mark.skipif(not EXISTS, reason="this release has no V1 trainers")

MODES = pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
COLOCATED = "colocate_async"
FIXED = ("fixed",) if BUGGY else PHASES
STOCK = ("stock", "back")


def answer(case: str, phase: str, mode: str = COLOCATED) -> Any:
    measurement = measured()["resume-warmup"][phase]
    assert isinstance(measurement, dict), measurement
    return measurement[mode][case]


def numbers(case: str, phase: str, mode: str = COLOCATED) -> tuple[int, int]:
    """New prompts that were submitted, and the prompt groups in the queue after that."""
    start = answer(case, phase, mode)
    assert isinstance(start, dict), start
    return start["added"], start["pool"]


@pytest.mark.skipif(not BUGGY, reason="fixed upstream")
@pytest.mark.parametrize("phase", STOCK)
@MODES
def test_stock_submits_the_whole_warm_up_again(mode: str, phase: str) -> None:
    assert numbers("12", phase, mode) == (16, 28)
    assert numbers("above", phase, mode) == (16, 36)
    if mode == COLOCATED:
        assert numbers("full", phase) == (16, 32)


@pytest.mark.parametrize("phase", FIXED)
@MODES
def test_only_what_is_missing_is_submitted(mode: str, phase: str) -> None:
    """Whatever the status and the age of the 12; trained trajectories and validation prompts do not count."""
    assert numbers("12", phase, mode) == (4, 16)
    assert answer("12", phase, mode)["row"] == 12  # of the dataset: the dataloader goes on where it was


@pytest.mark.parametrize("phase", FIXED)
@MODES
def test_a_pool_above_the_target_is_kept_and_logged(mode: str, phase: str) -> None:
    assert numbers("above", phase, mode) == (0, 20)
    (message,) = answer("above", phase, mode)["log"]
    assert "20 restored prompt groups" in message


@pytest.mark.parametrize("phase", FIXED)
def test_a_full_pool_stays_as_it_is(phase: str) -> None:
    assert numbers("full", phase) == (0, 16)


@pytest.mark.parametrize("phase", PHASES)
def test_stale_and_failed_groups_count_because_the_replay_buffer_replaces_them(phase: str) -> None:
    """10 of 16 groups are evicted or trained on in the first step, and 6 of them are replaced."""
    start = answer("stale", phase)
    assert start["sampled"] == 8
    assert start["left"] == (8 if phase in FIXED else 24)


@pytest.mark.parametrize("phase", PHASES)
@MODES
def test_a_fresh_start_is_as_before(mode: str, phase: str) -> None:
    assert numbers("fresh", phase, mode) == (16, 16)


@pytest.mark.parametrize("phase", PHASES)
def test_prompts_that_a_trainer_submits_by_itself_are_not_taken_for_restored_ones(phase: str) -> None:
    assert numbers("fresh, own prompts", phase) == (21, 21)
    assert numbers("resumed, own prompts", phase) == ((9, 21) if phase in FIXED else (21, 33))


@pytest.mark.parametrize("phase", PHASES)
def test_a_resume_without_a_queue_checkpoint_is_as_before(phase: str) -> None:
    assert numbers("no queue checkpoint", phase) == (16, 16)
    assert answer("no queue checkpoint", phase)["row"] == 16


@pytest.mark.parametrize("phase", PHASES)
@MODES
def test_skip_rollout_tq_submits_nothing(mode: str, phase: str) -> None:
    assert numbers("skip", phase, mode) == (0, 12)


@pytest.mark.parametrize("phase", PHASES)
def test_no_warm_up_wanted(phase: str) -> None:
    assert numbers("none wanted", phase) == (0, 3)


@pytest.mark.parametrize("phase", FIXED)
def test_one_and_a_half_batches(phase: str) -> None:
    """verl 0.9.0 takes whole batches only, on a fresh start."""
    assert numbers("one and a half", phase) == (7, 12)


@MODES
def test_what_is_no_multiple_of_the_generation_batch_is_rounded_down(mode: str) -> None:
    """11 prompts are missing, and the trainer's own dataloader hands out 4 at once."""
    assert numbers("fours, 5", "fixed", mode) == (8, 13)
    for phase in STOCK:
        if BUGGY:
            assert numbers("fours, 5", phase, mode) == (16, 21)
        else:
            assert "num_prompts (11) must be a positive multiple" in answer("fours, 5", phase, mode)


def test_less_than_one_generation_batch_is_left_out() -> None:
    assert numbers("fours, 13", "fixed") == (0, 13)
    if not BUGGY:
        assert "num_prompts (3) must be a positive multiple" in answer("fours, 13", "stock")


@pytest.mark.parametrize("phase", FIXED)
def test_multiples_of_the_generation_batch(phase: str) -> None:
    assert numbers("fours, 8", phase) == (8, 16)


@pytest.mark.skipif(BUGGY, reason="about what verl 0.9.1 does by itself")
@MODES
def test_the_native_warm_up_runs_wherever_it_does_not_raise(mode: str) -> None:
    cases = measured()["resume-warmup"]["fixed"][mode]
    ours = {name for name, start in cases.items() if any("resume-warmup" in message for message in start["log"])}
    assert ours == {"fours, 5", "fours, 13"} & cases.keys()
