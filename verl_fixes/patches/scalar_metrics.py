"""Metrics leave a training worker as plain Python numbers.

What goes wrong: with newer megatron-core and with custom engines ``grad_norm`` (and ``lr``, and whatever a loss
function reports) is a tensor on the worker's device. verl 0.7.x sends it to the driver as it is. A driver without
that device cannot deserialize it, and one with it keeps device memory alive for a number.

What the wrapper does: before ``TrainingWorker._postprocess_output`` gathers and sends the metrics, every one-element
tensor and numpy scalar in them becomes a float, int or bool, and every larger tensor a detached CPU tensor.

When it can go: ``grad_norm`` is converted from verl 0.8.0 on; the other metrics are not as of 0.9.1.
Source: https://github.com/verl-project/verl/pull/6195
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict, mentions, method_calls
from verl_fixes.trees import map_tree, replace_items

if TYPE_CHECKING:
    import torch


def plain_numbers(metrics: Any, ranks: frozenset[int] = frozenset()) -> Any:
    """A copy of a tree of metrics in which every one-element tensor and numpy scalar is a plain Python number.

    Args:
        metrics: dicts, lists, tuples (named ones too) and verl ``Metric`` objects, nested at will.
        ranks: the processes that convert their metrics at the same time. A sharded DTensor can only be put together
            by all processes of its mesh: one that has others in it is left as it is, or this process would wait for
            them for ever.

    Returns:
        The same tree. One-element tensors of any shape, dtype and device are float, int, bool or complex; larger
        tensors are detached CPU tensors; parts without any of these are the same objects. ``metrics`` is not mutated.
        All one-element tensors of a device are fetched in one transfer.
    """
    import numpy as np
    import torch

    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the leaf, so that its id stays its own

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
            whole = _whole(leaf.detach(), ranks)
            if whole is not None:
                seen[id(leaf)] = (leaf, whole)
        return leaf

    _map_metrics(collect, metrics)
    scalars = {key: whole for key, (_, whole) in seen.items() if whole.numel() == 1}
    numbers = dict(zip(scalars, fetch(list(scalars.values())), strict=True))

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) in seen:
            return numbers[id(leaf)] if id(leaf) in numbers else seen[id(leaf)][1].cpu()
        return leaf.item() if isinstance(leaf, np.generic) else leaf

    return _map_metrics(convert, metrics)


def fetch(tensors: list[torch.Tensor]) -> list[Any]:
    """The values of one-element tensors as Python numbers, with one transfer for each device.

    The raw bytes are packed, so a number keeps every bit of its dtype.
    """
    import torch

    on_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        on_device[tensor.device].append(index)
    numbers: list[Any] = [None] * len(tensors)
    for device, indices in on_device.items():
        if device.type == "cpu":
            for index in indices:
                numbers[index] = tensors[index].item()
            continue
        indices.sort(key=lambda index: -tensors[index].element_size())  # keeps every element aligned
        packed = torch.cat([tensors[index].contiguous().reshape(1).view(torch.uint8) for index in indices]).cpu()
        offset = 0
        for index in indices:
            size = tensors[index].element_size()
            numbers[index] = packed[offset : offset + size].view(tensors[index].dtype).item()
            offset += size
    return numbers


def _whole(tensor: torch.Tensor, ranks: frozenset[int]) -> torch.Tensor | None:
    """The tensor as an ordinary one: of all shards, dense, and without nesting where it has one element.

    None where that cannot be had: on the meta device, or from processes that do not take part.
    """
    import torch

    if tensor.is_meta:
        return None
    if hasattr(tensor, "full_tensor"):
        mesh = tensor.device_mesh
        if all(placement.is_replicate() for placement in tensor.placements):
            tensor = tensor.to_local()
        elif mesh.size() == 1 or ranks.issuperset(mesh.mesh.flatten().tolist()):
            tensor = tensor.full_tensor()
        else:
            return None
    if tensor.numel() != 1:
        return tensor
    if tensor.is_nested:
        return tensor.values() if tensor.layout is torch.jagged else tensor.unbind()[0]
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _map_metrics(change: Callable[[Any], Any], metrics: Any) -> Any:
    metric = getattr(sys.modules.get("verl.utils.metric"), "Metric", ())  # no such object without the module

    def change_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, metric):
            return change(leaf)
        values = map_tree(change, leaf.values)
        if values is leaf.values:
            return leaf
        changed = copy.copy(leaf)
        changed.values = values
        return changed

    return map_tree(change_leaf, metrics)


def convert_metrics(original: Callable[..., Any], self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``TrainingWorker._postprocess_output(self, output, *, ...)``: ``output["metrics"]`` as plain numbers."""
    if isinstance(output, dict) and "metrics" in output:
        metrics = plain_numbers(output["metrics"], _data_parallel_ranks(self.engine))
        output = replace_items(output, {"metrics": metrics})
    return original(self, output, *args, **kwargs)


