"""What a CPU needs to pass for a GPU: arranges torch, megatron-core and verl in this process.

Transformer Engine's modules are the ones of :mod:`verl_fixes.demo.cpu_attention`; everything computes in fp32.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from verl_fixes.demo import cpu_platform


@functools.cache
def arrange() -> None:
    """Arrange this process so that verl, mbridge and megatron-core run on CPU. Once, before verl's engine is imported.

    It lasts as long as the process and changes torch for all of it: do not call it where a GPU is to be used.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core insists under sequence parallelism
    torch.set_num_threads(1)
    _arrange_torch()
    _arrange_megatron()
    _arrange_verl()


class CudaMeansCpu(TorchFunctionMode):
    """While active, every cuda device given to torch is the CPU, and no memory is pinned."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # the optimizers choose between fp32 and half-precision parameters by this name
            return func(*args).replace("torch.", "torch.cuda.")
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        args = tuple(_as_cpu(value) for value in args)
        return func(*args, **{name: _as_cpu(value) for name, value in kwargs.items()})


def _as_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if value == "cuda" or value.startswith("cuda:") else value
    return value


def _arrange_torch() -> None:
    """A torch.cuda that answers, with nothing behind it, and no compiler."""
    import torch._dynamo  # it looks up functions of torch.cuda: let it see the real ones

    class Nothing:
        """A stream or an event: whatever is asked of it has already happened."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record_event(self, event: Any = None) -> Any:
            return event or Nothing()

        def __getattr__(self, name: str) -> Callable[..., None]:
            return do_nothing

    def do_nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    def itself(value: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    stand_ins: dict[str, Any] = {
        "is_available": lambda: False,
        "current_device": lambda: torch.device("cpu"),
        "get_device_name": lambda *args: "cpu",
        "get_device_capability": lambda *args: (0, 0),
        "get_device_properties": lambda *args: SimpleNamespace(name="cpu", total_memory=0, multi_processor_count=1),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "mem_get_info": lambda *args: (0, 0),
        "memory_stats": lambda *args: {},
        "stream": lambda *args: contextlib.nullcontext(),
        "Stream": Nothing,
        "Event": Nothing,
        "current_stream": Nothing,
        "default_stream": Nothing,
    }
    for name in ("set_device", "set_rng_state", "manual_seed", "manual_seed_all", "synchronize", "empty_cache",
                 "ipc_collect", "reset_peak_memory_stats"):  # fmt: skip
        stand_ins[name] = do_nothing
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        stand_ins[name] = zero
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = do_nothing

    torch.compile = lambda model=None, **kwargs: itself if model is None else model
    Tensor.cuda = Tensor.pin_memory = itself
    Tensor.record_stream = do_nothing
    torch.nn.Module.cuda = itself
    CudaMeansCpu().__enter__()


def _arrange_megatron() -> None:
    """Local modules for Transformer Engine's, no CUDA random states."""
    with _triton_to_import():
        import megatron.core  # noqa: F401
    import mbridge.core.llm_bridge
    import megatron.core.tensor_parallel.random as random_states
    from mbridge.core.util import ModelType
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.moe import moe_utils

    from verl_fixes.demo.cpu_attention import CpuAttention, CpuRMSNorm

    LocalSpecProvider.core_attention = lambda self: CpuAttention
    LocalSpecProvider.layer_norm = lambda *args, **kwargs: CpuRMSNorm

    @functools.wraps(get_gpt_decoder_block_spec)  # mbridge asks for its signature
    def local_block_spec(config: Any, use_transformer_engine: bool, **kwargs: Any) -> Any:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **kwargs)
        spec.layer_norm = CpuRMSNorm
        return spec

    # bound early by name, hence replaced where it is used
    mbridge.core.llm_bridge.get_gpt_decoder_block_spec = local_block_spec

    bridge = mbridge.core.llm_bridge.LLMBridge
    model_arguments = bridge._get_gptmodel_args

    def with_mtp(self: Any) -> dict[str, Any]:
        arguments = model_arguments(self)
        if self.config.mtp_num_layers:
            # mbridge builds MTP for a few architectures, always from Transformer Engine's modules
            decoder = local_block_spec(self.config, use_transformer_engine=False)
            arguments["mtp_block_spec"] = get_gpt_mtp_block_spec(self.config, decoder, use_transformer_engine=False)
        return arguments

    bridge._get_gptmodel_args = with_mtp

    # dropout is 0 everywhere, so that random states decide nothing
    random_states.CudaRNGStatesTracker.add = lambda self, name, seed: None
    random_states.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    random_states._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random_states._set_cuda_rng_state = lambda *args, **kwargs: None

    moe_utils.te_general_gemm = None

    if not hasattr(ModelType, "encoder_and_decoder"):  # gone in 0.17, and mbridge compares with it
        ModelType.encoder_and_decoder = None


@contextlib.contextmanager
def _triton_to_import() -> Iterator[None]:
    """As much of triton, a package of 290 MB, as importing megatron-core needs since 0.18; no kernel runs on CPU.

    Gone afterwards, so that nobody else takes it for the real one.
    """
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    triton: Any = ModuleType("triton")
    triton.language = ModuleType("triton.language")
    triton.jit = lambda kernel: kernel
    triton.__version__ = "0"  # too old for what is optional
    triton.language.__getattr__ = lambda name: None  # types, in annotations
    stand_ins = {module.__name__: module for module in (triton, triton.language)}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _arrange_verl() -> None:
    """verl's device is the CPU, and it removes padding without flash-attn."""
    cpu_platform.arrange()
    from verl.utils import attention_utils, npu_flash_attn_utils

    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    pure_torch = tuple(getattr(npu_flash_attn_utils, name) for name in names)
    attention_utils._get_attention_functions = lambda: pure_torch
