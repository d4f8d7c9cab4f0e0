"""Make verl take this machine for a CPU machine, whatever hardware it has.

verl trains on accelerators only. Its engines use few device functions, though, and torch.cpu lacks some of them:
memory statistics, random states and seeds. This module supplies those and tells verl that the device is "cpu":

- verl 0.8.0 and earlier answer "cpu" by themselves once no CUDA device is visible;
- verl 0.9.0 and later have a platform layer, where a CPU platform is registered the way verl documents it.

Nothing here is specific to an engine, and nothing here imports verl_fixes: what runs stays stock.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

PLATFORM = "cpu"

# What verl calls on its device module and torch.cpu does not have.
_MISSING: dict[str, Any] = {
    "empty_cache": lambda: None,
    "get_device_name": lambda device=None: "cpu",
    "get_rng_state": lambda device=None: torch.random.get_rng_state(),
    "ipc_collect": lambda: None,
    "manual_seed": torch.random.manual_seed,
    "manual_seed_all": torch.random.manual_seed,
    "max_memory_allocated": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "mem_get_info": lambda device=None: (0, 0),
    "memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda device=None: None,
    "set_rng_state": lambda state, device=None: torch.random.set_rng_state(state),
}


def arrange() -> None:
    """Arrange the process once; call it before the first import of a verl engine. Calling it again does nothing."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when CUDA is first initialised, and inherited by child processes
    if torch.cuda.is_available():
        raise RuntimeError("CUDA is in use in this process already: arrange the CPU platform first")
    for name, function in _MISSING.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)
    import verl  # noqa: F401  (the spec of a submodule imports its parent anyway)

    if importlib.util.find_spec("verl.plugin") and importlib.util.find_spec("verl.plugin.platform"):
        _register_platform()


def _register_platform() -> None:
    """Register a CPU platform with verl 0.9.0 or later and select it."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_base import PlatformBase

    os.environ["VERL_PLATFORM"] = PLATFORM
    if platform_manager.PlatformRegistry.get(PLATFORM) is None:

        @platform_manager.PlatformRegistry.register(platform=PLATFORM)
        class PlatformCPU(PlatformBase):
            """The host's processors as the one device; what only an accelerator has does nothing."""

            device_name = "cpu"
            vendor_name = "cpu"

            @property
            def device_module(self) -> ModuleType:
                return torch.cpu

            def is_available(self) -> bool:
                return True

            def is_platform_available(self, use_smi_check: bool = False) -> bool:
                return False  # never chosen by detection, only by VERL_PLATFORM

            def current_device(self) -> str:
                return torch.cpu.current_device()  # "cpu", which is what Tensor.to wants

            def device_count(self) -> int:
                return 1

            def set_device(self, device_index: int) -> None:
                pass

            def synchronize(self, device_index: int | None = None) -> None:
                pass

            def manual_seed(self, seed: int) -> None:
                torch.random.manual_seed(seed)

            def manual_seed_all(self, seed: int) -> None:
                torch.random.manual_seed(seed)

            def set_allocator_settings(self, settings: str) -> None:
                pass

            def empty_cache(self) -> None:
                pass

            def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
                return None, None

            def communication_backend_name(self) -> str:
                return "gloo"

            def visible_devices_envvar(self) -> str:
                return "CUDA_VISIBLE_DEVICES"

            @contextlib.contextmanager
            def nvtx_range(self, msg: str) -> Iterator[None]:
                yield

            def profiler_start(self) -> None:
                pass

            def profiler_stop(self) -> None:
                pass

            def ray_resource_name(self) -> str:
                return "CPU"

            def ray_noset_envvars(self) -> list[str]:
                return []

            def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
                return {}

            def is_ipc_supported(self) -> bool:
                return False

            def cudart(self) -> None:
                return None

    if platform_manager.get_platform().device_name != "cpu":  # somebody asked before we registered
        platform_manager.set_platform(platform_manager.PlatformRegistry.get(PLATFORM)())
