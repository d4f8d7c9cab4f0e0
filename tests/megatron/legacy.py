"""verl's legacy Megatron actor and critic on CPU: ``MegatronPPOActor`` and ``MegatronPPOCritic`` of 0.7.0 and 0.7.1.

Model, optimizer and transformer config are those of the stock engine of :mod:`verl_fixes.demo.megatron_on_cpu`, which
builds them as the legacy workers do; forward, loss, schedule and update are the legacy trainer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from verl_fixes.demo import megatron_on_cpu as cpu

Role = Literal["actor", "critic"]


@dataclass(frozen=True)
class LegacyModel(cpu.Model):
    """A model whose value head 0.7 also recognises on a mixture of experts."""

    def hf_config(self) -> Any:
        config = super().hf_config()
        if self.value_head:
            # the engine decides by this name, the legacy worker by its role
            config.architectures = [
                name.replace("ForCausalLM", "ForTokenClassification") for name in config.architectures
            ]
        return config


@dataclass(frozen=True)
class Legacy:
    """A legacy trainer, and the engine whose model it trains."""

    role: Role
    engine: Any
    trainer: Any

    @property
    def module(self) -> str:
        """Name of the module whose globals the trainer resolves Megatron's schedule in."""
        return str(type(self.trainer).__module__)


@dataclass(frozen=True)
class LegacyStep:
    """One update: ``metrics`` as the trainer returned them, the rest as in :class:`cpu.StepResult`."""

    grad_norm: float
    gradients: dict[str, Tensor]
    metrics: dict[str, Any]


def build(
    role: Role,
    layout: cpu.Layout,
    *,
    calculate_per_token_loss: bool,
    seed: int = 0,
    **model: Any,
) -> Legacy:
    """The trainer of a role, in front of a model with this seed's weights. Needs :func:`cpu.process_group`."""
    shape = LegacyModel(value_head=role == "critic", **model)
    engine = cpu.build_engine(shape, layout, calculate_per_token_loss=calculate_per_token_loss, seed=seed)
    freeze(engine)
    arguments = {"model_config": engine.model_config, "hf_config": engine.model_config.hf_config}
    arguments |= {"tf_config": engine.tf_config, "config": config_of(role, engine)}
    if role == "actor":
        from verl.workers.actor.megatron_actor import MegatronPPOActor

        actor = MegatronPPOActor(actor_module=engine.module, actor_optimizer=engine.optimizer, **arguments)
        return Legacy(role, engine, actor)
    from verl.workers.critic.megatron_critic import MegatronPPOCritic

    critic = MegatronPPOCritic(
        critic_module=engine.module,
        critic_optimizer=engine.optimizer,
        critic_optimizer_config=engine.optimizer_config,
        **arguments,
    )
    return Legacy(role, engine, critic)


def freeze(engine: Any) -> None:
    """Steps of the optimizer change nothing, so that every case sees the same weights."""
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0


def config_of(role: Role, engine: Any, **settings: Any) -> Any:
    """The actor's or critic's config of this release."""
    from verl.base_config import BaseConfig
    from verl.workers.config import McoreActorConfig, McoreCriticConfig

    common = {"megatron": engine.engine_config, "ppo_micro_batch_size_per_gpu": 1, "shuffle": False} | settings
    if role == "actor":
        return McoreActorConfig(rollout_n=1, **common)
    return McoreCriticConfig(model_config=BaseConfig(), **common)  # it would load one for its own sake


def make_data(legacy: Legacy, **rows: Any) -> Any:
    """This DP rank's share of :func:`cpu.padded_rows`, as the ``DataProto`` of verl's trainer."""
    from verl import DataProto

    share = {
        "dp_rank": legacy.engine.get_data_parallel_rank(),
        "dp_size": legacy.engine.get_data_parallel_size(),
    }
    data = DataProto.from_single_dict(cpu.padded_rows(**(share | rows)))
    data.meta_info["temperature"] = 1.0
    return data


def update(
    legacy: Legacy,
    data: Any,
    *,
    micro_batches: int = 4,
    max_token_len: int | None = None,
    **settings: Any,
) -> LegacyStep:
    """One mini-batch through the trainer's own iterator, update and optimizer step.

    Args:
        legacy: what to train.
        data: of :func:`make_data`.
        micro_batches: how many micro-batches of equal rows the mini-batch is split into.
        max_token_len: split by ``use_dynamic_bsz`` instead.
        settings: more of the actor's or critic's config, for example ``loss_agg_mode``.
    """
    rows = len(data)
    settings |= {"ppo_mini_batch_size": rows, "ppo_micro_batch_size_per_gpu": rows // micro_batches}
    if max_token_len is not None:
        settings |= {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": max_token_len}
    trainer = legacy.trainer
    trainer.config = config_of(legacy.role, legacy.engine, **settings)
    run: Callable[..., dict[str, Any]] = trainer.update_policy if legacy.role == "actor" else trainer.update_critic
    with cpu.watched_optimizer(legacy.engine) as seen:
        metrics = run(dataloader=trainer.make_minibatch_iterator(data=data))
    return LegacyStep(float(seen["grad_norm"]), seen["gradients"], metrics)


def gradient(legacy: Legacy, step: LegacyStep) -> Tensor:
    """The whole gradient of a step as one vector; equal on every rank. Call it on all ranks."""
    return cpu.flatten(cpu.gather_gradients(legacy.engine, step.gradients))


def attached(value: Any) -> list[str]:
    """Where in nested dicts and sequences a tensor still holds on to its graph."""
    if isinstance(value, torch.Tensor):
        return [str(tuple(value.shape))] if value.requires_grad else []
    if isinstance(value, dict):
        return [f"{key}{inner}" for key, item in value.items() for inner in attached(item)]
    if isinstance(value, (list, tuple)):
        return [f"[{index}]{inner}" for index, item in enumerate(value) for inner in attached(item)]
    return []
