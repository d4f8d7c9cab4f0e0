"""Records and replays MoE routes with the stock engines on CPU: on stock code, with the fixes, and on stock code again.

Started by :func:`tests.megatron.steps.steps` in every process of a gloo group. Each engine of the plan names a scene.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from tests.megatron.job import forget_layout, phase
from tests.megatron.legacy import freeze
from tests.stock.jobs.phases import phases
from verl_fixes.demo import megatron_on_cpu as cpu

Save = Callable[[str, Any], None]

MICRO_BATCHES = 2
EVEN = tuple((prompt, response + (prompt + response) % 2) for prompt, response in cpu.STANDARD)
"""Rows that TP=2 does not pad. Padding is replayed to one expert only, and gloo cannot gather unequal parts."""


class Replayed(Protocol):
    """What records and replays routes: verl's engine, or a legacy worker."""

    engine: Any
    gathers_in: str
    """Name of the module that calls ``pp_gather``."""

    @property
    def collected(self) -> list[Any]:
        """Routes of the micro-batches that verl has not merged yet."""

    def infer(self, replay: bool) -> Any:
        """A forward without a gradient; with ``replay`` it records."""

    def record(self) -> Tensor:
        """The first pass; every rank gets the routes, as from the trainer."""

    def update(self, routes: Tensor | None, loss: Any = None) -> dict[str, Tensor]:
        """The whole gradient of an update with routers that have changed since the routes were recorded."""

    def tokens(self, routes: Tensor) -> Tensor:
        """``[tokens, layers, topk]`` of recorded routes, expert ids in ascending order."""

    def routes_from(self, tokens: Tensor) -> Tensor:
        """``[tokens, layers, topk]`` as ``routed_experts``."""

    def as_r3(self) -> contextlib.AbstractContextManager[None]:
        """Replay routes of the rollout meanwhile."""


