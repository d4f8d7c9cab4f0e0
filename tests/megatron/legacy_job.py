"""Updates of the legacy Megatron actor and critic on CPU, on stock code, with the fixes, and on stock code again.

Started by :func:`tests.megatron.steps.steps` in every process of a gloo group.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from types import FunctionType
from typing import Any

import torch

from tests.megatron import legacy
from tests.megatron.job import forget_layout, packed_to, phase
from tests.stock.jobs.phases import PHASES, phases
from verl_fixes.demo import megatron_on_cpu as cpu


def _return_tensors(engine: Any) -> None:
    """An optimizer that returns grad_norm as a tensor, as with fused kernels of megatron-core 0.17 and later."""
    step = type(engine.optimizer).step

    def step_with_tensor() -> Any:
        successful, grad_norm, zeros = step(engine.optimizer)
        return successful, torch.tensor([float(grad_norm)]), zeros

    engine.optimizer.step = step_with_tensor


def _kinds(metrics: dict[str, Any]) -> list[str]:
    """The types of all values of a trainer's metrics."""
    values = [value for listed in metrics.values() for value in (listed if isinstance(listed, list) else [listed])]
    return sorted({type(value).__name__ for value in values})


def _heirs(cls: type) -> dict[str, type]:
    """Trainers of users that override the method which the fix wraps."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    stock = inspect.unwrap(cls.forward_backward_batch)  # type: ignore[attr-defined]
    elsewhere = {**stock.__globals__, "get_forward_backward_func": get_forward_backward_func}

    class Same(cls):  # type: ignore[misc, valid-type]
        def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward_backward_batch(*args, **kwargs)

    class Copied(cls):  # type: ignore[misc, valid-type]
        forward_backward_batch = FunctionType(stock.__code__, elsewhere, argdefs=stock.__defaults__)

    return {"same": Same, "copied": Copied}


def _update(trained: legacy.Legacy, case: dict[str, Any], saved: dict[str, Any], key: str) -> dict[str, Any]:
    case = dict(case)
    heir = case.pop("heir", None)
    stock_class = type(trained.trainer)
    if heir:
        trained.trainer.__class__ = _heirs(stock_class)[heir]
    try:
        return _one_update(trained, case, saved, key)
    finally:
        trained.trainer.__class__ = stock_class


def _one_update(trained: legacy.Legacy, case: dict[str, Any], saved: dict[str, Any], key: str) -> dict[str, Any]:
    if case.pop("tensor_norm", False):
        _return_tensors(trained.engine)
    kept: list[Any] = []
    cls = type(trained.trainer)

    def watched(*args: Any, **kwargs: Any) -> Any:
        kept.append(cls.forward_backward_batch(trained.trainer, *args, **kwargs))
        return kept[-1]

    trained.trainer.forward_backward_batch = watched
    try:
        step = legacy.update(trained, legacy.make_data(trained), **case)
    finally:
        del trained.trainer.forward_backward_batch
    saved[f"{phase()}/{key}"] = cpu.gather_gradients(trained.engine, step.gradients)
    return {"grad_norm": step.grad_norm, "kinds": _kinds(step.metrics), "attached": legacy.attached(kept)}


def main() -> None:
    """Read the plan from the command line, print one JSON line on rank 0, and save gradients to the given file."""
    plan, file = json.loads(sys.argv[1]), sys.argv[2]
    answers: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    with cpu.process_group() as rank:
        from megatron.core.transformer.moe import moe_utils

        for number, (name, build) in enumerate(plan.items()):
            if number:
                forget_layout()
            moe_utils.get_moe_layer_wise_logging_tracker().clear()  # sized for the first model
            layout, flag = cpu.Layout(**build.get("layout", {})), build["per_token_loss"]
            trained = legacy.build(build["role"], layout, calculate_per_token_loss=flag, **build.get("model", {}))
            answers[name] = {}
            with packed_to(build.get("packed_to")):
                for case, settings in build["cases"].items():
                    update = functools.partial(_update, trained, settings, saved, f"{name}/{case}")
                    answers[name][case] = phases(update, build.get("phases", PHASES))
        if rank == 0:
            torch.save(saved, file)
            print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
