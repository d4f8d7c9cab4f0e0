"""An external module of verl (VERL_USE_EXTERNAL_MODULES): a stock TrainingWorker runs on CPU with a tiny engine.

It does not import verl_fixes: whether a worker runs the fixes is what the tests are about.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import wrapt

ROOT = Path(__file__).resolve().parent.parent.parent


def _cpu_platform() -> Any:
    """verl_fixes/demo/cpu_platform.py, loaded by path: importing it by name would import verl_fixes."""
    spec = importlib.util.spec_from_file_location("cpu_platform", ROOT / "verl_fixes" / "demo" / "cpu_platform.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@wrapt.when_imported("verl.utils.distributed")
def _gloo(module: Any) -> None:
    initialize = module.initialize_global_process_group_ray
    module.initialize_global_process_group_ray = functools.partial(initialize, backend="gloo")


@wrapt.when_imported("verl.workers.engine.base")
def _register(module: Any) -> None:
    @module.EngineRegistry.register(model_type="tiny", backend="tiny", device="cpu")
    class TinyEngine(module.BaseEngine):  # type: ignore[misc, name-defined]
        """Reports tensors, as Megatron's optimizer does, and what its process knows of verl-fixes."""

        def __init__(self, **config: Any) -> None:
            pass

        def initialize(self) -> None:
            pass

        is_param_offload_enabled = is_optimizer_offload_enabled = False

        def train_mode(self, **kwargs: Any) -> Any:
            return contextlib.nullcontext()

        eval_mode = train_mode

        def train_batch(self, data: Any, loss_function: Any) -> Any:
            metrics = {"grad_norm": torch.tensor([0.25]), "loss_function": loss_function(), "process": describe()}
            return {"model_output": {}, "loss": [1.0], "metrics": metrics}

        def get_data_parallel_rank(self) -> int:
            return 0

        def get_data_parallel_size(self) -> int:
            return 1

        def get_data_parallel_group(self) -> Any:
            return torch.distributed.group.WORLD

        def is_mp_src_rank_with_outputs(self) -> bool:
            return True


class TinyModel(dict):  # type: ignore[type-arg]
    """What a TrainingWorker reads of a model config."""

    use_remove_padding = use_fused_kernels = False

    def __init__(self) -> None:
        super().__init__(use_remove_padding=False, use_fused_kernels=False)

    @property
    def hf_config(self) -> Any:
        return SimpleNamespace(model_type="qwen2")


def describe() -> dict[str, Any]:
    """This process, as far as fixes are concerned; without importing verl_fixes."""
    package = sys.modules.get("verl_fixes")
    states = {} if package is None else {record.name: str(record.state) for record in package.status()}
    names = ("VERL_USE_EXTERNAL_MODULES", "MINE", "VERL_FIXES", "VERL_FIXES_DRIVER")
    environment = {name: os.environ.get(name) for name in names}
    said = [] if package is None else sorted(sys.modules["verl_fixes.stderr"]._said)
    return {"states": states, "environment": environment, "pid": os.getpid(), "said": said}


class _NotInstalled:
    """Ray gives the driver's sys.path to every worker on this machine; here the package is not to be found anyway."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "verl_fixes":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if "NODE_WITHOUT_VERL_FIXES" in os.environ:
    sys.meta_path.insert(0, _NotInstalled())  # type: ignore[arg-type]
_cpu_platform().arrange()
