"""MoE router replay records and replays the routes of the model that is being forwarded, and of no other.

What goes wrong: verl keeps one list of routers for the whole process, and up to 0.9.0 takes a model's own by their
position in it. A second engine in the process empties the list; a model that builds its decoder twice, or a frozen
copy, shifts it: RECORD then stops with an error about ``None``, or another model's routes are replayed. An exception
leaves the list in its mode, and the next forward, of a reference model perhaps, records or replays. Routes travel as
uint8, so expert 256 comes back as expert 0. A pipeline stage without an MoE layer does not take part in the gather,
and the others wait for it. On 0.7.0 routes of models with dense layers go to other layers. A batch without routes, or
with too few layers, is replayed in part or not at all, without a word.

What the wrappers do: while an engine, or a legacy worker, forwards, the list is that of its own routers, ordered by
model chunk and layer number; it is empty where replay is off for this batch. The list from before comes back
afterwards, and the model's routers are as they were before, also after an exception and inside another forward. For
more than 256 experts the recorded indices pass verl's casts as pairs of bytes. Every stage takes part in the gather
with the layers that it has, none included, and layers are ordered by number. What is missing, incomplete or ambiguous
is an error.

When it can go: not yet, as of verl 0.9.1. It asks the model that it forwards for its routers, but still sets their mode
through the list: with a second engine in the process nothing is recorded, and after an exception, or inside the loss
of another model, a forward without replay stops. It does not look at the shape of routes, either.
Source: https://github.com/verl-project/verl/pull/7805
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from verl_fixes import router_replay_settings
from verl_fixes.arguments import Call
from verl_fixes.errors import RoutesError, UnsupportedSettingError
from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict, mentions, method_calls
from verl_fixes.recorded_routes import (
    UINT8_EXPERTS,
    WAY_OUT,
    as_bytes,
    from_bytes,
    gather,
    moe_layers,
    no_layers,
    refuse_duplicates,
    refuse_incomplete,
    select_layers,
)
from verl_fixes.router_replay_settings import refuse_broken_engine


class _Router(NamedTuple):
    layer_number: int
    replay: Any
    """verl's ``RouterReplay``: what one router has recorded, and what it is to replay."""


class _Forward(NamedTuple):
    """Whose routers take part in what is running.

    Attributes:
        chunks: the routers of each model chunk of this pipeline stage, by layer number. No chunk: replay is off.
        touched: every ``RouterReplay`` in these chunks, those of multi-token prediction included, which verl 0.9 may
            set as well.
        recording: R2's first pass.
        wide: more experts than uint8 can tell apart.
    """

    chunks: tuple[tuple[_Router, ...], ...] = ()
    touched: tuple[Any, ...] = ()
    recording: bool = False
    wide: bool = False

    @property
    def routers(self) -> list[_Router]:
        return [router for chunk in self.chunks for router in chunk]

    def chunk(self, vp_rank: int | None) -> tuple[_Router, ...]:
        return self.chunks[vp_rank or 0] if self.chunks else ()


_current: ContextVar[_Forward | None] = ContextVar("forward", default=None)


@contextmanager
def _forwarding(forward: _Forward, recorded: list[Any]) -> Iterator[None]:
    """Let verl see the routers of one model, and leave nothing of the pass behind.

    Args:
        forward: which ones.
        recorded: where verl collects the routes of the micro-batches.
    """
    from verl.utils.megatron.router_replay_patch import RouterReplay

    outer, outer_list = _current.get(), RouterReplay.router_instances
    interrupted = [(replay, dict(vars(replay))) for replay in (outer.touched if outer else ())]
    _reset(replay for replay, _ in interrupted)
    RouterReplay.router_instances = [router.replay for router in forward.routers]
    token = _current.set(forward)
    try:
        yield
    finally:
        _reset(forward.touched)
        recorded.clear()
        for replay, state in interrupted:
            vars(replay).update(state)
        _current.reset(token)
        RouterReplay.router_instances = outer_list


def _reset(replays: Iterable[Any]) -> None:
    for replay in replays:
        replay.clear_indices()
        replay.clear_router_replay_action()


def _forward_of(chunks: Sequence[Any], config: Any, recording: bool) -> _Forward:
    found = tuple(tuple(sorted(routers_of(chunk), key=lambda router: router.layer_number)) for chunk in chunks)
    modules = (module for chunk in chunks for module in chunk.modules())
    touched = tuple(module.router_replay for module in modules if getattr(module, "router_replay", None) is not None)
    forward = _Forward(found, touched, recording, config.num_moe_experts > UINT8_EXPERTS)
    refuse_duplicates([router.layer_number for router in forward.routers], "the model that is being forwarded")
    return forward


