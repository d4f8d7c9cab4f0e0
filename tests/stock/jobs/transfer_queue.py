"""A real TransferQueue in a Ray of this machine, and the release's own V1 trainers on it.

Only the outside is a stand-in: there are no model workers, and a rollout is a list that notes what it was given.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq

BATCH = 8
COMMON = (
    f"data.train_batch_size={BATCH}",
    "data.shuffle=False",
    "data.dataloader_num_workers=0",
    "data.custom_cls.path=pkg://tests.stock.jobs.prompts",
    "data.custom_cls.name=NumberedPrompts",
    "trainer.total_training_steps=0",
    "trainer.val_before_train=False",
    "trainer.logger=[]",
)
SETTINGS = {
    "separate_async": (
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        "trainer.v1.separate_async.parameter_sync_step=2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH // 2}",
    )
}
"""What a mode needs to be built at all."""


@contextlib.contextmanager
def transfer_queue() -> Iterator[None]:
    """One storage unit and the controller."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}}
    try:
        tq.init({"backend": storage})
        yield
    finally:
        tq.close()
        ray.shutdown()


def clear() -> None:
    """Empty the queue."""
    for partition, items in (tq.kv_list() or {}).items():
        if items:
            tq.kv_clear(keys=list(items), partition_id=partition)


def tags(partition: str = "train") -> dict[str, dict[str, Any]]:
    """What the queue knows of each prompt and trajectory."""
    return (tq.kv_list() or {}).get(partition, {})


def prompts(partition: str = "train") -> list[str]:
    """The uids of the prompt groups in the queue, oldest first."""
    return [key for key, tag in tags(partition).items() if tag.get("is_prompt")]


def put_prompts(uids: Sequence[str], status: str, global_steps: int, partition: str = "train") -> None:
    """Say that these prompt groups are ``status`` since ``global_steps``."""
    tag = {"is_prompt": True, "status": status, "global_steps": global_steps}
    tq.kv_batch_put(keys=list(uids), partition_id=partition, tags=[dict(tag) for _ in uids])


def put_trajectories(rows: dict[str, dict[str, Any]]) -> None:
    """Write trajectories as verl's agent loop does, each session for itself: the key is ``{uid}_{session}_{index}``."""
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    for key, row in rows.items():
        fields = list_of_dict_to_tensordict([row])
        tq.kv_batch_put(keys=[key], partition_id="train", fields=fields, tags=[{"status": "success"}])


def trainer_class(mode: str) -> Any:
    """The trainer that this release has registered under ``mode``."""
    import verl.trainer.ppo.v1.trainer_colocate_async
    import verl.trainer.ppo.v1.trainer_separate_async
    import verl.trainer.ppo.v1.trainer_sync  # noqa: F401
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    return get_trainer_cls(mode)


def config(mode: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The release's own ``ppo_trainer.yaml`` with these settings changed, ``{"data.shuffle": False}``."""
    from omegaconf import OmegaConf

    mine = copy.deepcopy(_composed(mode))
    for name, value in overrides.items():
        OmegaConf.update(mine, name, value)
    return mine


@functools.cache
def _composed(mode: str) -> Any:
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folder = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
    with initialize_config_dir(folder, version_base=None):
        mine = compose("ppo_trainer", [f"trainer.v1.trainer_mode={mode}", *COMMON, *SETTINGS.get(mode, ())])
    OmegaConf.resolve(mine)  # takes longer than everything else that a trainer does here
    return mine


class Rollouts:
    """Stands in for the agent loop manager.

    Attributes:
        given: for each call, the uid and the row of the dataset of each prompt.
    """

    def __init__(self) -> None:
        self.given: list[list[tuple[str, int]]] = []

    def generate_sequences(self, batch: Any) -> None:
        """Note the prompts of one call."""
        rows = [int(index) for index in batch["index"]]
        self.given.append(list(zip(map(str, batch["uid"]), rows, strict=True)))


def build(cls: Any, configuration: Any) -> Any:
    """A trainer with its own replay buffer and dataloader, before it loads a checkpoint."""
    trainer = cls(configuration)
    trainer.tokenizer = trainer.processor = None
    trainer.agent_loop_manager = Rollouts()
    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    trainer.actor_rollout_wg = SimpleNamespace(load_checkpoint=nothing, save_checkpoint=nothing)
    trainer._init_dataloader()
    trainer._init_dump_executor()
    trainer.use_critic = False
    return trainer


def with_dataloader_of_its_own(cls: Any, gen_batch_size: int) -> Any:
    """A user's trainer whose dataloader hands out ``gen_batch_size`` prompts at once."""

    class OwnDataloader(cls):  # type: ignore[misc, valid-type]
        def _init_dataloader(self) -> None:
            from torchdata.stateful_dataloader import StatefulDataLoader
            from verl.utils.dataset.rl_dataset import collate_fn

            super()._init_dataloader()
            self.config.data.gen_batch_size = gen_batch_size
            self.train_dataloader = StatefulDataLoader(
                self.train_dataset, batch_size=gen_batch_size, drop_last=True, collate_fn=collate_fn
            )

    return OwnDataloader


def scores(*values: float) -> torch.Tensor:
    """``rm_scores`` of one trajectory, a value for each of its response tokens."""
    return torch.tensor(values, dtype=torch.float32)
