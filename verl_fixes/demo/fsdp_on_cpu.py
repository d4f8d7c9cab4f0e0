"""Train a tiny model with stock verl's own FSDP2 engine on a CPU, and measure what its micro-batch loop keeps alive.

The engine, the loss functions, the micro-batch loop and the optimizer step are those of the installed verl, 0.7.0 to
0.9.1. This module only writes a tiny Qwen2 to a temporary folder, fills in the configuration, and arranges what a CPU
needs (see `arrange`). It does not import verl_fixes: whether the fixes are active is the caller's decision.

    python -m verl_fixes.demo.fsdp_on_cpu --micro-batches 1 8 32            # stock
    python -m verl_fixes.demo.fsdp_on_cpu --micro-batches 1 8 32 --fixes    # with the fixes

Both print one JSON line with the bytes that the loop held at its end, beyond the outputs that verl asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from verl_fixes.demo import cpu_platform

VOCABULARY = 256
Loss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


@functools.cache
def arrange() -> None:
    """Arrange this process so that verl's FSDP2 engine runs on the CPU; calling it again does nothing."""
    cpu_platform.arrange()
    import verl.utils.attention_utils as attention
    from verl.utils import npu_flash_attn_utils as plain_torch

    functions = (
        plain_torch.index_first_axis,
        plain_torch.pad_input,
        plain_torch.rearrange,
        plain_torch.unpad_input,
    )
    attention._get_attention_functions = lambda: functions  # flash-attn has no CPU build; these are the same in torch

    from verl.workers.engine.base import EngineRegistry

    transformer_impl = _engine_module()
    for model_type, name in (
        ("language_model", "FSDPEngineWithLMHead"),
        ("value_model", "FSDPEngineWithValueHead"),
    ):
        EngineRegistry.register(model_type=model_type, backend="fsdp2", device="cpu")(getattr(transformer_impl, name))
    _process_group()


def _engine_module() -> ModuleType:
    from verl.workers.engine.fsdp import transformer_impl

    return transformer_impl


def _process_group() -> None:
    """Join a gloo process group of this one process, unless the process belongs to a group already."""
    if torch.distributed.is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