def routers_of(chunk: Any) -> Iterator[_Router]:
    """The routers of the decoder. Those of multi-token prediction, its sibling, use the decoder's layer numbers.

    Raises:
        RoutesError: a router was built without router replay, so it can neither record nor replay.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    decoders = [module.decoder for module in chunk.modules() if getattr(module, "decoder", None) is not None]
    modules = {id(module): module for decoder in decoders or [chunk] for module in decoder.modules()}
    for module in modules.values():
        if isinstance(module, TopKRouter) and module.layer_number is not None:
            if getattr(module, "router_replay", None) is None:
                raise RoutesError(
                    f"r2-replay: the router of layer {module.layer_number} was built without router replay, so its "
                    f"routes would be missing. {WAY_OUT}"
                )
            yield _Router(module.layer_number, module.router_replay)


def forward_engine(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``MegatronEngine.forward_backward_batch(self, data, loss_function, forward_only=False)``.

    Raises:
        RoutesError: this pass is to replay, and the routes of the batch are missing or do not cover the model.
        UnsupportedSettingError: verl 0.7.1, whose engine cannot record or replay.
    """
    from verl.utils import tensordict_utils as tu

    call = Call(original, ("self", "data", "loss_function", "forward_only"), args, kwargs)
    engine, data = call["self"], call["data"]
    mode = engine.engine_config.router_replay.mode
    if not tu.get_non_tensor_data(data, key="enable_routing_replay", default=False):
        mode = "disabled"
    given = None
    if mode != "disabled":
        refuse_broken_engine()
        tokens = data["input_ids"] if mode == "R2" else None  # R3's routes may lack the last token's
        given = data.get("routed_experts", None), tokens
    forward_only = call.get("forward_only")
    return _run(call, mode, forward_only=forward_only, model=engine, given=given, collector=engine)


