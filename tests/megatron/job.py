"""Steps of the stock Megatron engines on CPU, on stock code, with the fixes, and on stock code again.

Started by :func:`tests.megatron.steps.steps` in every process of a gloo group.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

import verl_fixes
from tests.megatron import dynamic_cp
from tests.megatron.legacy import freeze
from tests.stock.jobs.phases import PHASES, phases
from verl_fixes.demo import megatron_on_cpu as cpu


def _raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the loss function failed")


def _loss(kind: str, mode: str) -> Any:
    if kind == "raising":
        return _raising
    return cpu.sft_loss() if kind == "sft" else {"ppo": cpu.ppo_loss, "value": cpu.value_loss}[kind](mode)


class _Watched:
    """Notes what the engine hands to Megatron's schedule for each micro-batch."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.results: list[tuple[Any, ...]] = []
        self.cp_sizes: list[int | None] = []

    def __enter__(self) -> _Watched:
        cls = type(self._engine)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = cls.postprocess_micro_batch_func(self._engine, *args, **kwargs)
            self.results.append(result)
            self.cp_sizes.append(kwargs.get("local_cp_size"))
            return result

        self._engine.postprocess_micro_batch_func = watched
        return self

    def __exit__(self, *exception: object) -> None:
        del self._engine.postprocess_micro_batch_func

    def report(self) -> dict[str, Any]:
        tokens = [int(result[1]) for result in self.results if len(result) == 3]
        outputs = [leaf for result in self.results for leaf in result[-1].get("model_output", {}).values()]
        return {
            "elements": sorted({len(result) for result in self.results}),
            "tokens": tokens,
            "dtypes": sorted({str(result[1].dtype) for result in self.results if len(result) == 3}),
            "sums": [float(result[0]) for result in self.results],
            "live": [bool(result[0].requires_grad) for result in self.results],
            "attached": sum(leaf.requires_grad for leaf in outputs),
            "cp_sizes": self.cp_sizes,
        }


def _heirs(cls: type) -> dict[str, type]:
    """Engines of users that override the method which the fix wraps, written for the 2-tuple of older releases."""

    class Same(cls):  # type: ignore[misc, valid-type]
        def postprocess_micro_batch_func(self, *args: Any, **kwargs: Any) -> Any:
            loss, output = super().postprocess_micro_batch_func(*args, **kwargs)
            return loss, output

    class Doubles(cls):  # type: ignore[misc, valid-type]
        def postprocess_micro_batch_func(self, *args: Any, **kwargs: Any) -> Any:
            loss, output = super().postprocess_micro_batch_func(*args, **kwargs)
            return loss * 2, output

    class OwnFix(cls):  # type: ignore[misc, valid-type]
        def postprocess_micro_batch_func(self, output: Any, data: Any, **kwargs: Any) -> Any:
            loss, report = super().postprocess_micro_batch_func(output, data, **kwargs)
            return loss, torch.tensor(7, dtype=torch.int), report

    class Selects(cls):  # type: ignore[misc, valid-type]
        def forward_backward_batch(self, batch: Any, loss_fn: Any, forward_only: bool = False) -> Any:
            return super().forward_backward_batch(batch.select(*batch.keys()), loss_fn, forward_only)

    return {"same": Same, "doubles": Doubles, "own fix": OwnFix, "selects": Selects}


def _logged_router_losses() -> dict[str, list[float]]:
    """What the routers noted for the log since the last call: name to values per layer."""
    from megatron.core.transformer.moe import moe_utils

    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    entries = getattr(tracker, "metrics", tracker)  # an object from 0.18 on
    values = {name: entry["values"] if isinstance(entry, dict) else entry.values for name, entry in entries.items()}
    noted = {name: tensor.tolist() for name, tensor in values.items()}
    moe_utils.clear_aux_losses_tracker()
    return {name: losses for name, losses in noted.items() if any(losses)}


class _OtherTensorParallelSize:
    """Megatron's parallel state, except for what verl pads packed sequences to a multiple of."""

    def __init__(self, parallel_state: Any, size: int) -> None:
        self._parallel_state = parallel_state
        self.get_tensor_model_parallel_world_size = lambda: size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel_state, name)


@contextlib.contextmanager
def packed_to(multiple: int | None) -> Iterator[None]:
    """Sequences are padded as a layout with more TP or CP pads them, so that the router sees the same tokens."""
    from verl.models.mcore import util

    parallel_state = util.mpu
    if multiple is not None:
        util.mpu = _OtherTensorParallelSize(parallel_state, multiple)
    try:
        yield
    finally:
        util.mpu = parallel_state


