"""What ``TrainingWorker._postprocess_output`` hands to the driver, and what it gathers on the way."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import torch

from tests.stock.jobs.phases import phases
from verl_fixes.demo import fsdp_on_cpu


def _described(value: Any) -> Any:
    """A value as types and numbers that JSON can carry."""
    from verl.utils import metric

    if isinstance(value, getattr(metric, "Metric", ())):  # 0.7.0 has none
        return {"Metric": [value.aggregation.value, _described(value.values)]}
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    if isinstance(value, (torch.Tensor, np.generic, np.ndarray)):
        attached = " attached" if getattr(value, "requires_grad", False) else ""
        numbers = value.full_tensor() if hasattr(value, "full_tensor") else value
        return f"{type(value).__name__} {value.dtype}{attached} {numbers.tolist()}"
    return f"{type(value).__name__} {value}" if isinstance(value, (bool, int, float)) else value


def _metrics() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from verl.utils import metric

    mesh = init_device_mesh("cpu", (1,))
    weight = torch.ones(2, requires_grad=True)
    objects = {}
    if hasattr(metric, "Metric"):
        objects = {"metric": metric.Metric("max", 1.0), "live metric": metric.Metric("mean", 1.0)}
        objects["metric"].append(2.0)
        objects["live metric"].values.append(torch.tensor(2.0))
    return {
        "grad_norm": torch.tensor([0.25], dtype=torch.bfloat16),
        "lr": torch.tensor(0.5),
        "replicated": distribute_tensor(torch.tensor([1.5]), mesh, [Replicate()]),
        "sharded": distribute_tensor(torch.tensor([2.5]), mesh, [Shard(0)]),
        "attached": (weight * 2).sum(),
        "list": [torch.tensor(1.0), 2.0, np.float32(3.0)],
        "nested": {"pair": (torch.tensor(4), torch.tensor(True)), "text": "kept"},
        "histogram": weight * 3,
        "plain": 5.0,
        **objects,
    }


def reported() -> dict[str, Any]:
    """Every kind of metric, stock, fixed and stock again; what the driver sees, and what was gathered for it."""
    worker = fsdp_on_cpu.training_worker()
    from verl.workers import engine_workers

    gather = engine_workers.allgather_dict_into_dict

    def measure() -> dict[str, Any]:
        gathered: list[Any] = []

        def watched(data: Any, group: Any = None) -> Any:
            gathered.append(_described(data))
            return gather(data=data, group=group)

        metrics = _metrics()
        before = _described(copy.copy(metrics))
        engine_workers.allgather_dict_into_dict = watched
        try:
            result = fsdp_on_cpu.postprocess(worker, metrics)
        finally:
            engine_workers.allgather_dict_into_dict = gather
        picklable = {key: value for key, value in result.items() if key in ("grad_norm", "lr")}
        return {
            "driver": {key: _described(result[key]) for key in metrics},
            "gathered": gathered[0],
            "input mutated": _described(metrics) != before,
            "storages on the wire": pickle.dumps(picklable).count(b"torch"),
            "loss": result["loss"],
        }

    return phases(measure)


def numbers_only() -> dict[str, Any]:
    """A worker whose metrics are all plain: the fix changes nothing."""
    worker = fsdp_on_cpu.training_worker()
    metrics = {"grad_norm": 0.25, "lr": 1e-6, "list": [1, 2.0], "none": None, "text": "x"}
    return phases(lambda: {k: repr(v) for k, v in fsdp_on_cpu.postprocess(worker, metrics).items() if "perf" not in k})


def on_some_ranks(rank: int, port: int) -> dict[str, Any]:
    """Two processes share a DTensor and only rank 0 postprocesses: converting it must not wait for rank 1."""
    import datetime

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    from verl_fixes.patches.scalar_metrics import plain_numbers

    address = f"tcp://127.0.0.1:{port}"
    timeout = datetime.timedelta(seconds=20)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timeout)
    mesh = init_device_mesh("cpu", (2,))
    metrics = {
        "replicated": DTensor.from_local(torch.tensor([1.5]), mesh, [Replicate()]),
        "partial": DTensor.from_local(torch.tensor([1.0]), mesh, [Partial()]),
        "sharded": DTensor.from_local(torch.tensor([float(rank)]), mesh, [Shard(0)]),
    }
    together = plain_numbers(metrics, frozenset({0, 1}))
    answer = {"together": [together["replicated"], together["partial"], together["sharded"].tolist()]}
    if rank == 0:
        alone = plain_numbers(metrics, frozenset({0}))
        answer["alone"] = [alone["replicated"], *(alone[name] is metrics[name] for name in ("partial", "sharded"))]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return answer


def override() -> dict[str, Any]:
    """Workers that override ``_postprocess_output``: with ``super()`` and without, made before and after activation."""
    worker = fsdp_on_cpu.training_worker()
    cls = type(worker)

    def make() -> tuple[type, type]:
        class AddsTensor(cls):  # type: ignore[misc, valid-type]
            def _postprocess_output(self, output: Any, **kwargs: Any) -> Any:
                output["metrics"]["lr"] = torch.tensor(0.5)
                return super()._postprocess_output(output, **kwargs)

        class Replaces(cls):  # type: ignore[misc, valid-type]
            def _postprocess_output(self, output: Any, **kwargs: Any) -> Any:
                from verl.utils import tensordict_utils as tu

                return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": output["metrics"]})

        return AddsTensor, Replaces

    early = make()

    def measure() -> list[str]:
        kinds = []
        for heir in (*early, *make()):
            worker.__class__ = heir
            result = fsdp_on_cpu.postprocess(worker, {"grad_norm": torch.tensor(1.0), "lr": torch.tensor(0.25)})
            kinds.append(type(result["lr"]).__name__)
        return kinds

    return phases(measure)


def legacy_learning_rate() -> dict[str, str]:
    """Type of the ``lr`` that the legacy Megatron workers put into their metrics, when the optimizer has a tensor."""
    from types import SimpleNamespace

    import torch
    from verl.utils.megatron import optimizer

    holder = SimpleNamespace(param_groups=[{"lr": torch.tensor(0.1)}])
    return phases(lambda: type(optimizer.get_megatron_last_lr(holder)).__name__)
