"""What only a process shows that has imported verl: names that were bound early, and what Ray makes of our classes."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

from verl_fixes import probe, wrapping
from verl_fixes.catalog import CATALOG
from verl_fixes.doctor.findings import Finding, error, info, ok
from verl_fixes.patch import Wrapper

_OURS = "Report this at the issue tracker of verl-fixes, with the output of `verl-fixes doctor --json`."


def import_targets() -> list[Finding]:
    """Import every module of verl that a patch targets, as a run does. stdout is left to the report."""
    check = "imports"
    source = probe.locate("verl")
    if source is None:
        return []
    names = dict.fromkeys(target.module for patch in CATALOG for target in patch.targets)
    if reason := _import("verl"):
        return [
            error(check, f"verl cannot be imported: {reason}", 'Run `python -c "import verl"`, repair what it says.')
        ]
    failed: dict[str, list[str]] = {}
    for name in (name for name in names if name.startswith("verl.") and source.file(name)):
        if reason := _import(name):
            failed.setdefault(reason, []).append(name)
    return [
        info(check, f"not checked: {', '.join(modules)} cannot be imported here: {reason}")
        for reason, modules in failed.items()
    ]


def _import(name: str) -> str:
    """Why a module cannot be imported, in words; empty when it can."""
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except (Exception, SystemExit) as reason:
        first_line = (str(reason).strip().splitlines() or [""])[0]
        return f"{type(reason).__name__}: {first_line}"
    return ""


def registered_platforms() -> frozenset[str] | None:
    """The platforms that verl knows in this process, those of plugins included; None when it was not imported."""
    manager = sys.modules.get("verl.plugin.platform.platform_manager")
    if manager is None or "verl" not in sys.modules:
        return None
    return frozenset(manager.PlatformRegistry.registered_names())


def detected_platform() -> tuple[str | None, str]:
    """The platform that verl runs on in this process, by the name it is registered with; None where there is none.

    The second value says why verl cannot make one, empty where it can or was not imported.
    """
    manager = sys.modules.get("verl.plugin.platform.platform_manager")
    if manager is None or "verl" not in sys.modules:
        return None, ""
    try:
        platform = manager.get_platform()
    except Exception as reason:
        return None, f"{type(reason).__name__}: {reason}"
    registry = manager.PlatformRegistry
    names = (name for name in registry.registered_names() if registry.get(name) is type(platform))
    return str(next(names, platform.vendor_name)), ""


def forwarded_to_workers() -> dict[str, str] | str | None:
    """The environment that ``main_ppo`` would give to its workers now, or why verl does not say; None: not imported."""
    if "verl" not in sys.modules:
        return None
    if reason := _import("verl.trainer.constants_ppo"):
        return reason
    try:
        environment = sys.modules["verl.trainer.constants_ppo"].get_ppo_ray_runtime_env()
        return {name: str(value) for name, value in environment["env_vars"].items()}
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}"


def early_bound() -> list[Finding]:
    """Names that ``from x import f`` or an assignment bound before we came, and that nobody rebound."""
    check = "early-bound names"
    if not any(name.startswith("verl.") for name in sys.modules):
        return [info(check, "not checked: verl was not imported here")]
    found = wrapping.early_bound()
    if not found:
        return [ok(check, "none in the modules that are loaded here")]
    way_out = "Import verl_fixes before the module that binds this name, or look the function up where it is called."
    return [error(check, f"{name} still is the function without {patch}", way_out) for name, patch in found]


def serialization() -> list[Finding]:
    """Whether our wrappers are still there in what Ray would send to an actor, worker class by worker class."""
    check = "serialization"
    actors = getattr(sys.modules.get("verl.single_controller.base.worker"), "Worker", ())
    methods: dict[type, list[tuple[str, tuple[Wrapper, ...]]]] = {}
    for cls, name, wrappers in wrapping.touched_classes():
        if issubclass(cls, actors):  # of nothing, where verl's workers are not imported
            methods.setdefault(cls, []).append((name, wrappers))
    if not methods:
        return [info(check, "not checked: no worker class is wrapped in this process")]
    try:
        import ray.cloudpickle
    except ImportError as missing:
        return [info(check, f"not checked: {missing}")]
    findings: list[Finding] = []
    for cls, wrapped in methods.items():
        label = f"{cls.__module__}.{cls.__qualname__}"
        try:
            arrived = _sent_to_an_actor(cls, ray)
        except Exception as reason:
            message = f"Ray cannot send {label}: {type(reason).__name__}: {reason}"
            findings.append(error(check, message, _OURS))
            continue
        lost = [name for name, wrappers in wrapped if not _runs(getattr(arrived, name, None), wrappers)]
        message = f"an actor of {label} would run {', '.join(lost)} without the fix: the wrapper is lost on the way"
        findings.extend([error(check, message, _OURS)] if lost else [])
    if not findings:
        findings.append(ok(check, f"the wrappers arrive in actors of {len(methods)} classes"))
    return findings


def _sent_to_an_actor(cls: type, ray: Any) -> Any:
    """The class that an actor of ``cls`` gets: as ``ray.remote`` makes it, pickled and loaded again."""
    with warnings.catch_warnings(), _no_words_of_finalizers():
        warnings.simplefilter("ignore")
        sent = ray.cloudpickle.dumps(ray.remote(cls).__ray_metadata__.modified_class)
    with _as_another_process(ray.cloudpickle.cloudpickle):
        return ray.cloudpickle.loads(sent)


@contextlib.contextmanager
def _no_words_of_finalizers() -> Iterator[None]:
    """What ``ray.remote`` returns inherits the class's ``__del__``, which fails on it when it is dropped."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def _as_another_process(cloudpickle: Any) -> Iterator[None]:
    """Let cloudpickle forget the classes that it has sent, or it answers with the very class that was pickled."""
    trackers = {
        "_DYNAMIC_CLASS_TRACKER_BY_ID": weakref.WeakValueDictionary[Any, Any](),
        "_DYNAMIC_CLASS_TRACKER_BY_CLASS": weakref.WeakKeyDictionary[Any, Any](),
    }
    before = {name: getattr(cloudpickle, name) for name in trackers}
    vars(cloudpickle).update(trackers)
    try:
        yield
    finally:
        vars(cloudpickle).update(before)


def _runs(method: Any, wrappers: Sequence[Wrapper]) -> bool:
    """Whether a method that came back calls every wrapper: each is in a closure around the original."""
    reached = list(_reachable(method))
    return all(any(_is_same(value, wrapper) for value in reached) for wrapper in wrappers)


def _reachable(value: Any) -> Iterator[Callable[..., Any]]:
    """A function, and the functions that its closures and ``__wrapped__`` lead to."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        function = getattr(value, "__func__", value)
        if type(function) is not FunctionType or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        waiting.extend(cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_same(value: Any, wrapper: Wrapper) -> bool:
    """The wrapper itself, or what cloudpickle makes of one that cannot be pickled by its name."""
    return value is wrapper or value.__code__ == getattr(wrapper, "__code__", None)