class EngineReplayed:
    """The engine of verl 0.8.0 and later; its steps change no weights."""

    gathers_in = "verl.workers.engine.megatron.transformer_impl"

    def __init__(self, wanted: dict[str, Any]) -> None:
        from verl.workers.config.engine import EngineRouterReplayConfig

        self.engine = cpu.build_engine(
            cpu.Model(**wanted.get("model", {})),
            cpu.Layout(**wanted.get("layout", {})),
            calculate_per_token_loss=False,
            seed=wanted.get("seed", 0),
            router_replay=EngineRouterReplayConfig(mode="R2"),
        )
        freeze(self.engine)

    @property
    def collected(self) -> list[Any]:
        collected: list[Any] = self.engine.mini_layer_topk_idx_list
        return collected

    def infer(self, replay: bool) -> Any:
        with self.engine.eval_mode():
            return self.engine.infer_batch(batch_of(replay), loss_function=None)

    def record(self) -> Tensor:
        draw_routers(self.engine, seed=1)
        output = self.infer(replay=True)
        mine = output.get("model_output", {}).get("routed_experts") if output else None
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, mine)
        return next(routes for routes in reversed(everyone) if routes is not None)

    def update(self, routes: Tensor | None, loss: Any = None) -> dict[str, Tensor]:
        draw_routers(self.engine, seed=2)
        batch = batch_of(replay=True)
        if routes is not None:
            batch["routed_experts"] = routes
        result = cpu.train_step(self.engine, batch, loss or cpu.ppo_loss())
        return cpu.gather_gradients(self.engine, result.gradients)

    def tokens(self, routes: Tensor) -> Tensor:
        return routes.values().long().sort(dim=-1).values

    def routes_from(self, tokens: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(tokens, offsets=batch_of(True)["input_ids"].offsets())

    @contextlib.contextmanager
    def as_r3(self) -> Iterator[None]:
        from verl.workers.config.engine import EngineRouterReplayConfig

        config, before = self.engine.engine_config, self.engine.engine_config.router_replay
        object.__setattr__(config, "router_replay", EngineRouterReplayConfig(mode="R3"))
        try:
            yield
        finally:
            object.__setattr__(config, "router_replay", before)


def batch_of(replay: bool) -> Any:
    return cpu.make_batch(micro_batches=MICRO_BATCHES, lengths=EVEN, enable_routing_replay=replay)


def build(wanted: dict[str, Any]) -> Replayed:
    import verl

    if verl.__version__ >= "0.8":
        return EngineReplayed(wanted)
    from tests.megatron.replay_legacy import WorkerReplayed

    return WorkerReplayed(wanted)


def routers_of(engine: Any) -> dict[int, Any]:
    """Megatron's own routers by layer number."""
    from megatron.core.transformer.moe.router import TopKRouter

    modules = (module for chunk in engine.module for module in chunk.modules())
    return {module.layer_number: module for module in modules if isinstance(module, TopKRouter)}


def replays_of(replayed: Replayed) -> list[Any]:
    return [router.router_replay for router in routers_of(replayed.engine).values()]


def draw_routers(engine: Any, seed: int) -> None:
    """Other router weights, the same in every layout: without a replay, tokens then go to other experts."""
    for number, router in routers_of(engine).items():
        generator = torch.Generator().manual_seed(1000 * seed + number)
        router.weight.data.copy_(torch.randn(router.weight.shape, generator=generator))


@contextlib.contextmanager
def registry(replays: list[Any], replayed: Replayed) -> Iterator[None]:
    """verl's list of routers, as other models in the process leave it. What an error leaves behind stays in here."""
    from verl.utils.megatron.router_replay_patch import RouterReplay

    before, RouterReplay.router_instances = RouterReplay.router_instances, replays
    try:
        yield
    finally:
        RouterReplay.router_instances = before
        for replay in {*replays, *replays_of(replayed)}:
            replay.clear_indices()
            replay.clear_router_replay_action()
        replayed.collected.clear()


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[dict[int, list[Tensor]]]:
    """The experts that each router really sends tokens to, layer by layer: ``[tokens, experts]`` for each call."""
    seen: dict[int, list[Tensor]] = {}

    def note(module: Any, inputs: Any, output: Any) -> None:
        seen.setdefault(module.layer_number, []).append(output[1].detach().clone())

    hooks = [router.register_forward_hook(note) for router in routers_of(engine).values()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def chosen(seen: dict[int, list[Tensor]]) -> Tensor:
    """``[tokens, layers, topk]`` expert ids in ascending order, from what the routers did."""
    layers = []
    for number in sorted(seen):
        every = torch.cat(seen[number])
        layers.append(every.nonzero()[:, 1].view(len(every), -1))
    return torch.stack(layers, dim=1)


def alone(mine: Replayed, save: Save, other: Replayed | None = None, before: Sequence[Any] = ()) -> dict[str, Any]:
    """Record, change the routers, replay."""
    with registry([*before, *replays_of(mine)], mine):
        with watched(mine.engine) as recorded:
            routes = mine.record()
        with watched(mine.engine) as replayed:
            gradient = mine.update(routes)
    tokens = mine.tokens(routes)
    save("routes", tokens)
    save("gradient", gradient)
    answer = {"dtype": str(routes.dtype), "largest": int(tokens.max())}
    if torch.distributed.get_world_size() > 1:
        return answer
    return answer | {
        "recorded what happened": torch.equal(tokens, chosen(recorded)),
        "replayed what was recorded": torch.equal(tokens, chosen(replayed)),
    }


def others_in_front(mine: Replayed, save: Save, other: Replayed) -> dict[str, Any]:
    """A decoder that was built and thrown away, or a frozen copy: its routers come first in the list."""
    return alone(mine, save, before=replays_of(other))


def others_only(mine: Replayed, save: Save, other: Replayed) -> dict[str, Any]:
    """An engine that was built later has emptied the list. Its own routers stay as they are."""
    from verl.utils.megatron.router_replay_patch import RouterReplay

    theirs = replays_of(other)
    with registry(theirs, mine):
        with watched(mine.engine) as recorded:
            routes = mine.record()
        return {
            "recorded what happened": torch.equal(mine.tokens(routes), chosen(recorded)),
            "list": RouterReplay.router_instances is theirs and len(theirs) == len(replays_of(other)),
            "others": [str(replay.router_replay_action) for replay in theirs],
        }


def after_an_exception(mine: EngineReplayed, save: Save, other: EngineReplayed) -> dict[str, Any]:
    """An update whose loss fails, then a forward without replay in the same process, as a reference model's."""
    from verl.utils.megatron.router_replay_patch import RouterReplay

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("the loss function failed")

    answer: dict[str, Any] = {}
    replays = replays_of(mine)
    with registry(replays, mine):
        routes = mine.record()
        try:
            mine.update(routes, loss=failing)
        except ArithmeticError:
            answer["list"] = RouterReplay.router_instances is replays
            answer["actions"] = sorted({str(replay.router_replay_action) for replay in replays})
        try:
            mine.infer(replay=False)
        except (AttributeError, RuntimeError) as error:
            answer["next forward"] = str(error)
    return answer


def nested(mine: EngineReplayed, save: Save, other: EngineReplayed) -> dict[str, Any]:
    """Another model is forwarded without replay inside the loss of the first one, as a teacher would be."""
    ppo, seen = cpu.ppo_loss(), []

    def with_teacher(*args: Any, **kwargs: Any) -> Any:
        with watched(other.engine) as teacher:
            other.infer(replay=False)
        seen.append(chosen(teacher))
        return ppo(*args, **kwargs)

    draw_routers(other.engine, seed=3)
    with watched(other.engine) as by_itself:
        other.infer(replay=False)
    with registry([*replays_of(mine), *replays_of(other)], mine):
        routes = mine.record()
        with watched(mine.engine) as replayed:
            mine.update(routes, loss=with_teacher)
    return {
        "teacher": [torch.equal(each, chosen(by_itself)) for each in seen],
        "replayed what was recorded": torch.equal(mine.tokens(routes), chosen(replayed)),
    }


def switched_off(mine: EngineReplayed, save: Save, other: EngineReplayed) -> dict[str, Any]:
    """Replay is off for this batch while others use the list: nobody reads or writes it."""
    from verl.utils.megatron.router_replay_patch import RouterReplayAction

    theirs = replays_of(other)
    with registry(theirs, mine):
        for replay in theirs:
            replay.set_router_replay_action(RouterReplayAction.RECORD)
            replay.record_indices(torch.zeros(1, 2, dtype=torch.long))
        output = mine.infer(replay=False)
        kept = all(replay.router_replay_action is RouterReplayAction.RECORD for replay in theirs)
        for replay in theirs:
            replay.clear_indices()
            replay.clear_router_replay_action()
    return {"routes": "routed_experts" in output["model_output"], "kept": kept}


class _Gathered(Exception):
    """Instead of a collective in which others may be missing."""


def itself_inside(mine: EngineReplayed, save: Save, other: EngineReplayed) -> dict[str, Any]:
    """The same model is forwarded without replay inside its own loss."""
    ppo, seen = cpu.ppo_loss(), []
    draw_routers(mine.engine, seed=2)
    with watched(mine.engine) as by_itself:
        mine.infer(replay=False)

    def with_itself(*args: Any, **kwargs: Any) -> Any:
        with watched(mine.engine) as inner:
            mine.engine.forward_backward_batch(batch_of(replay=False), None, forward_only=True)
        seen.append(chosen(inner))
        return ppo(*args, **kwargs)

    with registry(replays_of(mine), mine):
        routes = mine.record()
        plain = mine.update(routes)
        nested = mine.update(routes, loss=with_itself)
    return {
        "inner": [torch.equal(each, chosen(by_itself)) for each in seen],
        "gradient": all(torch.equal(plain[name], nested[name]) for name in plain),
    }


def rollout_routes(mine: Replayed, save: Save, other: Replayed | None = None) -> bool:
    """R3: routes of all layers, those without a router included, from a rollout that chose at random.

    A rollout has no route for the last token, and verl 0.9 replays none there.
    """
    generator = torch.Generator().manual_seed(5)
    layers = mine.engine.tf_config.num_layers
    tokens = sum(map(sum, EVEN))
    choice = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(tokens * layers)])
    choice = choice.view(tokens, layers, 2).to(torch.uint8)
    with mine.as_r3(), registry(replays_of(mine), mine), watched(mine.engine) as replayed:
        mine.update(mine.routes_from(choice))
    with_router = [number - 1 for number in sorted(routers_of(mine.engine))]
    last = torch.tensor([sum(lengths) for lengths in EVEN]).cumsum(dim=0) - 1
    kept = torch.ones(tokens, dtype=torch.bool).index_fill(0, last, value=False)
    return torch.equal(chosen(replayed)[kept], choice[kept][:, with_router].long().sort(dim=-1).values)