def _write_model(folder: Path, *, layers: int, hidden: int, value_head: bool, seed: int) -> None:
    """Write a randomly initialised Qwen2 (configuration and weights) that from_pretrained can load."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        num_labels=1,
        classifier_dropout=0.0,
    )
    architecture = Qwen2ForTokenClassification if value_head else Qwen2ForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        architecture(config).save_pretrained(folder)


def build_engine(
    *,
    layers: int = 2,
    hidden: int = 64,
    gradient_checkpointing: bool = True,
    lora: bool = False,
    value_head: bool = False,
    seed: int = 0,
    learning_rate: float = 1e-3,
) -> Any:
    """Return an initialised FSDP2 engine of the installed verl around a tiny Qwen2, the same one for the same seed.

    Up to verl 0.7.1 the engine runs the model under a bfloat16 autocast whatever the configuration says; later
    releases compute in float32 here.
    """
    arrange()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    folder = Path(tempfile.mkdtemp(prefix="tiny-qwen2-"))
    try:
        _write_model(folder, layers=layers, hidden=hidden, value_head=value_head, seed=seed)
        model_type = "value_model" if value_head else "language_model"
        model_config = HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=gradient_checkpointing,
            use_remove_padding=True,
            lora_rank=4 if lora else 0,
        )
        model_config.model_type = model_type  # TrainingWorker sets it in the same way
        engine_config = FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
            infer_micro_batch_size_per_gpu=1,
        )
        torch.manual_seed(seed)  # LoRA and the value head initialise their weights while the engine is built
        engine = EngineRegistry.new(
            model_type=model_type,
            backend="fsdp2",
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=FSDPOptimizerConfig(lr=learning_rate, total_training_steps=100),
            checkpoint_config=CheckpointConfig(),
        )
        with _quiet(), _value_model_without_flash_attention():
            engine.initialize()
    finally:
        shutil.rmtree(folder)
    return engine


@contextlib.contextmanager
def _value_model_without_flash_attention() -> Iterator[None]:
    """Load a value model with sdpa: `load_valuehead_model` (0.8.0 and later) names flash attention itself."""
    from transformers import AutoModelForTokenClassification

    original = AutoModelForTokenClassification.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "attn_implementation": "sdpa"})

    with mock.patch.object(AutoModelForTokenClassification, "from_pretrained", from_pretrained):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send what verl prints to stderr, so that stdout stays one JSON line."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def make_batch(
    sequences: int,
    tokens_per_sequence: int | Sequence[int],
    micro_batch_size: int,
    *,
    kind: str = "ppo",
    entropy: bool = True,
    max_tokens: int | None = None,
    return_outputs: bool = False,
    seed: int = 1,
) -> TensorDict:
    """Return a random batch in the form that the engine takes: nested tensors without padding.

    Half of every sequence is its response. `kind` is "ppo", "value" or "sft". With `max_tokens` the micro-batches are
    balanced by tokens (verl's dynamic batch size), otherwise they have `micro_batch_size` sequences each.

    Up to 0.8.0 the loop always keeps the model outputs of all micro-batches. From 0.9.0 on the FSDP engine drops them
    while training, unless the batch says `return_model_output`, as the Tinker worker does and `return_outputs` here.
    """
    arrange()
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    lengths = [tokens_per_sequence] * sequences if isinstance(tokens_per_sequence, int) else list(tokens_per_sequence)
    if len(lengths) != sequences or min(lengths) < 2:
        raise ValueError(f"need {sequences} lengths of at least 2 tokens, got {lengths}")
    responses = [length // 2 for length in lengths]
    prompts = [length - response for length, response in zip(lengths, responses, strict=True)]
    width, response_width = max(prompts), max(responses)
    random = torch.Generator().manual_seed(seed)

    column = torch.arange(width + response_width)
    first, last = width - torch.tensor(prompts)[:, None], width + torch.tensor(responses)[:, None]
    attention_mask = ((column >= first) & (column < last)).long()  # prompts end, and responses begin, at `width`
    input_ids = torch.randint(3, VOCABULARY, attention_mask.shape, generator=random) * attention_mask
    response_mask = attention_mask[:, width:]

    def noise() -> torch.Tensor:
        return torch.randn(response_mask.shape, generator=random) * response_mask

    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "prompts": input_ids[:, :width],
        "responses": input_ids[:, width:],
        "response_mask": response_mask,
    }
    if kind == "ppo":
        tensors |= {"old_log_probs": -5.5 + 0.05 * noise(), "advantages": noise()}
    elif kind == "value":
        tensors |= {"values": noise(), "returns": noise()}
    elif kind != "sft":
        raise ValueError(f"kind is ppo, value or sft, not {kind!r}")
    batching = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": micro_batch_size}
    if max_tokens is not None:
        batching = {"use_dynamic_bsz": True, "max_token_len_per_gpu": max_tokens}
    batch = tu.get_tensordict(tensors)
    tu.assign_non_tensor(
        batch,
        temperature=1.0,
        global_batch_size=sequences,
        calculate_entropy=entropy,
        compute_loss=True,
        use_remove_padding=True,
        return_model_output=return_outputs,
        **batching,
    )
    batch = left_right_2_no_padding(batch)
    if kind == "sft":  # this loss wants its mask over whole sequences
        masks = [torch.cat([torch.zeros(p), torch.ones(r)]) for p, r in zip(prompts, responses, strict=True)]
        batch["loss_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    return batch


def ppo_loss(*, entropy_coeff: float = 0.01, loss_agg_mode: str = "token-mean") -> Loss:
    """Return verl's own PPO loss with a tiny actor configuration bound to it."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils import losses

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        entropy_coeff=entropy_coeff,
        loss_agg_mode=loss_agg_mode,
    )
    return functools.partial(losses.ppo_loss, config)


def value_loss() -> Loss:
    """Return verl's own value loss with a tiny critic configuration bound to it."""
    from verl.workers.config import FSDPCriticConfig
    from verl.workers.utils import losses

    names = {field.name for field in dataclasses.fields(FSDPCriticConfig)}
    unused_model = {"model_config": SimpleNamespace()} if "model_config" in names else {}
    config = FSDPCriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, **unused_model)
    return functools.partial(losses.value_loss, config)


