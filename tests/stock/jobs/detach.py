"""What engines report for a micro-batch, and what that keeps alive."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from tests.stock import optional_engines
from tests.stock.jobs.phases import phases
from verl_fixes.demo import fsdp_on_cpu


class Pair(NamedTuple):
    first: Any
    second: Any


_kinds = itertools.count()


def _leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def _values(tree: Any) -> list[Any]:
    return [(leaf.values() if leaf.is_nested else leaf).detach().tolist() for leaf in _leaves(tree)]


def shipped() -> dict[str, Any]:
    """Each engine of this release: attached outputs, top level and nested; loss, values and gradient."""

    def measure(name: str) -> dict[str, Any]:
        loss, output, model = optional_engines.step(name, nested=True)
        report = output["model_output"]
        live = loss.requires_grad
        loss.backward()
        return {
            "top": sum(leaf.requires_grad for leaf in (report["log_probs"], report["entropy"])),
            "nested": sum(leaf.requires_grad for leaf in _leaves(report["extra"])),
            "jagged": report["log_probs"].is_nested,
            "other leaves": [report["extra"]["list"][1].item(), *report["extra"]["tuple"][1:]],
            "values": _values(report),
            "loss is live": live,
            "loss": [output["loss"], loss.item()],
            "metrics": output["metrics"],
            "gradient": model.linear.weight.grad.tolist(),
        }

    answers = {}
    for name in optional_engines.engines():
        try:
            optional_engines.engine_class(name)
        except ImportError:  # mindspeed patches its own packages at import
            continue
        answers[name] = phases(lambda name=name: measure(name))
    return answers


def _custom_engines() -> dict[str, type]:
    """Engines as users write and register them."""
    from verl.workers.engine.base import BaseEngine, EngineRegistry

    kind = f"custom {next(_kinds)}"  # 0.9.0 refuses to register a second engine of one kind

    def output_of(weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        hidden = weight * 2
        return hidden.sum(), {"model_output": {"hidden": hidden, "pair": Pair(hidden, 1)}, "loss": 0.0, "metrics": {}}

    class Mixin:
        def forward_step(self, weight: torch.Tensor, loss_function: Any = None, forward_only: bool = False) -> Any:
            return output_of(weight)

    @EngineRegistry.register(model_type=kind, backend="own", device="cpu")
    class Own(BaseEngine):
        def forward_step(self, weight: torch.Tensor, loss_function: Any = None, forward_only: bool = False) -> Any:
            return output_of(weight)

    @EngineRegistry.register(model_type=kind, backend="heir", device="cpu")
    class Heir(Own):
        def forward_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, output = super().forward_step(*args, **kwargs)
            output = {**output, "model_output": {**output["model_output"], "more": args[0] * 3}}
            return loss, output

    @EngineRegistry.register(model_type=kind, backend="mixed", device="cpu")
    class Mixed(Mixin, BaseEngine):
        pass

    @EngineRegistry.register(model_type=kind, backend="pipeline", device="cpu")
    class Pipeline(BaseEngine):
        def forward_step(self, weight: torch.Tensor) -> Any:
            return weight * 2, self.postprocess_micro_batch_func

        def postprocess_micro_batch_func(self, output: torch.Tensor) -> Any:
            loss, output = output_of(output)
            return loss, torch.tensor(3), output

    @EngineRegistry.register(model_type=kind, backend="silent", device="cpu")
    class Silent(BaseEngine):
        def forward_step(self, weight: torch.Tensor) -> Any:
            return (weight * 2).sum(), {"loss": 0.0, "metrics": {}}

    @EngineRegistry.register(model_type=kind, backend="adds", device="cpu")
    class Adds(Own):
        def forward_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, output = super().forward_step(*args, **kwargs)
            return loss + 0.5 * output["model_output"]["hidden"].sum(), output

    return {"own": Own, "heir": Heir, "mixed": Mixed, "pipeline": Pipeline, "silent": Silent, "adds": Adds}


def registered() -> dict[str, Any]:
    """Engines registered before activation, and some registered while active; attached outputs of each."""
    fsdp_on_cpu.arrange()
    early = _custom_engines()

    def attached(cls: type, **arguments: Any) -> Any:
        weight = torch.ones(2, requires_grad=True)
        engine: Any = object.__new__(cls)
        result = engine.forward_step(weight)
        if callable(result[1]):
            assert result[0].requires_grad  # the logits of a Megatron-like engine stay on the graph
            result = result[1](result[0])
        result[0].backward()
        report = result[-1].get("model_output", {})
        pair = type(report["pair"]).__name__ if report else None
        return [sum(leaf.requires_grad for leaf in _leaves(report)), pair, weight.grad.tolist()]

    def measure() -> dict[str, Any]:
        late = _custom_engines()
        return {
            when: {k: attached(v) for k, v in engines.items()} for when, engines in (("early", early), ("late", late))
        }

    return phases(measure)


def heirs() -> dict[str, Any]:
    """Subclasses of a shipped engine that nobody registers, made before and while the fixes are active."""
    cls: Any = optional_engines.engine_class("fsdp")

    def make() -> dict[str, type]:
        class Adds(cls):  # type: ignore[misc]
            def forward_step(self, *args: Any, **kwargs: Any) -> Any:
                loss, output = super().forward_step(*args, **kwargs)
                entropy = output["model_output"]["entropy"].values()
                output["model_output"]["more"] = entropy * 2
                return loss + 0.1 * entropy.sum(), output

        class Replaces(cls):  # type: ignore[misc]
            def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
                inputs, _ = self.prepare_model_inputs(micro_batch)
                hidden = self.module(**inputs)
                return hidden.sum(), {"model_output": {"hidden": hidden}}

        return {"adds": Adds, "replaces": Replaces}

    early = make()

    def attached(heir: type) -> list[Any]:
        engine = optional_engines.build("fsdp")
        engine.__class__ = heir
        loss, output = engine.forward_step(optional_engines.micro_batch(), optional_engines.sum_loss, False)
        loss.backward()
        gradient = engine.stand_in_model.linear.weight.grad.tolist()
        return [sum(leaf.requires_grad for leaf in _leaves(output["model_output"])), gradient]

    def measure() -> dict[str, Any]:
        late = make()
        return {
            when: {name: attached(heir) for name, heir in made.items()}
            for when, made in (("early", early), ("late", late))
        }

    return phases(measure)


def memory(counts: list[int]) -> dict[str, Any]:
    """Stock FSDP2 engine with LoRA and gradient checkpointing: what is alive when the micro-batch loop has ended."""
    engine = fsdp_on_cpu.build_engine(lora=True, gradient_checkpointing=True)
    loss = fsdp_on_cpu.ppo_loss()
    _freeze(engine.optimizer)

    def step(count: int) -> dict[str, Any]:
        batch = fsdp_on_cpu.make_batch(count, 48, 1, return_outputs=True)
        with fsdp_on_cpu.HeldGraphs(engine) as held:
            output = fsdp_on_cpu.train_step(engine, batch, loss)
        return {
            "tensors": held.tensors,
            "bytes": held.bytes,
            "nodes": held.nodes,
            "grad_norm": float(output["metrics"]["grad_norm"]),
            "loss": output["loss"],
        }

    step(1)  # allocates gradients and optimizer state
    return phases(lambda: {str(count): step(count) for count in counts})


def _freeze(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
