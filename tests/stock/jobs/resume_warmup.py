"""What the asynchronous trainers submit at the start of a fresh and of a resumed run."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tests.stock.jobs import transfer_queue as queue
from tests.stock.jobs.phases import attempt

MODES = ("colocate_async", "separate_async")
STEP = 3
"""Of the checkpoint."""
BATCHES = 2
"""``num_warmup_batches``: the target is 16 prompts."""
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
_FOLDER = tempfile.TemporaryDirectory(prefix="verl-fixes-")


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record.getMessage())


def _config(mode: str, folder: str, batches: float = BATCHES, settings: Mapping[str, Any] = NO_SETTINGS) -> Any:
    warmup = {f"trainer.v1.{mode}.num_warmup_batches": batches}
    return queue.config(mode, {"trainer.default_local_dir": folder, **warmup, **settings})


def _mixed(uids: list[str]) -> None:
    """Every status, one group that is too old, and what must not count: a trained trajectory and validation."""
    for uid, status in zip(uids, ("running", "finished", "failure", "finished"), strict=False):
        queue.put_prompts([uid], status, STEP)
    queue.put_prompts(uids[3:4], "finished", 1)
    rows = {f"{uid}_0_0": {"rm_scores": queue.scores(1)} for uid in (uids[1], uids[3], "trained")}
    queue.put_trajectories(rows)
    queue.put_prompts(["validation"], "running", STEP, partition="val")


def _stale(uids: list[str]) -> None:
    """8 groups to train on, 4 too old ones, 2 that failed; the rest is unfinished."""
    queue.put_prompts(uids[:8], "finished", STEP)
    queue.put_prompts(uids[8:12], "finished", 1)
    queue.put_prompts(uids[12:14], "failure", STEP)
    queue.put_trajectories({f"{uid}_0_0": {"rm_scores": queue.scores(1)} for uid in uids[:12]})


Arrange = Callable[[list[str]], None]


@functools.cache
def _checkpoint(mode: str, groups: int, arrange: Arrange | None, with_queue: bool) -> tuple[str, frozenset[str]]:
    """A checkpoint at ``STEP`` with that many prompt groups in its queue: its folder, and their uids.

    All of them are pending if nothing else is arranged.
    """
    queue.clear()
    folder = tempfile.mkdtemp(dir=_FOLDER.name)
    trainer = queue.build(queue.trainer_class(mode), _config(mode, folder))
    trainer.global_steps = STEP
    trainer._add_prompts_to_generate(groups)
    uids = queue.prompts()
    if arrange:
        arrange(uids)
    trainer._save_checkpoint()
    if not with_queue:
        shutil.rmtree(os.path.join(folder, f"global_step_{STEP}", "transfer_queue"))
    return folder, frozenset(uids)


def _start(
    mode: str,
    groups: int | None = None,
    settings: Mapping[str, Any] = NO_SETTINGS,
    *,
    arrange: Arrange | None = None,
    cls: Callable[[Any], Any] = lambda cls: cls,
    batches: float = BATCHES,
    with_queue: bool = True,
    sample: bool = False,
) -> dict[str, Any]:
    """``fit()`` of a run that ends before its first step; ``groups`` None starts from scratch.

    Returns:
        ``added``: new prompts, ``row``: where the dataloader went on, ``pool``: prompt groups in the queue then,
        ``left``: the same after one batch was sampled, ``log``: what was said about it.
    """
    folder, restored = _FOLDER.name, frozenset()
    if groups is not None:
        folder, restored = _checkpoint(mode, groups, arrange, with_queue)
    queue.clear()
    trainer = queue.build(cls(queue.trainer_class(mode)), _config(mode, folder, batches, settings))
    messages, logger = _Messages(), logging.getLogger("verl.trainer.ppo.v1.trainer_base")
    logger.addHandler(messages)
    try:
        trainer._load_checkpoint()
        trainer.fit(trainer.agent_loop_manager)
    finally:
        logger.removeHandler(messages)
    new = [row for call in trainer.agent_loop_manager.given for uid, row in call if uid not in restored]
    answer = {
        "added": len(new),
        "row": new[0] if new else None,
        "pool": len(queue.prompts()),
        "log": [message for message in messages.all if "restored prompt groups" in message],
    }
    if sample:
        batch, _ = trainer.replay_buffer.sample(STEP + 1, "train", queue.BATCH)
        answer["sampled"] = len({key.split("_")[0] for key in batch.keys})
        answer["left"] = len(queue.prompts())
    return answer


def _adds_its_own(cls: Any) -> Any:
    class AddsItsOwn(cls):  # type: ignore[misc, valid-type]
        def on_train_begin(self) -> None:
            self._add_prompts_to_generate(5)
            super().on_train_begin()

    return AddsItsOwn


def _own_dataloader(cls: Any) -> Any:
    return queue.with_dataloader_of_its_own(cls, 4)


def measure() -> dict[str, Any]:
    """Every case on one trainer and some on the other; an exception counts as its answer."""
    drop = {"trainer.v1.sampler.max_off_policy_threshold": 2}
    skip = {"skip.rollout_tq.enable": True}
    both: dict[str, Callable[[str], Any]] = {
        "fresh": _start,
        "12": lambda mode: _start(mode, 12, arrange=_mixed),
        "above": lambda mode: _start(mode, 20),
        "skip": lambda mode: _start(mode, 12, skip),
        "fours, 5": lambda mode: _start(mode, 5, cls=_own_dataloader),
    }
    one: dict[str, Callable[[str], Any]] = {
        "fresh, own prompts": lambda mode: _start(mode, cls=_adds_its_own),
        "resumed, own prompts": lambda mode: _start(mode, 12, cls=_adds_its_own),
        "no queue checkpoint": lambda mode: _start(mode, 16, with_queue=False),
        "full": lambda mode: _start(mode, 16, arrange=_mixed),
        "none wanted": lambda mode: _start(mode, 3, batches=0),
        "one and a half": lambda mode: _start(mode, 5, batches=1.5),
        "stale": lambda mode: _start(mode, 16, drop, arrange=_stale, sample=True),
        "fours, 13": lambda mode: _start(mode, 13, cls=_own_dataloader),
        "fours, 8": lambda mode: _start(mode, 8, cls=_own_dataloader),
    }
    cases = {"colocate_async": {**both, **one}, "separate_async": both}
    return {
        mode: {name: attempt(functools.partial(case, mode)) for name, case in cases[mode].items()} for mode in MODES
    }
