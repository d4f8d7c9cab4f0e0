"""What an engine reports for a micro-batch no longer keeps its autograd graph alive.

What goes wrong: engines keep ``output["model_output"]`` of every micro-batch until the whole mini-batch is through.
Tensors in it that still hang on the graph pin what their backward needs: with gradient checkpointing the inputs of
the segments, with LoRA the embedding output, with Megatron 1F1B the receive buffers of the last stage. Memory grows
with the number of micro-batches, and smaller micro-batches make it worse.

What the wrapper does: detaches every tensor in ``model_output`` when the micro-batch is done. The loss that is
returned beside it is not touched, so gradients are the same.

When it can go: with verl 0.9.1, except for engines of your own.
Sources: https://github.com/verl-project/verl/pull/6699 (FSDP), https://github.com/verl-project/verl/pull/7874 (all)
"""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict, mentions, method_calls
from verl_fixes.trees import map_tree, rebuild, replace_items
from verl_fixes.wrapping import cover

_METHODS = ("forward_step", "postprocess_micro_batch_func")
_inside = threading.local()


def detach_tree(tree: Any) -> Any:
    """Detach every graph-attached tensor in nested mappings, lists and tuples (named ones too).

    What is not attached comes back as the same object, containers included. Nested (jagged) tensors are detached as
    they are, never rebuilt. Dataclasses are not looked into. Sources: verl#6699, verl#7874, verl#7166.
    """
    import torch

    def detach(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf

    return map_tree(detach, tree)


def detach_model_output(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a method that returns ``(loss, output)`` or ``(loss, num_tokens, output)`` for a micro-batch.

    An override that calls ``super()`` gets what stock returns, attached: it may add to the loss with it. The outermost
    of the wrapped methods detaches. Anything else comes back as it is: Megatron's ``forward_step`` returns the logits
    and a closure.
    """
    engines = _inside.__dict__.setdefault("engines", set())
    if id(self) in engines:
        return original(self, *args, **kwargs)
    engines.add(id(self))
    try:
        result = original(self, *args, **kwargs)
    finally:
        engines.remove(id(self))
    if not isinstance(result, (tuple, list)) or not result:
        return result
    output = result[-1]
    if not isinstance(output, MutableMapping) or "model_output" not in output.keys():  # noqa: SIM118 (TensorDict)
        return result
    detached = detach_tree(output["model_output"])
    if detached is output["model_output"]:
        return result
    return rebuild(result, [*result[:-1], replace_items(output, {"model_output": detached})])


def cover_registered(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``EngineRegistry.register(model_type, backend, device)``: the decorated class gets the fix as well."""
    decorate = original(cls, *args, **kwargs)

    def decorate_and_cover(engine_class: Any) -> Any:
        registered = decorate(engine_class)
        _cover(registered)
        return registered

    return decorate_and_cover


def _cover_all(module: ModuleType) -> None:
    """Cover the classes that were registered before this patch came."""
    for by_backend in module.EngineRegistry._engines.values():
        for by_device in by_backend.values():
            for engine_class in by_device.values():
                _cover(engine_class)


def _cover(engine_class: Any) -> None:
    """Wrap the methods of an engine that verl does not ship. Those that it ships are targets with their own probe."""
    if not inspect.isclass(engine_class):
        return
    for method in _METHODS:
        owner = next((base for base in engine_class.__mro__ if method in vars(base)), None)
        if owner is not None and (owner.__module__, f"{owner.__qualname__}.{method}") not in _SHIPPED:
            cover(PATCH, _REGISTRY, owner, method, detach_model_output)


def _detaches_outputs(function: Function, source: Source) -> Verdict:
    if mentions(function, "detach_tree"):
        return Verdict.FIXED
    if any(root != "loss" for root in method_calls(function, "detach")):
        return Verdict.INCOMPLETE  # 0.9.0's FSDP engine: the top level only
    returns_output = any(isinstance(n, ast.Return) and isinstance(n.value, ast.Tuple) for n in ast.walk(function))
    if returns_output and mentions(function, "model_output") and mentions(function, "loss_function"):
        return Verdict.BUGGY
    return Verdict.DRIFTED


def _has_detach_tree(function: Function, source: Source) -> Verdict:
    if not any(isinstance(n, ast.FunctionDef) and n is not function for n in ast.walk(function)):
        return Verdict.DRIFTED
    fixed = source.function("verl.workers.engine.utils", "detach_tree")
    return Verdict.BUGGY if fixed is None else Verdict.INCOMPLETE  # engines of the user's own remain


def _engine(engine: str, qualname: str, known: dict[str, Verdict]) -> Target:
    return Target(
        module=f"verl.workers.engine.{engine}.transformer_impl",
        qualname=qualname,
        wrapper=detach_model_output,
        question=_detaches_outputs,
        known=known,
    )


_ENGINES = (
    _engine(
        "fsdp",
        "FSDPEngineWithLMHead.forward_step",
        {
            "91b23302f84aa886": Verdict.BUGGY,  # 0.7.0, 0.7.1
            "b84a5f0b655649e6": Verdict.BUGGY,  # 0.8.0
            "25ef1c483e3e17e5": Verdict.INCOMPLETE,  # 0.9.0
            "0930d2a532e21970": Verdict.FIXED,  # 0.9.1
        },
    ),
    _engine(
        "megatron",
        "MegatronEngineWithLMHead.postprocess_micro_batch_func",
        {
            "bb0f2815595539d8": Verdict.BUGGY,  # 0.7.0, 0.7.1
            "bc72b176d044b365": Verdict.BUGGY,  # 0.8.0
            "32cdae10ed839d3e": Verdict.BUGGY,  # 0.9.0
            "cfc8590c0662508f": Verdict.FIXED,  # 0.9.1
        },
    ),
    _engine(
        "torchtitan",
        "TorchTitanEngineWithLMHead.forward_step",
        {
            "b9122b50a3c74160": Verdict.BUGGY,  # 0.7.1, 0.8.0, 0.9.0
            "2f84e227ecd25853": Verdict.FIXED,  # 0.9.1
        },
    ),
    _engine(
        "automodel",
        "AutomodelEngineWithLMHead.forward_step",
        {
            "91b23302f84aa886": Verdict.BUGGY,  # 0.8.0, 0.9.0
            "172753f69534d925": Verdict.FIXED,  # 0.9.1
        },
    ),
)


def _keeps_numbers(function: Function, source: Source) -> Verdict:
    """No bug: in 0.7.0 and 0.7.1 what these keep of a micro-batch was detached and turned into numbers."""
    return Verdict.ABSENT


def _legacy(role: str, kind: str, method: str) -> Target:
    prefix = {"dp": "DataParallel", "megatron": "Megatron"}[kind]
    return Target(
        module=f"verl.workers.{role}.{kind}_{role}",
        qualname=f"{prefix}PPO{role.capitalize()}.{method}",
        wrapper=detach_model_output,
        question=_keeps_numbers,
        absent="the legacy workers keep numbers of a micro-batch, and no output with its graph",
    )


_LEGACY = (
    _legacy("actor", "dp", "update_policy"),
    _legacy("critic", "dp", "update_critic"),
    _legacy("actor", "megatron", "forward_backward_batch"),
    _legacy("critic", "megatron", "forward_backward_batch"),
)
_SHIPPED = frozenset((target.module, target.qualname) for target in _ENGINES)
_REGISTRY = Target(
    module="verl.workers.engine.base",
    qualname="EngineRegistry.register",
    wrapper=cover_registered,
    question=_has_detach_tree,
    on_install=_cover_all,
)

PATCH = Patch(
    name="detach-outputs",
    title="Memory stays flat over the micro-batches",
    hurts=(
        "Engines keep model_output of every micro-batch until the mini-batch is through, with its autograd graph. "
        "Memory grows with the number of micro-batches until update_actor runs out of it (reported: +0.27 GiB per "
        "micro-batch with LoRA on FSDP2, +45 GiB on the last stage of a Megatron pipeline). Smaller micro-batches "
        "make it worse."
    ),
    does=(
        "Detaches every tensor in output['model_output'] when the micro-batch is done: Megatron (MindSpeed), FSDP "
        "(VeOmni), torchtitan, automodel, their subclasses, and every class registered with EngineRegistry. The live "
        "loss is not touched, so gradients are the same. Memory that verl keeps for other reasons is not freed: on "
        "0.7.0 to 0.8.0 the detached outputs themselves still grow with the mini-batch."
    ),
    removable="With verl 0.9.1, except for engines of your own.",
    upstream=(
        "https://github.com/verl-project/verl/pull/6699",
        "https://github.com/verl-project/verl/pull/7874",
    ),
    fixed_in="0.9.1",
    targets=(*_ENGINES, _REGISTRY, *_LEGACY),
    atomic=False,
    stacks_on=("per-token-loss",),
)
