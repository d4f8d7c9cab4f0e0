"""The legacy worker's own ``compute_log_prob`` and ``update_actor`` on CPU, with router replay. verl 0.7 only."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.megatron import legacy
from tests.megatron.replay_job import EVEN, MICRO_BATCHES, draw_routers
from verl_fixes.demo import megatron_on_cpu as cpu


class WorkerReplayed:
    """``ActorRolloutRefWorker`` around the legacy actor of :mod:`tests.megatron.legacy`; updates change no weights."""

    gathers_in = "verl.workers.actor.megatron_actor"

    def __init__(self, wanted: dict[str, Any]) -> None:
        from verl.utils.megatron.router_replay_patch import apply_router_replay_patch
        from verl.workers.config.actor import RouterReplayConfig
        from verl.workers.megatron_workers import ActorRolloutRefWorker

        apply_router_replay_patch()
        _take_padding_mask()
        model = dict(wanted.get("model", {}))
        model["transformer_overrides"] = {"enable_routing_replay": True} | model.get("transformer_overrides", {})
        layout = cpu.Layout(**wanted.get("layout", {}))
        seed = wanted.get("seed", 0)
        self.legacy = legacy.build("actor", layout, calculate_per_token_loss=False, seed=seed, **model)
        self.engine, self.actor = self.legacy.engine, self.legacy.trainer
        rows = len(EVEN) // MICRO_BATCHES
        self.actor.config = legacy.config_of(
            "actor",
            self.engine,
            router_replay=RouterReplayConfig(mode="R2"),
            ppo_mini_batch_size=len(EVEN),
            ppo_micro_batch_size_per_gpu=rows,
        )
        self.actor.enable_routing_replay = True
        self.actor.mini_layer_topk_idx_list = []
        rollout = SimpleNamespace(
            log_prob_micro_batch_size_per_gpu=rows,
            log_prob_max_token_len_per_gpu=None,
            log_prob_use_dynamic_bsz=False,
            temperature=1.0,
        )
        self.worker = object.__new__(ActorRolloutRefWorker)
        vars(self.worker).update(
            actor=self.actor,
            actor_module=self.engine.module,
            actor_optimizer=self.engine.optimizer,
            actor_optimizer_scheduler=SimpleNamespace(step=lambda count: None),
            config=SimpleNamespace(actor=self.actor.config, rollout=rollout),
            enable_routing_replay=True,
            flops_counter=SimpleNamespace(estimate_flops=lambda *args, **kwargs: (0.0, 1.0)),
            peft_cls=None,
            profiler=None,
            tf_config=self.engine.tf_config,
            _is_actor=True,
            _is_offload_optimizer=False,
            _is_offload_param=False,
            _world_size=torch.distributed.get_world_size(),
        )

    @property
    def collected(self) -> list[Any]:
        collected: list[Any] = self.actor.mini_layer_topk_idx_list
        return collected

    def infer(self, replay: bool) -> Any:
        return self.worker.compute_log_prob(self._data())

    def record(self) -> Tensor:
        draw_routers(self.engine, seed=1)
        routes: Tensor = self.infer(replay=True).batch["routed_experts"]
        return routes

    def update(self, routes: Tensor | None, loss: Any = None) -> dict[str, Tensor]:
        draw_routers(self.engine, seed=2)
        data = self._data()
        if routes is not None:
            data.batch["routed_experts"] = routes
        with cpu.watched_optimizer(self.engine) as seen:
            self.worker.update_actor(data)
        return cpu.gather_gradients(self.engine, seen["gradients"])

    def tokens(self, routes: Tensor) -> Tensor:
        mask = self._data().batch["attention_mask"].bool()
        return routes[mask].long().sort(dim=-1).values

    def routes_from(self, tokens: Tensor) -> Tensor:
        mask = self._data().batch["attention_mask"].bool()
        routes = torch.zeros((*mask.shape, *tokens.shape[1:]), dtype=tokens.dtype)
        routes[mask] = tokens
        return routes

    @contextlib.contextmanager
    def as_r3(self) -> Iterator[None]:
        from verl.workers.config.actor import RouterReplayConfig

        config, before = self.actor.config, self.actor.config.router_replay
        object.__setattr__(config, "router_replay", RouterReplayConfig(mode="R3"))
        try:
            yield
        finally:
            object.__setattr__(config, "router_replay", before)

    def reference_keys(self) -> list[str]:
        """The keys of ``compute_ref_log_prob`` under LoRA."""
        self.worker.peft_cls = SimpleNamespace(disable_adapter=lambda module: contextlib.nullcontext())
        self.worker.config.ref = self.worker.config.rollout
        try:
            return sorted(self.worker.compute_ref_log_prob(self._data()).batch.keys())
        finally:
            self.worker.peft_cls = None

    def error_with(self, data: Any, replay: bool) -> str:
        """What ``compute_log_prob`` says to data that have no rows."""
        self.worker.enable_routing_replay = self.actor.enable_routing_replay = replay
        try:
            self.worker.compute_log_prob(data)
        except AttributeError as error:
            return str(error)
        finally:
            self.worker.enable_routing_replay = self.actor.enable_routing_replay = True
        return ""

    def _data(self) -> Any:
        data = legacy.make_data(self.legacy, lengths=EVEN)
        data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(dim=-1).tolist()
        return data


def _take_padding_mask() -> None:
    """verl 0.7.0 replaces a method whose newer callers pass one argument more, which is None here."""
    from megatron.core.transformer.moe.router import TopKRouter

    routing = TopKRouter.routing
    if len(inspect.signature(routing).parameters) == 2:
        TopKRouter.routing = lambda self, logits, padding_mask=None: routing(self, logits)
