"""Which groups the release's own replay buffers filter, and what they say where they cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import transfer_queue as tq

from tests.stock.jobs import transfer_queue as queue
from tests.stock.jobs.phases import attempt

Row = dict[str, Any]


def _row(reward: float | None = None, /, *, at: int = 2, tokens: int = 3, **info: float) -> Row:
    """One trajectory: its reward at one of its tokens, and what the reward function emits beside it."""
    row: Row = {"extra_fields": {"reward_extra_info": info}, "responses": torch.arange(tokens)}
    if reward is not None:
        row["rm_scores"] = torch.zeros(tokens, dtype=torch.float32)
        row["rm_scores"][at] = reward
    return row


REWARDS: dict[str, list[Row]] = {
    "ones": [_row(1.0), _row(1.0), _row(1.0)],
    "zeros": [_row(0.0), _row(0.0)],
    "differ": [_row(1.0), _row(0.0), _row(1.0)],
    "alone": [_row(1.0)],
    "tenths": [_row(0.1), _row(0.1, tokens=5, at=0), _row(0.1)],
    "nan": [_row(float("nan")), _row(float("nan"))],
    "infinite": [_row(float("inf")), _row(float("inf"))],
    "spread": [
        {**_row(), "rm_scores": queue.scores(0.25, 0.25, 0.0)},
        {**_row(), "rm_scores": queue.scores(0.0, 0.0, 0.5)},
    ],
}
"""``rm_scores`` and nothing else; only "spread" has them on more than one token."""
ACC: dict[str, list[Row]] = {
    "right": [_row(1.0, acc=1.0), _row(0.5, acc=1.0)],
    "mixed": [_row(1.0, acc=1.0), _row(1.0, acc=0.0)],
    "alone": [_row(1.0, acc=1.0)],
}
"""Filtering by acc and filtering by reward give opposite answers."""
OWN: dict[str, list[Row]] = {
    "same": [_row(1.0, reward=2.0), _row(0.5, reward=2.0)],
    "differ": [_row(1.0, reward=2.0), _row(1.0, reward=3.0)],
}
"""A reward function with a key of its own called reward, which is not the reward."""


def _trainer(mode: str, metric: str | None, enable: bool = True, colocated_model: bool = False) -> Any:
    settings = {
        "algorithm.filter_groups.enable": enable,
        "algorithm.filter_groups.metric": metric,
        "reward.reward_model.enable": colocated_model,
    }
    return queue.build(queue.trainer_class(mode), queue.config(mode, settings))


def _put(groups: dict[str, list[Row]], status: str = "finished") -> None:
    for uid, rows in groups.items():
        queue.put_trajectories({f"{uid}_{session}_0": row for session, row in enumerate(rows)})
        queue.put_prompts([uid], status, global_steps=1)


def _filtered(buffer: Any, partition: str = "train") -> Any:
    """The filtered groups, and how many there are of each reward."""
    buffer._sync_metadata_from_transfer_queue()
    uids, counts = buffer._dapo_filtered_keys(partition)
    return [sorted(uids), sorted(counts.items())]


def _ask(metric: str | None, *batches: dict[str, list[Row]], mode: str = "sync", enable: bool = True) -> Any:
    """One answer for each batch of groups that finishes."""
    queue.clear()
    buffer = _trainer(mode, metric, enable=enable).replay_buffer
    answers = []
    for groups in batches:
        _put(groups)
        answers.append(attempt(lambda: _filtered(buffer)))
    return answers


def _other_states() -> Any:
    """Groups that failed or are not finished are none of the filter's business, whatever they lack."""
    queue.clear()
    buffer = _trainer("sync", "reward").replay_buffer
    _put({"ones": REWARDS["ones"]})
    _put({"failed": [_row(1.0), _row(None)]}, status="failure")
    _put({"running": [_row(None)]}, status="running")
    return _filtered(buffer)


def _validation() -> Any:
    queue.clear()
    buffer = _trainer("sync", "reward").replay_buffer
    queue.put_prompts(["validation"], "finished", 1, partition="val")
    return _filtered(buffer, "val")


def _fetches() -> Any:
    """What is fetched while groups come, one poll after the other."""
    queue.clear()
    buffer = _trainer("sync", "reward").replay_buffer
    fetched: list[list[Any]] = []
    get = tq.kv_batch_get

    def watched(*args: Any, **kwargs: Any) -> Any:
        fetched[-1].append([*kwargs["select_fields"], len(kwargs["keys"])])
        return get(*args, **kwargs)

    with mock.patch.object(tq, "kv_batch_get", watched):
        for groups in ({}, {"ones": REWARDS["ones"]}, {}, {"zeros": REWARDS["zeros"]}):
            fetched.append([])
            _put(groups)
            _filtered(buffer)
    return fetched