def sft_loss() -> Loss:
    """Return verl's own loss for supervised fine-tuning; it reads nothing from its configuration."""
    from verl.workers.utils import losses

    return functools.partial(losses.sft_loss, None)


def train_step(engine: Any, batch: TensorDict, loss: Loss) -> dict[str, Any]:
    """Run the engine's train_batch (all micro-batches, then the optimizer) on a copy of the batch."""
    with engine.train_mode():
        return engine.train_batch(batch.clone(recurse=False), loss_function=loss)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple | set):
        for value in tree:
            yield from _tensors(value)


def attached_outputs(output: Any) -> int:
    """Count the tensors under `model_output`, at any depth, that are attached to an autograd graph.

    `output` is what forward_step or train_batch returns, or the list of such outputs that the micro-batch loop keeps.
    """
    outputs = output if isinstance(output, list | tuple) else [output]
    return sum(tensor.requires_grad for one in outputs for tensor in _tensors(one.get("model_output", {})))


def graph_nodes(tree: Any) -> int:
    """Count the autograd nodes that the tensors of `tree` keep alive."""
    todo = [tensor.grad_fn for tensor in _tensors(tree) if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
    return len(seen)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the ordinary tensors that a DTensor or a nested tensor is made of, or the tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            for part in _tensors(getattr(tensor, name)):  # a DTensor also names its mesh
                yield from _plain(part)
    else:
        yield tensor


def _storages(tree: Any) -> dict[int, StorageWeakRef]:
    """Refer weakly to the storages under all tensors of `tree`; a reference keeps its key from being used again."""
    references = (StorageWeakRef(part.untyped_storage()) for tensor in _tensors(tree) for part in _plain(tensor))
    return {reference.cdata: reference for reference in references}


class _Allocations(TorchDispatchMode):
    """Remember, without keeping them alive, the storages that operations allocate while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.new: dict[int, StorageWeakRef] = {}
        self.old: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What an operation takes without any operation having returned it was there before; its result may be a view.
        self.old |= {key: storage for key, storage in _storages([args, kwargs]).items() if key not in self.new}
        result = func(*args, **kwargs)
        self.new |= {key: storage for key, storage in _storages(result).items() if key not in self.old}
        return result

    def live_bytes(self, excluded: dict[int, StorageWeakRef]) -> int:
        """Sum the present sizes of the new storages that somebody still holds, but not of those in `excluded`."""
        kept = [reference for key, reference in self.new.items() if key not in excluded and not reference.expired()]
        storages = (torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in kept)
        return sum(storage.nbytes() for storage in storages if storage is not None)


class HeldGraphs:
    """Measure what is still alive when the engine's micro-batch loop has ended and nothing has read its outputs yet.

        with HeldGraphs(engine) as held:
            train_step(engine, batch, loss)
        held.bytes, held.tensors, held.nodes

    `bytes` counts every storage that was allocated inside the loop and that anybody still holds at its end, Python or
    the autograd graph, except the model's parameters and gradients, the micro-batches, and the values of the outputs:
    what remains is what the graphs hold. One graph, that of the last micro-batch, is always alive at that moment, as
    the loop's own variable `loss` refers to it. `tensors` counts the graph-attached tensors among the model outputs,
    `nodes` the autograd nodes that they keep alive.

    It works by standing around two functions that the loop calls before and after its work; both are put back at exit.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.bytes = self.tensors = self.nodes = self.micro_batches = 0
        self._allocations = _Allocations()
        self._loop = contextlib.ExitStack()

    def __enter__(self) -> HeldGraphs:
        module = _engine_module()
        before, after = vars(module)["prepare_micro_batches"], vars(module)["postprocess_batch_func"]

        @functools.wraps(before)
        def prepare_micro_batches(*args: Any, **kwargs: Any) -> Any:
            prepared = before(*args, **kwargs)
            self._loop.enter_context(self._allocations)
            return prepared

        @functools.wraps(after)
        def postprocess_batch_func(output_lst: Any, *args: Any, **kwargs: Any) -> Any:
            self._loop.close()
            self._measure(output_lst)
            return after(output_lst, *args, **kwargs)

        replaced: dict[str, Any] = {
            "prepare_micro_batches": prepare_micro_batches,
            "postprocess_batch_func": postprocess_batch_func,
        }
        self._standing_around = mock.patch.multiple(module, **replaced)
        self._standing_around.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.close()  # still open if the loop raised
        self._standing_around.stop()

    def _measure(self, outputs: list[dict[str, Any]]) -> None:
        parameters = list(self.engine.module.parameters())
        self.bytes = self._allocations.live_bytes(_storages([parameters, [p.grad for p in parameters], outputs]))
        self.tensors = attached_outputs(outputs)
        self.nodes = graph_nodes(outputs)
        self.micro_batches = len(outputs)


def training_worker(engine: Any = None) -> Any:
    """Return verl's TrainingWorker, without Ray and without its constructor, whose `_postprocess_output` runs here.

    Without an engine it gets a stand-in that only knows its data-parallel group, the one gloo process.
    """
    arrange()
    from verl.workers.engine_workers import TrainingWorker

    worker = object.__new__(TrainingWorker)
    group = torch.distributed.group.WORLD
    worker.engine = engine if engine is not None else SimpleNamespace(get_data_parallel_group=lambda: group)
    worker.device_name = "cpu"
    worker.flops_counter = None
    return worker


def postprocess(worker: Any, metrics: dict[str, Any], losses: Sequence[float] = (1.0,)) -> dict[str, Any]:
    """Run the worker's own `_postprocess_output` on these metrics and return the metrics that it reports."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import TrainingWorker

    arguments = {"global_token_num": None, "delta_time": 1.0, "forward_only": False, "images_seqlens": None}
    known = inspect.signature(TrainingWorker._postprocess_output).parameters  # 0.7.0 has no images_seqlens
    output = {"metrics": dict(metrics), "loss": list(losses), "model_output": {}}
    result = worker._postprocess_output(output, **{k: v for k, v in arguments.items() if k in known})
    return tu.get(result, "metrics")


def measure(
    micro_batches: Sequence[int], *, tokens: int = 128, lora: bool = True, gradient_checkpointing: bool = True
) -> dict[str, Any]:
    """Train one step for each count of micro-batches of one sequence and return what each loop held."""
    import verl

    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
    engine = build_engine(lora=lora, gradient_checkpointing=gradient_checkpointing)
    make = functools.partial(make_batch, tokens_per_sequence=tokens, micro_batch_size=1, return_outputs=True)
    loss, rows = ppo_loss(), []
    train_step(engine, make(1), loss)  # the first step also allocates gradients and optimizer state
    for count in micro_batches:
        started = time.perf_counter()
        with HeldGraphs(engine) as held:
            output = train_step(engine, make(count), loss)
        rows.append(
            {
                "micro_batches": held.micro_batches,
                "bytes": held.bytes,
                "attached_tensors": held.tensors,
                "graph_nodes": held.nodes,
                "grad_norm": float(output["metrics"]["grad_norm"]),
                "seconds": round(time.perf_counter() - started, 2),
            }
        )
    return {"verl": verl.__version__, "lora": lora, "tokens_per_micro_batch": tokens, "held": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m verl_fixes.demo.fsdp_on_cpu", description=__doc__.split("\n")[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a micro-batch (default: 128)")
    parser.add_argument("--no-lora", action="store_true", help="train all weights instead of a LoRA adapter")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    parser.add_argument("--fixes", action="store_true", help="with verl-fixes; without it, VERL_FIXES=0 is set")
    options = parser.parse_args(arguments)
    if options.fixes:
        if os.environ.get("VERL_FIXES") == "0":
            parser.error("--fixes was given, but VERL_FIXES=0 is set in the environment, which wins")
        import verl_fixes  # noqa: F401  (importing it activates it)
    elif os.environ.get("VERL_FIXES") != "0":  # `-m` has imported the package already: start over without it
        os.environ["VERL_FIXES"] = "0"
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)
    result = measure(
        options.micro_batches,
        tokens=options.tokens,
        lora=not options.no_lora,
        gradient_checkpointing=not options.no_checkpointing,
    )
    print(json.dumps({**result, "fixes": options.fixes}))


if __name__ == "__main__":
    main()
