"""Run the forward step of verl's optional engines without the packages that they are made for.

The torchtitan, automodel and veomni engines import packages that need an accelerator. `optional_packages` answers
those imports with empty stand-ins, so that the engine modules can be imported as they are. `step` then calls the
class's own `forward_step` (for the Megatron family `postprocess_micro_batch_func`, which returns the outputs there) on
an object without a constructor: what surrounds it, reading a batch and post-processing logits, is put on the instance,
and nothing of verl is copied.

Run stock verl by starting the process with VERL_FIXES=0; nothing here imports more of verl_fixes than its demo.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict

from verl_fixes.demo import cpu_platform

OPTIONAL_PACKAGES = ("torchtitan", "nemo_automodel", "veomni")


class _StandInType(type):
    """The type of a stand-in class: an unknown attribute is a stand-in again, as `OptimizersContainer.Config` is."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


def _stand_in(name: str) -> type:
    """Return a class that can be a base class, an annotation or a namespace, and that refuses to be used."""

    def refuse(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{name} belongs to a package that is not installed; a test must not get here")

    return _StandInType(name, (), {"__init__": refuse})


class _StandInModule(ModuleType):
    """A package of which every attribute exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(name)
        setattr(self, name, value)
        return value


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find every module below the given packages; it comes last on sys.meta_path, so an installed package wins."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextlib.contextmanager
def optional_packages(packages: Sequence[str] = OPTIONAL_PACKAGES) -> Iterator[None]:
    """Let verl's engine modules import these packages, those that are missing as stand-ins, while the block runs."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    finder = _StandInFinder(missing)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
            del sys.modules[name]  # a later `find_spec` elsewhere must not believe that the package is there


@dataclass(frozen=True)
class Engine:
    """Where an engine's class is, and which of its methods hands out a micro-batch's outputs."""

    module: str
    name: str
    method: str = "forward_step"


ENGINES = {
    "fsdp": Engine("fsdp", "FSDPEngineWithLMHead"),
    "veomni": Engine("veomni", "VeOmniEngineWithLMHead"),
    "automodel": Engine("automodel", "AutomodelEngineWithLMHead"),
    "torchtitan": Engine("torchtitan", "TorchTitanEngineWithLMHead"),
    "megatron": Engine("megatron", "MegatronEngineWithLMHead", "postprocess_micro_batch_func"),
    "mindspeed": Engine("mindspeed", "MindspeedEngineWithLMHead", "postprocess_micro_batch_func"),
}


def engines() -> list[str]:
    """Return the names of the engines that the installed verl has, in the order of ENGINES; imports nothing."""
    (package,) = importlib.util.find_spec("verl").submodule_search_locations
    folder = Path(package, "workers", "engine")
    return [name for name, engine in ENGINES.items() if (folder / engine.module / "transformer_impl.py").exists()]


def engine_class(name: str) -> type:
    """Import the engine's module, with stand-ins for packages that are missing, and return its class."""
    cpu_platform.arrange()
    engine = ENGINES[name]
    with optional_packages():
        module = importlib.import_module(f"verl.workers.engine.{engine.module}.transformer_impl")
    return getattr(module, engine.name)


def micro_batch(sequences: int = 2, tokens: int = 4) -> TensorDict:
    """Return the little that forward_step itself reads from a micro-batch."""
    ids = [torch.arange(tokens) + row for row in range(sequences)]
    tensors = {"input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged)}
    return TensorDict({**tensors, "num_micro_batch": NonTensorData(1)}, batch_size=[sequences])


class _Model(torch.nn.Module):
    """Two outputs for each token, with weights of ones, behind the keyword interface of a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 2, bias=False)
        torch.nn.init.ones_(self.linear.weight)

    def forward(self, inputs: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        return self.linear(inputs)


def build(name: str, *, nested: bool = False) -> Any:
    """Return the engine's class as an object without a constructor, around a model of one linear layer.

    Its model outputs are `log_probs` (a jagged nested tensor, as in training) and `entropy`; with `nested` also a
    dictionary with a list and a tuple of tensors, which is where a detach that is not recursive fails.
    """
    engine = object.__new__(engine_class(name))
    model = _Model()

    def read_batch(micro_batch: TensorDict) -> torch.Tensor:
        return micro_batch["input_ids"].values().float().unsqueeze(-1)

    def model_output(logits: torch.Tensor, micro_batch: TensorDict) -> dict[str, Any]:
        offsets = micro_batch["input_ids"].offsets()
        outputs: dict[str, Any] = {
            "log_probs": torch.nested.nested_tensor_from_jagged(logits[:, 0].float(), offsets),
            "entropy": torch.nested.nested_tensor_from_jagged(logits[:, 1].float(), offsets),
        }
        if nested:
            outputs["extra"] = {"list": [logits.sum(), torch.ones(())], "tuple": (logits.mean(), "text", None)}
        return outputs

    stand_ins: dict[str, Any] = {"get_data_parallel_group": lambda: None}
    if name == "torchtitan":
        stand_ins |= {
            "prepare_model_inputs": lambda micro_batch: (read_batch(micro_batch), {}, {}, {}),
            "model_forward_step": lambda inputs, extra_inputs, extra_kwargs: model(inputs),
            "prepare_model_outputs": lambda logits, output_args, micro_batch: model_output(logits, micro_batch),
        }
    elif ENGINES[name].method == "postprocess_micro_batch_func":
        stand_ins |= {
            "engine_config": SimpleNamespace(
                dynamic_context_parallel=False, use_remove_padding=True, context_parallel_size=1
            ),
            "tf_config": SimpleNamespace(calculate_per_token_loss=False),
            "prepare_model_outputs": model_output,
            "stand_in_forward": lambda micro_batch: model(read_batch(micro_batch)),
        }
    else:
        stand_ins |= {
            "module": model,
            "prepare_model_inputs": lambda micro_batch: ({"inputs": read_batch(micro_batch)}, {}),
            "prepare_model_outputs": lambda output, output_args, micro_batch, **_: model_output(output, micro_batch),
        }
    vars(engine).update(stand_ins)
    vars(engine)["stand_in_model"] = model
    return engine


def sum_loss(model_output: dict[str, Any], data: TensorDict, dp_group: object = None) -> tuple[torch.Tensor, dict]:
    """A loss whose gradient is known: the sum of the log probabilities."""
    return model_output["log_probs"].values().sum(), {"tokens": data["input_ids"].values().numel()}


def step(name: str, *, nested: bool = False) -> tuple[torch.Tensor, dict[str, Any], torch.nn.Module]:
    """Run the engine's own method on one micro-batch; return its loss, its output and the model (to see gradients)."""
    engine = build(name, nested=nested)
    batch = micro_batch()
    if ENGINES[name].method == "postprocess_micro_batch_func":
        result = engine.postprocess_micro_batch_func(
            engine.stand_in_forward(batch), data=batch, forward_only=False, loss_function=sum_loss
        )
        loss, output = result[0], result[-1]
    else:
        loss, output = engine.forward_step(batch, loss_function=sum_loss, forward_only=False)
    return loss, output, engine.stand_in_model