def _after_eviction() -> Any:
    """A group that was evicted and comes again is looked at again."""
    queue.clear()
    buffer = _trainer("sync", "reward").replay_buffer
    _put({"again": REWARDS["ones"]})
    first = _filtered(buffer)
    buffer._clear_groups("train", {"again"})
    _put({"again": REWARDS["differ"]})
    return [first, _filtered(buffer)]


def _sample(mode: str, metric: str | None) -> Any:
    """A batch, and what was evicted on the way to it."""
    queue.clear()
    buffer = _trainer(mode, metric).replay_buffer
    refills: list[int] = []

    def refill(count: int) -> None:
        _put({f"new{len(refills)}": [_row(1.0, acc=1.0), _row(0.0, acc=0.0)]})
        refills.append(count)

    buffer.refill_fn = refill
    _put({"ones": [_row(1.0, acc=1.0), _row(1.0, acc=1.0)], "differ": [_row(1.0, acc=1.0), _row(0.0, acc=0.0)]})
    batch, metrics = buffer.sample(1, "train", 2)
    return {
        "groups": sorted({key.split("_")[0] for key in batch.keys}),
        "evicted": metrics["training/filter_groups/evicted_samples"],
        "rewards": sorted(metrics["_dapo_filtered_reward_counts"].items()),
    }


def _resolved(metric: str | None, **settings: Any) -> Any:
    """The buffer's metric, and the config's."""
    trainer = _trainer("sync", metric, **settings)
    return [trainer.replay_buffer.filter_groups_metric, trainer.config.algorithm.filter_groups.metric]


def _own_trainer() -> Any:
    """A user's trainer that knows what null means."""

    class OwnTrainer(queue.trainer_class("sync")):  # type: ignore[misc]
        def _resolve_filter_groups_metric(self) -> str:
            return self.config.algorithm.filter_groups.metric or "acc"

    trainer = queue.build(OwnTrainer, queue.config("sync", {"algorithm.filter_groups.enable": True}))
    return trainer.replay_buffer.filter_groups_metric


def _own_buffer() -> Any:
    """A user's replay buffer that knows what to do with groups that have no reward."""
    queue.clear()
    buffer = _trainer("sync", "reward").replay_buffer

    class OwnBuffer(type(buffer)):  # type: ignore[misc]
        def _dapo_filtered_keys(self, partition_id: str) -> Any:
            uids = self.finished_keys[partition_id]
            return uids, {None: len(uids)}

    buffer.__class__ = OwnBuffer
    _put({"without": [_row(), _row()]})
    return _filtered(buffer)


def measure() -> dict[str, Any]:
    """Every case; an exception counts as its answer."""
    cases: dict[str, Callable[[], Any]] = {
        "reward": lambda: _ask("reward", REWARDS),
        "reward, async": lambda: _ask("reward", REWARDS, mode="separate_async"),
        "null": lambda: _ask(None, REWARDS),
        "acc": lambda: _ask("acc", ACC),
        "reward, with acc": lambda: _ask("reward", ACC),
        "seq_reward": lambda: _ask("seq_reward", REWARDS),
        "score": lambda: _ask("score", {"same": [_row(1.0, score=3.0), _row(0.0, score=3.0)]}),
        "off": lambda: _ask("reward", REWARDS, enable=False),
        "own": lambda: _ask("reward", OWN),
        "own, then without": lambda: _ask("reward", OWN, {"without": REWARDS["ones"]}),
        "without, then own": lambda: _ask("reward", {"ones": REWARDS["ones"]}, OWN),
        "own for some": lambda: _ask("reward", {**OWN, "without": REWARDS["ones"]}),
        "no rows": lambda: _ask("reward", {"empty": []}),
        "some rows lack scores": lambda: _ask("reward", {"lacking": [_row(1.0), _row()], "ones": REWARDS["ones"]}),
        "all rows lack scores": lambda: _ask("reward", {"lacking": [_row(), _row()]}),
        "other states": _other_states,
        "validation": _validation,
        "fetches": _fetches,
        "after eviction": _after_eviction,
        "sample, sync": lambda: _sample("sync", "reward"),
        "sample, async": lambda: _sample("colocate_async", "reward"),
        "sample, acc": lambda: _sample("colocate_async", "acc"),
        "own trainer": _own_trainer,
        "own buffer": _own_buffer,
        "resolve reward": lambda: _resolved("reward"),
        "resolve null": lambda: _resolved(None),
        "resolve acc": lambda: _resolved("acc"),
        "resolve empty": lambda: _resolved(""),
        "resolve off": lambda: _resolved(None, enable=False),
        "resolve null, colocated model": lambda: _resolved(None, colocated_model=True),
        "resolve reward, colocated model": lambda: _resolved("reward", colocated_model=True),
    }
    return {name: attempt(case) for name, case in cases.items()}
