"""DAPO's group filter understands ``algorithm.filter_groups.metric=reward``.

What goes wrong: the V1 replay buffer of verl 0.9.0 looks for the metric in ``reward_extra_info`` alone. The reward
itself is not there: with ``metric=reward`` the run stops at the first finished group with "Finished groups are missing
DAPO metric 'reward'", and with the default, null, the trainer refuses to start.

What the wrapper does: ``reward`` is the sum of a trajectory's ``rm_scores``, the reward before any KL penalty. null
with ``enable=True`` means ``reward``, and the run's config says so. A reward function that emits a key of its own
called ``reward`` keeps it, as on stock; this is decided once per replay buffer, by the first finished groups. Every
other metric is left to the original.

When it can go: with verl 0.9.1. There ``reward`` is the summed ``rm_scores`` whatever the reward function emits, and
the default instead of null.
Source: https://github.com/verl-project/verl/pull/7792
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict, mentions

REWARD = "reward"
_SCORES = "rm_scores"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_FILTER = "ReplayBuffer._dapo_filtered_keys"
_DECISION = "_verl_fixes_own_reward_key"


def shared_reward(rewards: Sequence[float]) -> float | None:
    """The reward that all trajectories of a group have; None where they differ, or where there is only one.

    A group with NaN or infinite rewards shares none, as in verl.
    """
    import numpy as np

    with np.errstate(invalid="ignore"):
        return rewards[0] if len(rewards) > 1 and np.ptp(rewards) == 0 else None


def has_own_key(extra_fields: Iterable[Any]) -> bool:
    """Whether the reward function emitted a key called ``reward`` for any of these trajectories."""
    for item in extra_fields:
        fields = getattr(item, "data", item)  # a NonTensorData
        info = fields.get("reward_extra_info") if isinstance(fields, Mapping) else None
        if isinstance(info, Mapping) and REWARD in info:
            return True
    return False


def filter_by_reward(original: Callable[..., Any], self: Any, partition_id: str, *args: Any, **kwargs: Any) -> Any:
    """Around ``ReplayBuffer._dapo_filtered_keys(self, partition_id)``.

    The original keeps what it found about finished groups, and only looks at new ones: they are classified here, by
    ``rm_scores``, and it does the rest.

    Raises:
        RuntimeError: a finished group has trajectories without ``rm_scores``.
    """
    if partition_id != "val" and self.filter_groups_metric == REWARD:
        known = self._dapo_classification_cache[partition_id]
        rows = defaultdict(list)
        for key in self.partitions[partition_id]:
            uid = key.split("_")[0]
            if uid in self.finished_keys[partition_id] and uid not in known:
                rows[uid].append(key)
        if rows and not _keeps_its_own_key(self, partition_id, rows):
            known.update({uid: shared_reward(rewards) for uid, rewards in _rewards(partition_id, rows).items()})
    return original(self, partition_id, *args, **kwargs)


def _keeps_its_own_key(buffer: Any, partition_id: str, rows: Mapping[str, list[str]]) -> bool:
    if not hasattr(buffer, _DECISION):
        data = _fetch(partition_id, [key for keys in rows.values() for key in keys], "extra_fields")
        own = has_own_key(data)
        source = f"the key {REWARD!r} that the reward function emits" if own else f"the sum of {_SCORES}"
        logging.getLogger(_BUFFER).info(f"verl-fixes, dapo-reward-filter: groups are filtered by {source}")
        setattr(buffer, _DECISION, own)
    return bool(getattr(buffer, _DECISION))


def _rewards(partition_id: str, rows: Mapping[str, list[str]]) -> dict[str, list[float]]:
    """The reward of each trajectory, by group."""
    keys = [key for group in rows.values() for key in group]
    try:
        scores = dict(zip(keys, _fetch(partition_id, keys, _SCORES), strict=True))
    except (KeyError, ValueError) as error:  # no row has the field, or not every row
        lacking = sorted(uid for uid, group in rows.items() if not _has_scores(partition_id, group))
        if not lacking:
            raise
        raise RuntimeError(
            f"verl-fixes, dapo-reward-filter: algorithm.filter_groups.metric={REWARD} reads {_SCORES}, and these "
            f"finished groups have trajectories without them: {lacking[:5]}. Way out: let the reward loop or the agent "
            "loop set reward_score for each trajectory, or name a key of reward_extra_info as the metric."
        ) from error
    return {uid: [float(scores[key].sum()) for key in group] for uid, group in rows.items()}


def _has_scores(partition_id: str, keys: list[str]) -> bool:
    try:
        _fetch(partition_id, keys, _SCORES)
    except (KeyError, ValueError):
        return False
    return True


def _fetch(partition_id: str, keys: list[str], field: str) -> list[Any]:
    """One field of each trajectory.

    Raises:
        KeyError: none of them has it.
        ValueError: some of them do not have it.
    """
    import transfer_queue

    return list(transfer_queue.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=[field])[field])


def default_to_reward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``PPOTrainer._resolve_filter_groups_metric(self)``: null is written as ``reward`` into the config."""
    from omegaconf import open_dict

    groups = self.config.algorithm.get("filter_groups", None)
    if groups is not None and groups.get("enable", False) and groups.get("metric", None) is None:
        with open_dict(self.config):
            self.config.algorithm.filter_groups.metric = REWARD
    return original(self, *args, **kwargs)


def _reads_rewards(function: Function, source: Source) -> Verdict:
    if mentions(function, _SCORES):
        return Verdict.FIXED
    words = ("extra_fields", "finished_keys", "partitions", "_dapo_classification_cache", "filter_groups_metric")
    return Verdict.BUGGY if all(mentions(function, word) for word in words) else Verdict.DRIFTED


def _refuses_null(function: Function, source: Source) -> Verdict:
    """A release whose filter knows ``reward`` has it as its default; only an explicit null is refused there."""
    if not mentions(function, "filter_groups") or not mentions(function, "metric"):
        return Verdict.DRIFTED
    buffer = source.function(_BUFFER, _FILTER)
    return Verdict.DRIFTED if buffer is None else _reads_rewards(buffer, source)


PATCH = Patch(
    name="dapo-reward-filter",
    title="DAPO filters groups by the reward itself",
    hurts=(
        "In verl 0.9.0 algorithm.filter_groups cannot filter by the reward: metric=reward stops the run at the first "
        "finished group, because only what the reward function emits beside the reward is looked at, and the "
        "default, null, is refused at start."
    ),
    does=(
        "metric=reward filters by the sum of rm_scores, the reward before any KL penalty, and null with enable=True "
        "means reward. A reward function that emits a key of its own called reward keeps it. Other metrics are "
        "untouched."
    ),
    removable="With verl 0.9.1, where reward is the summed rm_scores whatever the reward function emits.",
    upstream=("https://github.com/verl-project/verl/pull/7792",),
    fixed_in="0.9.1",
    targets=(
        Target(
            module=_BUFFER,
            qualname=_FILTER,
            wrapper=filter_by_reward,
            question=_reads_rewards,
            known={
                "b3d98f8c310cf205": Verdict.BUGGY,  # 0.9.0
                "dc6e43e1f4f25834": Verdict.FIXED,  # 0.9.1
            },
            overrides=False,
        ),
        Target(
            module="verl.trainer.ppo.v1.trainer_base",
            qualname="PPOTrainer._resolve_filter_groups_metric",
            wrapper=default_to_reward,
            question=_refuses_null,
            overrides=False,
        ),
    ),
)