def dense(mine: Replayed, save: Save, other: Replayed | None = None) -> list[str]:
    """A model without a router, with R2 on: nothing is recorded, and nothing is missing."""
    output = mine.infer(replay=True)
    mine.update(None)
    return sorted(output["model_output"])


class _Vision(torch.nn.Module):
    """A vision model as far as router replay sees it: the language model is one of its parts."""

    def __init__(self, language_model: torch.nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.language_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "decoder":
                raise
            return getattr(super().__getattr__("language_model"), name)


def vision_with_mtp(mine: EngineReplayed, save: Save, other: Replayed | None = None) -> dict[str, Any]:
    """Layers of multi-token prediction have routers of their own, whose layer numbers start at 1 again."""
    from megatron.core.transformer.moe.router import TopKRouter

    wrapper = mine.engine.module[0]
    while hasattr(wrapper.module, "module"):
        wrapper = wrapper.module
    model = wrapper.module
    routers = [(name, module) for name, module in model.named_modules() if isinstance(module, TopKRouter)]
    replays = [router.router_replay for _, router in routers]
    in_mtp = [router.router_replay for name, router in routers if name.startswith("mtp")]
    wrapper.module = _Vision(model)
    try:
        with registry(replays, mine):
            routes = mine.record()
            batch = batch_of(replay=True)
            batch["routed_experts"] = routes
            with mine.engine.train_mode():
                mine.engine.train_batch(batch, loss_function=cpu.ppo_loss())
            return {
                "layers": routes.shape[2],
                "mtp": [(str(replay.router_replay_action), len(replay.replay_backward_list)) for replay in in_mtp],
            }
    finally:
        wrapper.module = model


def gathers(mine: Replayed, save: Save, other: Replayed | None = None) -> list[int]:
    """How many layers each rank brings to the gather; -1 where it does not come, and the others would wait."""
    module = importlib.import_module(mine.gathers_in)

    def instead(routes: Tensor, config: Any) -> Any:
        raise _Gathered(routes.shape[2])

    brought = -1
    with registry(replays_of(mine), mine), mock.patch.object(module, "pp_gather", instead):
        draw_routers(mine.engine, seed=1)
        try:
            mine.infer(replay=True)
        except _Gathered as gathered:
            brought = gathered.args[0]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, brought)
    return everyone


