"""A stand-in for what a trainer's ``_validate`` talks to, and the real trainers fed by it."""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

DEFAULT_N = 2
Batch = dict[str, Any]
"""``data_source`` of each prompt. ``sessions``: of each prompt a list of rewards, None where the session fails, with
``late`` the index of a later batch in which the session surfaces. ``n``: ``__rollout_n__``, where it is not default."""


class Outside:
    """What a trainer's ``_validate`` talks to: a val dataloader, rollout workers, replay buffer and TransferQueue."""

    partition_id = "val"
    reward_loop_worker_handles = ("there is one",)
    pad_token_id = 0

    def __init__(self, batches: list[Batch], dies_in: int | None = None) -> None:
        self.batches = batches
        self.dies_in = dies_in
        self.current = -1
        self.surfacing: dict[int, list[str]] = defaultdict(list)
        self.rows: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            count = len(batch["sessions"])
            columns = {"raw_prompt": ["Why?"] * count, "index": list(range(count))}
            if "data_source" in batch:
                columns["data_source"] = batch["data_source"]
            if "n" in batch:
                columns["__rollout_n__"] = batch["n"]
            yield {name: np.fromiter(column, dtype=object, count=count) for name, column in columns.items()}

    def generate_sequences(self, prompts: Any) -> None:
        self.current += 1
        batch = self.batches[self.current]
        sources = batch.get("data_source", ["unknown"] * len(batch["sessions"]))
        for uid, source, sessions in zip(prompts["uid"], sources, batch["sessions"], strict=True):
            for number, session in enumerate(sessions):
                if session is not None:
                    more = dict(session)
                    key = f"{uid}_{number}_0"
                    self.surfacing[more.pop("late", self.current)].append(key)
                    self.rows[key] = {"uid": uid, "data_source": source, "reward": more.pop("reward"), "more": more}

    def sample(self, global_steps: int, partition_id: str, batch_size: int | None = None) -> Any:
        if self.dies_in == self.current:
            raise RuntimeError("the replay buffer is gone")
        self.keys = self.surfacing[self.current]
        return self if batch_size is None else (self, {})

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        from verl.utils import tensordict_utils as tu

        if "prompts" in select_fields:
            ids = torch.nested.as_nested_tensor([torch.ones(2)] * len(keys), layout=torch.jagged)
            return {"prompts": ids, "responses": ids}
        rows = [self.rows[key] for key in keys]
        return tu.get_tensordict(
            {
                "uid": [row["uid"] for row in rows],
                "data_source": [row["data_source"] for row in rows],
                "rm_scores": torch.tensor([[0.0, row["reward"]] for row in rows], dtype=torch.float64),
                "num_turns": torch.ones(len(rows), dtype=torch.int64),
                "extra_fields": [{"reward_extra_info": row["more"]} for row in rows],
            }
        )

    def kv_batch_put(self, **_: Any) -> None: ...

    def kv_clear(self, **_: Any) -> None: ...

    def remove(self, *_: Any) -> None: ...

    def decode(self, *_: Any, **__: Any) -> str:
        return "Because."


def trainer_class() -> Any:
    """The trainer of this release that loses failed sessions."""
    try:
        from verl.trainer.ppo.v1 import get_trainer_cls
    except ImportError:
        from verl.trainer.main_ppo_sync import PPOTrainer

        return PPOTrainer
    return get_trainer_cls("sync")


def trainer_with(outside: Outside, cls: Any) -> Any:
    """A trainer that has nothing but what ``_validate`` needs."""
    from omegaconf import OmegaConf

    trainer = object.__new__(cls)
    rollout = {"val_kwargs": {"n": DEFAULT_N}}
    trainer.config = OmegaConf.create(
        {"trainer": {"log_val_generations": 0}, "actor_rollout_ref": {"rollout": rollout}}
    )
    trainer.global_steps = 0
    connect(trainer, outside)
    return trainer


def connect(trainer: Any, outside: Outside) -> None:
    for name in ("val_dataloader", "agent_loop_manager", "async_rollout_manager", "replay_buffer", "tokenizer"):
        setattr(trainer, name, outside)
    trainer.reward_loop_manager = outside


class _Queues(threading.local):
    """The TransferQueue of each thread's trainer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outside, name)


@contextmanager
def queue(cls: Any) -> Iterator[_Queues]:
    """Put a stand-in for TransferQueue where ``_validate`` looks for it."""
    queues = _Queues()
    with mock.patch.dict(inspect.unwrap(cls._validate).__globals__, {"tq": queues}):
        yield queues


def validate(batches: list[Batch], cls: Any = None) -> dict[str, float]:
    """The metrics of one validation."""
    cls = cls or trainer_class()
    outside = Outside(batches)
    with queue(cls) as queues:
        queues.outside = outside
        return plain(trainer_with(outside, cls)._validate())


def plain(metrics: Any) -> Any:
    if isinstance(metrics, dict):
        return {str(key): plain(value) for key, value in metrics.items()}
    return float(metrics)
