"""The legacy FSDP actor and critic on ranks whose rows need different numbers of micro-batches.

Started in every process of a gloo group; rank 0 prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch

import verl_fixes
from tests.stock.jobs.phases import phases
from verl_fixes.demo import fsdp_on_cpu
from verl_fixes.demo.gloo_processes import process_group

PROMPT, RESPONSE = 8, 24
RESPONSES = {0: (4, 4, 6, 6), 1: (24, 24, 20, 16)}
"""Response tokens of each rank's rows: all of rank 0 fit into one micro-batch, those of rank 1 do not."""
MAX_TOKENS = 64


def _worker(role: str, dynamic: bool) -> Any:
    """The release's own DataParallelPPOActor or DataParallelPPOCritic around the tiny FSDP2 model."""
    from verl.workers.config import FSDPActorConfig, FSDPCriticConfig

    common = {
        "strategy": "fsdp2",
        "ppo_micro_batch_size_per_gpu": 1,
        "ppo_mini_batch_size": 4,
        "use_dynamic_bsz": dynamic,
        "loss_agg_mode": "seq-mean-token-mean",
    }
    engine = fsdp_on_cpu.build_engine(value_head=role == "critic", gradient_checkpointing=False)
    if role == "actor":
        from verl.workers.actor.dp_actor import DataParallelPPOActor

        config = FSDPActorConfig(rollout_n=1, use_torch_compile=False, ppo_max_token_len_per_gpu=MAX_TOKENS, **common)
        return DataParallelPPOActor(config, engine.module, engine.optimizer)
    from verl.base_config import BaseConfig
    from verl.workers.critic.dp_critic import DataParallelPPOCritic

    config = FSDPCriticConfig(model_config=BaseConfig(), ppo_max_token_len_per_gpu=MAX_TOKENS, **common)
    return DataParallelPPOCritic(config, engine.module, engine.optimizer)


def _rows(rank: int, dynamic: bool = True) -> Any:
    """This rank's rows in the layout of the trainer: ``[4, 8 + 24]``, responses padded on the right."""
    from verl import DataProto

    lengths = torch.tensor(RESPONSES[rank])
    generator = torch.Generator().manual_seed(rank)
    response_mask = (torch.arange(RESPONSE) < lengths[:, None]).long()
    mask = torch.cat([torch.ones(len(lengths), PROMPT, dtype=torch.long), response_mask], dim=1)
    ids = torch.randint(3, fsdp_on_cpu.VOCABULARY, mask.shape, generator=generator) * mask
    noise = torch.randn(len(lengths), RESPONSE, generator=generator) * response_mask
    tensors = {
        "input_ids": ids,
        "responses": ids[:, PROMPT:],
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": response_mask,
        "old_log_probs": noise - 5.5,
        "advantages": noise,
        "values": noise,
        "returns": noise,
    }
    how = {"use_dynamic_bsz": dynamic, "max_token_len": MAX_TOKENS, "micro_batch_size": 1}
    return DataProto.from_dict(tensors, meta_info={"temperature": 1.0, **how})


def _counting(module: Any) -> tuple[Any, list[int]]:
    """Watches how many micro-batches a worker's module splits into."""
    counts: list[int] = []
    split = module.prepare_dynamic_batch

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = split(*args, **kwargs)
        counts.append(len(result[0]))
        return result

    return mock.patch.object(module, "prepare_dynamic_batch", watched), counts


def _update(role: str, rank: int, dynamic: bool) -> dict[str, Any]:
    worker = _worker(role, dynamic)
    module = sys.modules[type(worker).__module__]
    watching, counts = _counting(module)
    with watching:
        if role == "actor":
            worker.compute_log_prob(_rows(rank, dynamic), calculate_entropy=False)
            metrics = worker.update_policy(_rows(rank, dynamic))
        else:
            worker.compute_values(_rows(rank, dynamic))
            metrics = worker.update_critic(_rows(rank, dynamic))
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, counts)
    return {"counts": everyone, "grad_norm": metrics[f"{role}/grad_norm"]}


def _split(role: str, rank: int) -> list[int]:
    """How many micro-batches each rank makes, without a model."""
    import importlib

    module = importlib.import_module(f"verl.workers.{role}.dp_{role}")
    micro_batches, _ = module.prepare_dynamic_batch(_rows(rank), max_token_len=MAX_TOKENS)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, len(micro_batches))
    return everyone


def main() -> None:
    """``split ROLE`` counts in three phases; ``stock``, ``fixed`` and ``one-by-one ROLE`` run one update."""
    what, role = sys.argv[1:]
    with process_group(timeout=20) as rank:
        fsdp_on_cpu.arrange()
        if what == "split":
            answer: Any = phases(lambda: _split(role, rank))
        else:
            if what == "fixed":
                verl_fixes.activate()
            answer = _update(role, rank, dynamic=what != "one-by-one")
        if rank == 0:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
