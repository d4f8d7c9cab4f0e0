"""Every Ray worker that this process starts runs the same fixes.

What goes wrong: verl forwards none of the variables that decide which fixes a worker runs. On a cluster that is
running already, workers run stock code while the driver reports its fixes as applied.

What the wrappers do: they add the driver's decisions to the ``env_vars`` of the job (``get_ppo_ray_runtime_env``), of
every actor, and of verl's remote functions. Existing values stay; the list in VERL_USE_EXTERNAL_MODULES is extended;
``worker_process_setup_hook`` belongs to the user and is not touched. A worker on a node without this package fails,
and the error that ``ray.get`` raises says what to install where.

When it can go: when verl forwards VERL_USE_EXTERNAL_MODULES and the switches of its plugins by itself.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from verl_fixes import propagation
from verl_fixes.errors import InstallError
from verl_fixes.patch import Patch, Target
from verl_fixes.stderr import say


def extend_job(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``get_ppo_ray_runtime_env``, what verl's trainers give to ``ray.init``."""
    return propagation.extend_runtime_env(original(*args, **kwargs), propagation.environment_of_this_process())


def extend_actor(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    """Around ``ActorClass._remote(args, kwargs, **options)``, through which every actor is created."""
    additions = propagation.environment_of_this_process()
    if additions:
        options["runtime_env"] = _extended(options, additions)
    return original(self, *args, **options)


def _extended(options: Mapping[str, Any], additions: Mapping[str, str]) -> Any:
    """The runtime environment of a call, with ours added."""
    import ray
    from ray.runtime_env import RuntimeEnv

    given = options.get("runtime_env")  # the decorator's is in there already, unless the call took it away
    job = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    extended = propagation.extend_runtime_env(given, additions, job.get("env_vars"))
    return RuntimeEnv(**extended) if type(extended) is dict else extended


def _serialized(runtime_env: Any) -> str:
    from ray.remote_function import get_runtime_env_info

    info: str = get_runtime_env_info(runtime_env, is_job_runtime_env=False, serialize=True)
    return info


def _home(function: Any) -> str:
    """The module that defines a function, also where ``python -m`` calls it ``__main__``."""
    module = getattr(function, "__module__", None) or ""
    spec = getattr(sys.modules["__main__"], "__spec__", None) if module == "__main__" else None
    return module if spec is None else str(spec.name)


def extend_task(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    """Around ``RemoteFunction._remote``: remote functions that verl defines."""
    if _home(self._function).partition(".")[0] == "verl":
        additions = propagation.environment_of_this_process()
        if additions:
            options["runtime_env"] = extended = _extended(options, additions)
            options["serialized_runtime_env_info"] = _serialized(extended)  # what came was made without ours
    return original(self, *args, **options)


def explain_missing_package(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around what ``ray.get`` calls: an error of a node without this package says what to install where.

    Not around ``ray.get`` itself: functions of the user that refer to it would be pickled together with our wrapper.
    """
    try:
        return original(*args, **kwargs)
    except Exception as error:
        with contextlib.suppress(Exception):  # a diagnosis must not take the place of what it is about
            if message := propagation.missing_package(error):
                say(message)
                if hasattr(error, "add_note"):
                    error.add_note(f"verl-fixes: {message}")
        raise


def _check_actor_class(module: ModuleType) -> None:
    _check(module.ActorClass._remote, "actor_options")


def _check_remote_function(module: ModuleType) -> None:
    _check(module.RemoteFunction._remote, "task_options")
    takes = inspect.signature(module.RemoteFunction._remote).parameters
    if "serialized_runtime_env_info" not in takes or not hasattr(module, "get_runtime_env_info"):
        raise InstallError("it does not take serialized_runtime_env_info as made by get_runtime_env_info")


def _check(function: Callable[..., Any], options: str) -> None:
    kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
    if kinds.get(options) is not inspect.Parameter.VAR_KEYWORD:
        raise InstallError(f"its options are not **{options}")


PATCH = Patch(
    name="ray-propagation",
    title="Ray workers run the same fixes as the driver",
    hurts=(
        "verl forwards none of the variables that decide which fixes a worker runs. On a Ray cluster that is running "
        "already, and with verl up to 0.8.0 on every cluster but one that the driver starts itself, workers run stock "
        "code while the driver reports its fixes as applied."
    ),
    does=(
        "Adds the driver's decisions to the env_vars of the job, of every actor and of verl's remote functions. "
        "Existing values stay, the list in VERL_USE_EXTERNAL_MODULES is extended, worker_process_setup_hook is not "
        "touched. A worker whose fixes differ from the driver's says so. With VERL_FIXES=0 it forwards only that. A "
        "VERL_USE_EXTERNAL_PLUGINS without verl_fixes is respected."
    ),
    removable="When verl forwards VERL_USE_EXTERNAL_MODULES and the switches of its plugins by itself.",
    upstream=("https://docs.ray.io/en/latest/ray-core/handling-dependencies.html#inheritance",),
    fixed_in="none yet",
    targets=(
        Target(
            module="verl.trainer.constants_ppo",
            qualname="get_ppo_ray_runtime_env",
            wrapper=extend_job,
            question=None,
        ),
        Target(
            module="ray.actor",
            qualname="ActorClass._remote",
            wrapper=extend_actor,
            question=None,
            on_install=_check_actor_class,
        ),
        Target(
            module="ray.remote_function",
            qualname="RemoteFunction._remote",
            wrapper=extend_task,
            question=None,
            on_install=_check_remote_function,
        ),
        Target(
            module="ray._private.worker",
            qualname="Worker.get_objects",
            wrapper=explain_missing_package,
            question=None,
        ),
    ),
    atomic=False,
    plumbing=True,
    always=True,  # somebody has to tell the workers that everything is off
)