def record_worker(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``ActorRolloutRefWorker.compute_log_prob(self, data)`` of the legacy workers."""
    return _run_worker(Call(original, ("self", "data"), args, kwargs), forward_only=True)


def update_worker(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``ActorRolloutRefWorker.update_actor(self, data)`` of the legacy workers."""
    return _run_worker(Call(original, ("self", "data"), args, kwargs), forward_only=False)


def _run_worker(call: Call, forward_only: bool) -> Any:
    worker, given, mode = call["self"], None, "disabled"
    if worker.enable_routing_replay:
        mode = worker.config.actor.router_replay.mode
        batch = getattr(call["data"], "batch", None)  # with a transfer queue the rows arrive later
        given = None if batch is None else (batch.get("routed_experts", None), batch["input_ids"])
    return _run(call, mode, forward_only=forward_only, model=worker, given=given, collector=worker.actor)


def _run(call: Call, mode: str, *, forward_only: Any, model: Any, given: Any, collector: Any) -> Any:
    """One pass of a model.

    Args:
        call: the pass.
        mode: of router replay, for this batch.
        forward_only: R2 records in such a pass.
        model: has Megatron's ``tf_config``, and the model chunks as ``module`` or ``actor_module``.
        given: ``routed_experts`` and ``input_ids`` of the batch, None where they are not known yet.
        collector: has verl's list of the routes of the micro-batches.
    """
    config = model.tf_config
    if mode == "disabled" or not config.num_moe_experts:
        with _forwarding(_Forward(), []):
            return call()
    recording = mode == "R2" and bool(forward_only)
    if not recording and given is not None:
        routes, tokens = given
        refuse_incomplete(routes, tokens, config)
    chunks = model.actor_module if hasattr(model, "actor_module") else model.module
    with _forwarding(_forward_of(chunks, config, recording), collector.mini_layer_topk_idx_list):
        return call()


def leave_reference(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``ActorRolloutRefWorker.compute_ref_log_prob(self, data)``.

    With LoRA it is the actor's ``compute_log_prob``, which records; the trainer would compare these routes with the
    actor's and stop where the adapter makes a difference.
    """
    with _forwarding(_Forward(), []):
        result = original(*args, **kwargs)
    batch = getattr(result, "batch", None)
    if batch is not None:
        batch.pop("routed_experts", None)
    return result


def own_routers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``RouterReplayHelper.get_micro_batch_router_list(tf_config, vp_rank=None)``."""
    forward = _current.get()
    if forward is None:
        return original(*args, **kwargs)
    vp_rank = Call(original, ("tf_config", "vp_rank"), args, kwargs).get("vp_rank")
    return [router.replay for router in forward.chunk(vp_rank)]


def is_recording(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``RouterReplayHelper.is_r2_record_action``: also true of a stage without a router, which has to gather."""
    forward = _current.get()
    return original(*args, **kwargs) if forward is None else forward.recording


_MERGE = ("attention_mask", "input_ids", "mini_layer_topk_idx_list", "tf_config", "vp_rank")


def merge_own_routes(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``merge_router_topk_indices``, which appends one model chunk's routes of a micro-batch to a list.

    Raises:
        RoutesError: a router of the model was not called in this micro-batch.
    """
    call = Call(original, _MERGE, args, kwargs)
    forward = _current.get()
    if forward is None:
        return call()
    routers = forward.chunk(call.get("vp_rank"))
    if not routers:
        width = call["tf_config"].moe_router_topk * (2 if forward.wide else 1)
        call["mini_layer_topk_idx_list"].append(no_layers(call["input_ids"], call["attention_mask"], width))
        return None
    silent = [router.layer_number for router in routers if router.replay.recorded_topk_idx is None]
    if silent:
        raise RoutesError(f"r2-replay: the routers of layers {silent} recorded no routes. {WAY_OUT}")
    if forward.wide:
        for router in routers:
            router.replay.recorded_topk_idx = as_bytes(router.replay.recorded_topk_idx)
    result = call()
    for router in routers:
        router.replay.recorded_topk_idx = None  # of this micro-batch; the next must bring its own
    return result


def gather_all_stages(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``pp_gather(local_layers_router_map, tf_config)``, whose own version wants equal stages."""
    forward = _current.get()
    if forward is None or not forward.recording:
        return original(*args, **kwargs)
    call = Call(original, ("local_layers_router_map", "tf_config"), args, kwargs)
    routes = call["local_layers_router_map"]
    if call["tf_config"].pipeline_model_parallel_size > 1:
        from megatron.core import parallel_state as mpu

        numbers = [router.layer_number for router in forward.routers]
        routes = gather(routes, numbers, mpu.get_pipeline_model_parallel_group())
    return from_bytes(routes) if forward.wide else routes


def replay_by_layer_number(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``set_router_replay_data`` of verl up to 0.8.0, which finds a router's row by counting layers.

    Raises:
        UnsupportedSettingError: Megatron's layer numbers are not those that verl counts.
    """
    call = Call(original, ("layers_topk_idx", "attention_mask", "tf_config", "vp_rank"), args, kwargs)
    forward = _current.get()
    if forward is None:
        return call()
    from verl.utils.megatron import router_replay_utils

    config, vp_rank = call["tf_config"], call.get("vp_rank")
    stage = router_replay_utils.get_current_rank_layer_info(config, vp_rank)
    with_router = moe_layers(config)
    counted = [layer for layer in range(stage["start"], stage["end"]) if layer in with_router]
    own = [router.layer_number - 1 for router in forward.chunk(vp_rank)]
    if own != counted:
        raise UnsupportedSettingError(
            f"r2-replay: the routers of this model chunk are in layers {own} (from 0), and verl takes them for those "
            f"of layers {counted}: routes would go to the wrong layers. {WAY_OUT}"
        )
    routes = call["layers_topk_idx"]
    if hasattr(router_replay_utils, "is_moe_layer") or len(with_router) == config.num_layers:
        return call()
    # 0.7.0 takes row ``start + n`` for the n-th router, as if every layer had one
    rows = own if routes.shape[-2] == config.num_layers else [with_router.index(layer) for layer in own]
    return call(layers_topk_idx=select_layers(routes, [0] * stage["start"] + rows))


def decoder_routers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``iter_model_routers(model)`` of verl 0.9: in a vision model it takes MTP's routers for the decoder's."""
    forward = _current.get()
    if forward is None:
        yield from original(*args, **kwargs)
    elif forward.chunks:
        model = Call(original, ("model",), args, kwargs)["model"]
        for chunk in model if isinstance(model, (list, tuple)) else [model]:
            yield from routers_of(chunk)


def _forwards(function: Function, source: Source) -> Verdict:
    if not source.says(_ENGINE, "RouterReplay"):
        return Verdict.ABSENT
    if not mentions(function, "set_global_router_replay_action"):
        return Verdict.DRIFTED
    if mentions(function, "record_r2_routes"):
        return Verdict.INCOMPLETE
    return Verdict.BUGGY if mentions(function, "is_r2_record_action") else Verdict.DRIFTED


def _takes_model(function: Function) -> bool:
    return any(argument.arg == "model" for argument in (*function.args.args, *function.args.kwonlyargs))


def _lists_routers(function: Function, source: Source) -> Verdict:
    if mentions(function, "num_layers"):  # to see whether the list covers this model and nothing else
        return Verdict.FIXED
    return Verdict.BUGGY if mentions(function, "router_instances") else Verdict.DRIFTED


def _asks_routers(function: Function, source: Source) -> Verdict:
    if _takes_model(function):
        return Verdict.FIXED
    return Verdict.BUGGY if mentions(function, "get_micro_batch_router_list") else Verdict.DRIFTED


def _sets_targets(function: Function, source: Source) -> Verdict:
    if _takes_model(function):
        return Verdict.FIXED
    known = mentions(function, "get_micro_batch_router_list") and mentions(function, "get_current_rank_layer_info")
    return Verdict.BUGGY if known and mentions(function, "set_target_indices") else Verdict.DRIFTED


def _gathers(function: Function, source: Source) -> Verdict:
    gathers = len(list(method_calls(function, "all_gather")))  # a second one tells how many layers each stage has
    if mentions(function, "int16"):
        return Verdict.FIXED if gathers > 1 else Verdict.DRIFTED
    return Verdict.BUGGY if gathers == 1 else Verdict.DRIFTED


def _walks_model(function: Function, source: Source) -> Verdict:
    known = mentions(function, "decoder") and mentions(function, "layer_number")
    return Verdict.INCOMPLETE if known and not mentions(function, "language_model") else Verdict.DRIFTED


def _has_model_walk(source: Source) -> bool:
    return source.function(_UTILS, "iter_model_routers") is not None


def _of_worker(name: str) -> Callable[[Function, Source], Verdict]:
    return lambda function, source: Verdict.BUGGY if mentions(function, name) else Verdict.DRIFTED


_ENGINE = "verl.workers.engine.megatron.transformer_impl"
_UTILS = "verl.utils.megatron.router_replay_utils"
_WORKERS = "verl.workers.megatron_workers"

PATCH = Patch(
    name="r2-replay",
    title="Router replay stays with its own model, on every pipeline stage",
    hurts=(
        "With router_replay.mode=R2 or R3 verl up to 0.9.0 finds a model's routers by their position in a list of the "
        "whole process. A second engine or a decoder that was built twice shifts it: recording stops with an error, or "
        "routes of another model are replayed. Routes are cut to uint8, so with more than 256 experts "
        "others are replayed than were recorded. Pipeline stages without an MoE layer hang the rest, and routes that "
        "are missing are not replayed, without a word. R2 with rollout_correction.bypass_mode stops at the first "
        "update, after a whole rollout."
    ),
    does=(
        "Shows verl the routers of the model that is being forwarded, none where replay is off, and resets them after "
        "an exception. Keeps expert ids up to 32767. Gathers from every pipeline stage, by layer number. Missing, "
        "incomplete or ambiguous routes are an error, and R2 with bypass_mode is one at start. The Megatron engine of "
        "0.7.1 cannot record at all and is refused; its legacy workers can. VeOmni's replay is its own and not touched."
    ),
    removable=(
        "Not yet, as of verl 0.9.1: it still sets the mode of routers through the list of the whole process, and "
        "starts recipes with a task runner of their own without looking at bypass_mode. The rest: with 0.9.1."
    ),
    upstream=("https://github.com/verl-project/verl/pull/7805",),
    fixed_in="0.9.1",
    stacks_on=("per-token-loss",),
    targets=(
        Target(
            module=_ENGINE,
            qualname="MegatronEngine.forward_backward_batch",
            wrapper=forward_engine,
            question=_forwards,
            known={
                "c4602821d56f9205": Verdict.ABSENT,  # 0.7.0
                "886af1f2f12f3690": Verdict.BUGGY,  # 0.7.1
                "fde14271878f9bb0": Verdict.BUGGY,  # 0.8.0
                "881a7f35c53cd481": Verdict.BUGGY,  # 0.9.0
                "c9d1db2381b69c75": Verdict.INCOMPLETE,  # 0.9.1
            },
            absent="the engine of this release has no router replay; its legacy workers have",
        ),
        Target(
            module=_UTILS,
            qualname="RouterReplayHelper.get_micro_batch_router_list",
            wrapper=own_routers,
            question=_lists_routers,
            known={
                "fc173dd137f0fe6b": Verdict.BUGGY,  # 0.7.0
                "a44060d4bcdf62b6": Verdict.BUGGY,  # 0.7.1 to 0.9.0
                "0f5b5c4ab5101506": Verdict.FIXED,  # 0.9.1
            },
        ),
        Target(
            module=_UTILS,
            qualname="RouterReplayHelper.is_r2_record_action",
            wrapper=is_recording,
            question=_asks_routers,
            known={
                "c00585c7ed32ae62": Verdict.BUGGY,  # 0.7.0 to 0.9.0
                "96287fb775d92363": Verdict.FIXED,  # 0.9.1
            },
        ),
        Target(
            module=_UTILS,
            qualname="merge_router_topk_indices",
            wrapper=merge_own_routes,
            question=_asks_routers,
            known={
                "c4a9a48a567985f2": Verdict.BUGGY,  # 0.7.0
                "f14a95e1e241e2d2": Verdict.BUGGY,  # 0.7.1
                "ba9e5ce3eea07fb6": Verdict.BUGGY,  # 0.8.0
                "8d39f9b473244f6b": Verdict.BUGGY,  # 0.9.0
                "2a7a493d3c0994f1": Verdict.FIXED,  # 0.9.1
            },
        ),
        Target(
            module=_UTILS,
            qualname="set_router_replay_data",
            wrapper=replay_by_layer_number,
            question=_sets_targets,
            known={
                "e59bd245d03bec34": Verdict.BUGGY,  # 0.7.0
                "81c8d408fcf738bf": Verdict.BUGGY,  # 0.7.1
                "59d5c6f43190b7d7": Verdict.BUGGY,  # 0.8.0
                "4fc14fca05a0e074": Verdict.FIXED,  # 0.9.0
                "75e15d89aeed8a39": Verdict.FIXED,  # 0.9.1
            },
        ),
        Target(
            module=_UTILS,
            qualname="pp_gather",
            wrapper=gather_all_stages,
            question=_gathers,
            known={
                "78e3ba4d83aabc35": Verdict.BUGGY,  # 0.7.0
                "8ff800f6f9157962": Verdict.BUGGY,  # 0.7.1, 0.8.0
                "4cdbecf6309acb33": Verdict.BUGGY,  # 0.9.0
                "1e90c83bb7116cad": Verdict.FIXED,  # 0.9.1
            },
        ),
        Target(
            module=_UTILS,
            qualname="iter_model_routers",
            wrapper=decoder_routers,
            question=_walks_model,
            exists=_has_model_walk,
            known={"46b66d174b5e827e": Verdict.INCOMPLETE},  # 0.9.0, 0.9.1
            absent="this release finds routers by their position only",
        ),
        Target(
            module=_WORKERS,
            qualname="ActorRolloutRefWorker.compute_log_prob",
            unit="legacy workers",
            wrapper=record_worker,
            question=_of_worker("set_global_router_replay_action"),
            known={
                "0e88f3916a7ab571": Verdict.BUGGY,  # 0.7.0
                "ae219690c01f3140": Verdict.BUGGY,  # 0.7.1
            },
        ),
        Target(
            module=_WORKERS,
            qualname="ActorRolloutRefWorker.update_actor",
            unit="legacy workers",
            wrapper=update_worker,
            question=_of_worker("update_policy"),
            known={
                "a8e6e85d98074377": Verdict.BUGGY,  # 0.7.0
                "4492475df65bc782": Verdict.BUGGY,  # 0.7.1
            },
        ),
        Target(
            module=_WORKERS,
            qualname="ActorRolloutRefWorker.compute_ref_log_prob",
            unit="legacy workers",
            wrapper=leave_reference,
            question=_of_worker("ref_policy"),
            known={
                "ccd5fba41d997299": Verdict.BUGGY,  # 0.7.0
                "d88b0083770c16f7": Verdict.BUGGY,  # 0.7.1
            },
        ),
        *router_replay_settings.TARGETS,
    ),
)
