"""What the tests of Ray run in processes of their own: stock verl on real local clusters."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # clusters of this machine and this test only; read by the import

import ray

from tests.ray.clusters import running_cluster

CPU_WORKER = "tests.ray.cpu_worker"


@contextlib.contextmanager
def connected(running: bool, **init: Any) -> Iterator[None]:
    """Connected to a cluster that is running already, or to one that this process starts."""
    with contextlib.ExitStack() as stack:
        if running:
            init["address"] = stack.enter_context(running_cluster())
        else:
            init |= {"address": "local", "num_cpus": 4, "include_dashboard": False, "object_store_memory": 100_000_000}
        ray.init(log_to_driver=False, **init)
        stack.callback(ray.shutdown)
        yield


def loss_function() -> str:
    """A loss function of the user, given to the workers as a partial."""
    return "called"


def _worker_group(cls: Any = None, colocated: bool = False) -> Any:
    import functools
    from types import SimpleNamespace

    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from tests.ray.cpu_worker import TinyModel

    engine = SimpleNamespace(
        strategy="tiny",
        forward_only=False,
        use_dynamic_bsz=False,
        max_token_len_per_gpu=1,
        micro_batch_size_per_gpu=1,
        use_fused_kernels=False,
    )
    config = TrainingWorkerConfig(model_type="tiny", model_config=TinyModel(), engine_config=engine)
    worker = RayClassWithInitArgs(ray.remote(cls or TrainingWorker), config=config)
    if colocated:
        worker = create_colocated_worker_cls({"train": worker})
    pool = RayResourcePool(process_on_nodes=[1], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, worker, use_gpu=False, device_name="cpu")
    if colocated:
        group = group.spawn({"train"})["train"]
    group.set_loss_fn(functools.partial(loss_function))
    return group


def _train(group: Any) -> dict[str, Any]:
    import torch
    from verl.utils import tensordict_utils as tu

    data = tu.get_tensordict(tensor_dict={"x": torch.zeros(2, 1)}, non_tensor_dict={"global_token_num": None})
    output = group.train_batch(data)
    output = output.get() if hasattr(output, "get") and not hasattr(output, "batch_size") else output
    metrics = tu.get(output, "metrics")
    process = metrics["process"][0] if isinstance(metrics["process"], list) else metrics["process"]
    return {
        "grad_norm": type(metrics["grad_norm"]).__name__,
        "loss_function": metrics["loss_function"],
        "states": process["states"],
        "environment": process["environment"],
        "pid": process["pid"],
    }


JOB = {"env_vars": {"VERL_USE_EXTERNAL_MODULES": CPU_WORKER, "MINE": "kept"}}


def training(running: bool, plugin: bool) -> dict[str, Any]:
    """One step of a stock RayWorkerGroup of TrainingWorker: what the driver gets, what the worker says of itself."""
    if plugin:
        import verl_fixes  # noqa: F401
    with connected(running, runtime_env=JOB):
        return _train(_worker_group())


def _imported_verl() -> dict[str, Any]:
    import verl.workers.engine_workers  # noqa: F401

    from tests.ray.cpu_worker import describe

    return describe()


class Plain:
    """An actor of the user, which knows nothing of verl before it is asked."""

    def describe(self) -> dict[str, Any]:
        return _imported_verl()

    def of_a_child(self) -> dict[str, Any]:
        child = ray.remote(Plain).remote()
        return ray.get(child.describe.remote())

    def from_threads(self) -> dict[str, Any]:
        import importlib
        import threading

        names = ["verl", "verl.workers.engine_workers", "verl.workers.engine", "verl.protocol", "verl_fixes"] * 2
        start = threading.Barrier(len(names))

        def work(name: str) -> None:
            start.wait()
            importlib.import_module(name)

        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return {**_imported_verl(), "deadlock": any(thread.is_alive() for thread in threads)}

    def call(self, function: Any, *args: Any) -> Any:
        return function(*args)


async def _add_one(original: Any, *args: Any) -> int:
    return int(await original(*args)) + 1


def survival() -> dict[str, Any]:
    """Kinds of actors that a driver may make of patched classes; what each of them runs."""
    import functools

    import verl_fixes
    from verl_fixes import wrapping
    from verl_fixes.patch import Patch, Target

    answers: dict[str, Any] = {}
    with connected(False, runtime_env=JOB):
        import torch
        from verl.single_controller.base.decorator import Dispatch, register
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine_workers import TrainingWorker

        class Mine(TrainingWorker):  # a local class, pickled by value as one of __main__ is
            def _postprocess_output(self, output: Any, **kwargs: Any) -> Any:
                output["metrics"]["mine"] = torch.tensor(2.0)
                return super()._postprocess_output(output, **kwargs)

            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def mine(self) -> str:
                output = {"metrics": {"grad_norm": torch.tensor([1.0])}, "loss": [1.0]}
                arguments = {"global_token_num": None, "delta_time": 1.0, "forward_only": False, "images_seqlens": None}
                return type(tu.get(self._postprocess_output(output, **arguments), "metrics")["grad_norm"]).__name__

        group = _worker_group(Mine)
        answers["subclass pickled by value"] = _train(group)
        answers["method registered with verl's decorator"] = group.mine()

        answers["colocated WorkerDict"] = _train(_worker_group(colocated=True))

        actor = ray.remote(Plain).options(max_restarts=1, max_task_retries=2).remote()
        answers["plain actor"] = first = ray.get(actor.describe.remote())
        os.kill(first["pid"], signal.SIGKILL)
        answers["restarted after SIGKILL"] = ray.get(actor.describe.remote())
        answers["child of an actor"] = ray.get(actor.of_a_child.remote())
        partial = functools.partial(get_ppo_ray_runtime_env)
        answers["partial"] = ray.get(actor.call.remote(partial))["env_vars"]
        answers["remote function of verl"] = ray.get(ray.remote(get_ppo_ray_runtime_env).remote())["env_vars"]
        answers["threads"] = ray.get(ray.remote(Plain).remote().from_threads.remote())

        class Later:
            async def answer(self, x: int) -> int:
                return x

        target = Target(module=__name__, qualname="Later.answer", wrapper=_add_one, question=None)
        words = dict.fromkeys(("title", "hurts", "does", "removable", "fixed_in"), "-")
        patch = Patch(name="later", upstream=(), targets=(target,), **words)  # type: ignore[arg-type]
        wrapping.cover(patch, target, Later, "answer", _add_one)
        answers["async method"] = ray.get(ray.remote(Later).remote().answer.remote(1))
        answers["driver"] = {record.name: str(record.state) for record in verl_fixes.status()}
    return answers


def toggled(
    address: str, environment: dict[str, str], job: dict[str, str], arguments: dict[str, Any]
) -> dict[str, Any]:
    """A driver on a running cluster, with switches of its own and some given to the job only; what its worker runs."""
    os.environ.update(environment)
    import verl_fixes

    verl_fixes.activate(**arguments)
    with connected_to(address, {"env_vars": {**JOB["env_vars"], **job}}):
        try:
            answer = ray.get(ray.remote(Plain).remote().describe.remote())
        except Exception as error:
            answer = {"error": str(error), "notes": getattr(error, "__notes__", [])}
    return {**answer, "driver said": sorted(sys.modules["verl_fixes.stderr"]._said)}


@contextlib.contextmanager
def connected_to(address: str, runtime_env: dict[str, Any]) -> Iterator[None]:
    """Connected to a cluster of somebody else."""
    ray.init(address=address, log_to_driver=False, runtime_env=runtime_env)
    try:
        yield
    finally:
        ray.shutdown()


def two_nodes() -> dict[str, Any]:
    """Two raylets; on one of them verl_fixes is not installed."""
    from ray.cluster_utils import Cluster
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import verl_fixes  # noqa: F401

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=2, env_vars={"NODE_WITHOUT_VERL_FIXES": "1"})
        cluster.wait_for_nodes()
        answers = {}
        with connected_to(cluster.address, JOB):
            nodes = {"without": node.node_id, "with": cluster.head_node.node_id}
            for name, node_id in nodes.items():
                affinity = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
                actor = ray.remote(Plain).options(scheduling_strategy=affinity).remote()
                try:
                    answers[name] = ray.get(actor.describe.remote(), timeout=60)
                except Exception as error:
                    answers[name] = {"error": str(error), "notes": getattr(error, "__notes__", [])}
        return answers
    finally:
        cluster.shutdown()