def _data_parallel_ranks(engine: Any) -> frozenset[int]:
    """The ranks that postprocess their output at the same time: verl all-reduces the loss over them right after."""
    import torch

    group = engine.get_data_parallel_group()
    return frozenset() if group is None else frozenset(torch.distributed.get_process_group_ranks(group))


def _converts_grad_norm(function: Function, source: Source) -> Verdict:
    if "grad_norm" in method_calls(function, "item"):
        return Verdict.INCOMPLETE  # the other metrics remain
    if "metrics" in method_calls(function, "pop") and mentions(function, "grad_norm"):
        return Verdict.BUGGY
    return Verdict.DRIFTED


def convert_result(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around what hands metrics to the legacy Megatron workers, which send them in ``DataProto.meta_info``."""
    return plain_numbers(original(*args, **kwargs))


def _notes_grad_norm(function: Function, source: Source) -> Verdict:
    """``update_policy`` and ``update_critic`` put the grad_norm of the optimizer's step into a list as it is."""
    if not mentions(function, "grad_norm") or not mentions(function, "append_to_dict"):
        return Verdict.DRIFTED
    return Verdict.FIXED if "grad_norm" in method_calls(function, "item") else Verdict.BUGGY


def _has_legacy_workers(function: Function, source: Source) -> Verdict:
    """They call it last, for the ``lr`` of the metrics that they send."""
    return Verdict.BUGGY if source.file("verl.workers.megatron_workers") else Verdict.ABSENT


_LEGACY = (
    Target(
        module="verl.workers.actor.megatron_actor",
        qualname="MegatronPPOActor.update_policy",
        wrapper=convert_result,
        question=_notes_grad_norm,
        known={
            "59964056181eb42a": Verdict.BUGGY,  # 0.7.0
            "3824e29b08963b5e": Verdict.BUGGY,  # 0.7.1
        },
        unit="legacy actor",
    ),
    Target(
        module="verl.workers.critic.megatron_critic",
        qualname="MegatronPPOCritic.update_critic",
        wrapper=convert_result,
        question=_notes_grad_norm,
        known={"3f5a85c0ffec652a": Verdict.BUGGY},  # 0.7.0, 0.7.1
        unit="legacy critic",
    ),
    Target(
        module="verl.utils.megatron.optimizer",
        qualname="get_megatron_last_lr",
        wrapper=convert_result,
        question=_has_legacy_workers,
        absent="this release has no legacy workers",
        unit="legacy learning rate",
    ),
)

PATCH = Patch(
    name="scalar-metrics",
    title="Metrics leave the worker as plain numbers",
    hurts=(
        "On verl 0.7.x grad_norm can reach the driver as a tensor on the worker's device (Megatron with megatron-core "
        "0.17 or later, custom engines). A CPU-only driver cannot deserialize it and the run stops at the first "
        "update. Other metrics, lr among them, have the same problem on every release."
    ),
    does=(
        "Before TrainingWorker._postprocess_output gathers and sends the metrics, turns every one-element tensor and "
        "numpy scalar in them into a float, int or bool, and every larger tensor into a detached CPU tensor. The same "
        "for what the legacy Megatron actor and critic of verl 0.7 return."
    ),
    removable="grad_norm: with verl 0.8.0. Other metrics: when a release converts all of them; 0.9.1 does not.",
    upstream=("https://github.com/verl-project/verl/pull/6195",),
    fixed_in="0.8.0",
    targets=(
        Target(
            module="verl.workers.engine_workers",
            qualname="TrainingWorker._postprocess_output",
            wrapper=convert_metrics,
            question=_converts_grad_norm,
            known={
                "ef92f2d32bbacf87": Verdict.BUGGY,  # 0.7.0
                "68a9200296634dc8": Verdict.BUGGY,  # 0.7.1
                "09985a54fd22e7c0": Verdict.INCOMPLETE,  # 0.8.0, 0.9.0, 0.9.1
            },
        ),
        *_LEGACY,
    ),
)