def _give_routers_an_heir(engine: Any) -> None:
    """Routers of a user who overrides what the fix wraps, and calls ``super()``."""
    from megatron.core.transformer.moe.router import TopKRouter

    class Heir(TopKRouter):  # type: ignore[misc, valid-type]
        def apply_z_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().apply_z_loss(*args, **kwargs)

        def attach_and_log_load_balancing_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().attach_and_log_load_balancing_loss(*args, **kwargs)

    for chunk in engine.module:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.__class__ = Heir


def _only(batch: Any, rows: list[int]) -> Any:
    """These rows of a batch, as one micro-batch."""
    from verl.utils import tensordict_utils as tu

    batch = tu.index_select_tensor_dict(batch, rows)
    tu.assign_non_tensor(batch, micro_batch_size_per_gpu=len(rows))
    return batch


def _step(engine: Any, heirs: dict[Any, type], case: dict[str, Any], saved: dict[str, Any], key: str) -> dict[str, Any]:
    case = dict(case)
    heir = case.pop("heir", None)
    engine.__class__ = _heirs(heirs[None])[heir] if case.pop("late", False) else heirs[heir]
    loss = _loss(case.pop("loss", "ppo"), case.pop("mode", "token-mean"))
    forward_only = case.pop("forward_only", False)
    every_rank = case.pop("every_rank", False)
    rows = case.pop("rows", None)
    if case.pop("no_loss", False):
        loss = None
    share = {"dp_rank": engine.get_data_parallel_rank(), "dp_size": engine.get_data_parallel_size()}
    batch = cpu.make_batch(**(share | case))
    if rows is not None:
        batch = _only(batch, rows)
    per_micro_batch = int(batch["micro_batch_size_per_gpu"])
    lengths = batch["input_ids"].offsets().diff().split(per_micro_batch)
    with _Watched(engine) as watched:
        if forward_only:
            with engine.eval_mode():
                output = engine.infer_batch(batch, loss_function=loss)
            answer: dict[str, Any] = {"loss": output.get("loss")}
        else:
            result = cpu.train_step(engine, batch, loss)
            saved[f"{phase()}/{key}"] = cpu.gather_gradients(engine, result.gradients)
            answer = {"loss": result.output.get("loss"), "grad_norm": result.grad_norm}
    report = watched.report()
    if every_rank:
        answer["ranks"] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(answer["ranks"], report)
    about_batch = {"batch": [int(part.sum()) for part in lengths], "logged": _logged_router_losses()}
    return answer | report | about_batch


def main() -> None:
    """Read the plan from the command line, print one JSON line on rank 0, and save gradients to the given file."""
    plan, file = json.loads(sys.argv[1]), sys.argv[2]
    answers: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    with cpu.process_group() as rank:
        layout = None
        if any("max_seqlen_per_dp_cp_rank" in build.get("layout", {}) for build in plan.values()):
            dynamic_cp.arrange()
        for name, build in plan.items():
            before, layout = layout, cpu.Layout(**build.get("layout", {}))
            if before not in (None, layout):
                forget_layout()
            model = cpu.Model(**build.get("model", {}))
            try:
                engine = cpu.build_engine(model, layout, calculate_per_token_loss=build["per_token_loss"])
            except (TypeError, ValueError) as error:  # this release cannot build such an engine
                answers[name] = f"{type(error).__name__}: {error}"
                continue
            freeze(engine)
            stock_class = type(engine)
            heirs = {None: stock_class, **_heirs(stock_class)}
            if build.get("router_heirs"):
                _give_routers_an_heir(engine)
            for attribute, value in build.get("engine_config", {}).items():
                object.__setattr__(engine.engine_config, attribute, value)
            answers[name] = {}
            with packed_to(build.get("packed_to")):
                for case, settings in build["cases"].items():
                    only = settings.pop("phases", build.get("phases", PHASES))
                    step = functools.partial(_step, engine, heirs, settings, saved, f"{name}/{case}")
                    answers[name][case] = phases(step, only, disable=build.get("disable", ()))
        if rank == 0:
            torch.save(saved, file)
            print(json.dumps(answers), flush=True)


def forget_layout() -> None:
    """The next engine arranges the same processes anew."""
    from megatron.core import parallel_state

    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()


def phase() -> str:
    """``fixed`` or ``stock``; the second run on stock code replaces the first one's gradients, they must be equal."""
    return "fixed" if any(record.state in ("applied", "refined") for record in verl_fixes.status()) else "stock"


if __name__ == "__main__":
    main()