def refused(mine: Replayed, save: Save, other: Replayed) -> dict[str, Any]:
    """Routes that are missing, incomplete or ambiguous: the error of each attempt."""
    with registry(replays_of(mine), mine):
        routes = mine.record()
    routers = list(routers_of(mine.engine).values())

    def changed(change: Callable[[Tensor], Tensor]) -> Tensor:
        if not routes.is_nested:
            return torch.stack([change(row) for row in routes])
        return torch.nested.as_nested_tensor([change(row) for row in routes.unbind()], layout=torch.jagged)

    def duplicate() -> None:
        number, routers[1].layer_number = routers[1].layer_number, routers[0].layer_number
        try:
            mine.record()
        finally:
            routers[1].layer_number = number

    def silent(after: int) -> None:
        replay = routers[0].router_replay
        calls = itertools.count()

        def forgetful(indices: Tensor) -> None:
            if next(calls) < after:
                type(replay).record_indices(replay, indices)

        replay.record_indices = forgetful
        try:
            mine.record()
        finally:
            del replay.record_indices

    def without_replay() -> None:
        replay, routers[1].router_replay = routers[1].router_replay, None
        try:
            mine.update(routes)
        finally:
            routers[1].router_replay = replay

    attempts: dict[str, Callable[[], Any]] = {
        "no routes": lambda: mine.update(None),
        "a layer too few": lambda: mine.update(changed(lambda row: row[:, :-1])),
        "a layer more": lambda: mine.update(changed(lambda row: torch.cat([row, row[:, :1]], dim=1))),
        "another topk": lambda: mine.update(changed(lambda row: row[..., :1])),
        "shorter rows": lambda: mine.update(changed(lambda row: row[:-1])),
        "a layer number twice": duplicate,
        "a router that is not called": lambda: silent(after=0),
        "a router that is called in one micro-batch only": lambda: silent(after=1),
        "a router that was built without replay": without_replay,
        "as recorded": lambda: mine.update(routes),
    }
    answer = {}
    for name, attempt in attempts.items():
        with registry(replays_of(mine), mine):
            try:
                attempt()
                answer[name] = ""
            except Exception as error:
                answer[name] = f"{type(error).__name__}: {error}"
    return answer


def reference(mine: Any, save: Save, other: Replayed | None = None) -> list[str]:
    """What a legacy worker returns for the reference model, which with LoRA is the actor without its adapter."""
    with registry(replays_of(mine), mine):
        return mine.reference_keys()


def not_here_yet(mine: Any, save: Save, other: Replayed | None = None) -> list[str]:
    """The error of a legacy worker that gets something else than rows, with replay on and off."""
    return [mine.error_with(object(), replay) for replay in (True, False)]


SCENES: dict[str, Callable[..., Any]] = {
    scene.__name__: scene
    for scene in (
        alone,
        others_in_front,
        others_only,
        after_an_exception,
        nested,
        itself_inside,
        switched_off,
        rollout_routes,
        dense,
        vision_with_mtp,
        gathers,
        refused,
        reference,
        not_here_yet,
    )
}
WITH_ANOTHER = {"others_in_front", "others_only", "nested", "switched_off"}


def main() -> None:
    """Read the plan from the command line, print one JSON line on rank 0, and save routes and gradients."""
    plan, file = json.loads(sys.argv[1]), sys.argv[2]
    answers: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    with cpu.process_group() as rank:
        before = None
        for name, wanted in plan.items():
            layout = cpu.Layout(**wanted.get("layout", {}))
            if before not in (None, layout):
                forget_layout()
            before = layout
            scenes = wanted.get("scenes", {"alone": ["fixed"]})
            mine = build(wanted)
            other = build(wanted | {"seed": 7}) if WITH_ANOTHER & {*scenes} else None
            answers[name] = {}
            for scene, only in scenes.items():

                def save(what: str, value: Any, key: str = f"{name}/{scene}") -> None:
                    saved[f"{phase()}/{key}/{what}"] = value

                answers[name][scene] = phases(functools.partial(SCENES[scene], mine, save, other=other), only)
        if rank == 0:
            torch.save(saved, file)
            print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
