"""What a patch is (plain data), and how one target is installed and restored.

Wrappers are plain functions. ``ray.remote`` pickles the methods of an actor class by value, and cloudpickle sees a
wrapt proxy as the function it wraps: a proxy would be dropped on the way to the worker without a word.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

from verl_fixes.errors import InstallError, RestoreError
from verl_fixes.probe import Question, Verdict

Wrapper = Callable[..., Any]
"""``wrapper(original, *args, **kwargs)``; for a method, ``args[0]`` is ``self``."""

_MISSING = object()


class State(str, Enum):
    """What is true of a patch, or of one of its targets, in this process."""

    APPLIED = "applied"
    """Installed and read back."""
    REFINED = "refined"
    """Upstream has the fix, ours completes it; installed and read back."""
    PENDING = "pending"
    """The module is not imported yet."""
    UPSTREAM = "upstream"
    """This release has the fix."""
    ABSENT = "absent"
    """This release has no such code."""
    DISABLED = "disabled"
    """Switched off, the reason says by what."""
    DRIFTED = "drifted"
    """The code is there, but it is not one that we know. Left alone."""
    FAILED = "failed"
    """It should have been applied and is not."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, eq=False)
class Target:
    """One function of verl (or Megatron) and what to put around it.

    Args:
        module: dotted name of the module that defines it.
        qualname: ``Class.method`` or ``function``.
        wrapper: goes around code that has the bug.
        refine: goes around code that has upstream's fix and leaves something; None: the wrapper does there, too.
        question: tells buggy from fixed by structure, for code whose fingerprint is not in ``known``.
        known: fingerprints of the releases that are tested, with their verdicts.
        on_install: called with the imported module once the wrapper is in place.
    """

    module: str
    qualname: str
    wrapper: Wrapper
    question: Question
    refine: Wrapper | None = None
    known: Mapping[str, Verdict] = field(default_factory=dict)
    on_install: Callable[[ModuleType], None] | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    def plan(self, verdict: Verdict) -> tuple[State, Wrapper | None]:
        """The state that this target is in once its module is imported, and the wrapper that brings it there."""
        if verdict is Verdict.BUGGY:
            return State.APPLIED, self.wrapper
        if verdict is Verdict.INCOMPLETE:
            return State.REFINED, self.refine or self.wrapper
        return {Verdict.FIXED: State.UPSTREAM, Verdict.ABSENT: State.ABSENT}.get(verdict, State.DRIFTED), None


@dataclass(frozen=True)
class Patch:
    """A fix, as data. README's table, ``status`` and ``explain`` are rendered from these fields.

    Args:
        name: lower case with dashes; the environment variable is derived from it.
        title: what the user gets, in a few words.
        hurts: what goes wrong without it, and who is hit.
        does: what the wrapper does.
        removable: when it can be deleted.
        upstream: links to the upstream pull requests and issues.
        fixed_in: first release of the package that has the whole fix, or "none yet".
        default: whether it is on when no toggle says otherwise.
        targets: the functions that are wrapped.
        atomic: the patch goes in whole or not at all. False only where each target is a fix in its own right.
        stacks_on: patches, earlier in the catalog, with which this one may share a target; it wraps theirs.
    """

    name: str
    title: str
    hurts: str
    does: str
    removable: str
    upstream: tuple[str, ...]
    fixed_in: str
    targets: tuple[Target, ...]
    default: bool = True
    atomic: bool = True
    stacks_on: tuple[str, ...] = ()

    @property
    def env(self) -> str:
        return "VERL_FIXES_" + self.name.upper().replace("-", "_")


@dataclass(frozen=True)
class _Place:
    """One attribute that was set for a target, with all that is needed to undo it."""

    target: str
    owner: Any
    name: str
    put: Any
    before: Any

    def current(self) -> Any:
        return vars(self.owner).get(self.name, _MISSING)

    def undo(self) -> None:
        if self.before is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


_ledger: dict[str, list[_Place]] = {}
"""Every attribute that is set at the moment, by patch name, in the order in which it was set."""

_uncovered: dict[tuple[str, str], list[str]] = {}


def install(patch_name: str, target: Target, wrapper: Wrapper, module: ModuleType) -> None:
    """Put ``wrapper`` around one target of an imported module, under every name by which it is reached.

    Raises:
        InstallError: the target is not there or cannot be wrapped. Nothing of it stays in place.
    """
    *class_names, name = target.qualname.split(".")
    try:
        owner: Any = module
        for class_name in class_names:
            owner = vars(owner)[class_name]
        if class_names:
            wrap_method(patch_name, str(target), owner, name, wrapper)
        else:
            _wrap_function(patch_name, str(target), module, name, wrapper)
        if target.on_install is not None:
            target.on_install(module)
    except Exception as error:
        restore(patch_name, target)
        raise InstallError(f"{target} cannot be wrapped: {type(error).__name__}: {error}") from error


def wrap_method(patch_name: str, target: str, cls: type, name: str, wrapper: Wrapper) -> None:
    """Put ``wrapper`` around the method that ``cls`` has under ``name``, and around every override in a subclass.

    A method that ``cls`` only inherits is added to ``cls`` itself; the parent keeps its own. ``target`` says with
    which target of the patch the wrapper goes again.
    """
    for owner in dict.fromkeys((cls, *_overriding_subclasses(cls, name))):
        if not any(place.owner is owner and place.name == name for place in _ledger.get(patch_name, ())):
            _put(patch_name, target, owner, name, _bind_descriptor(wrapper, inspect.getattr_static(owner, name)))


def cover(patch_name: str, target: Target, cls: type, name: str, wrapper: Wrapper) -> None:
    """As :func:`wrap_method`, for a class that turned up later: what cannot be wrapped is noted, never raised."""
    try:
        wrap_method(patch_name, str(target), cls, name, wrapper)
    except InstallError as error:
        _uncovered.setdefault((patch_name, str(target)), []).append(
            f"{cls.__module__}.{cls.__qualname__}.{name}: {error}"
        )


def uncovered(patch_name: str, target: Target) -> str:
    """What :func:`cover` could not wrap, in words; empty when all went well."""
    return "; ".join(_uncovered.get((patch_name, str(target)), ()))


def restore(patch_name: str, target: Target | None = None) -> None:
    """Put back the identical objects that were there before, and delete what was added; for one target or for all.

    Raises:
        RestoreError: somebody wrapped on top of us. Nothing is changed then.
    """
    places = _ledger.get(patch_name, [])
    chosen = [place for place in places if target is None or place.target == str(target)]
    for place in chosen:
        if place.current() is not place.put:
            owner = getattr(place.owner, "__qualname__", getattr(place.owner, "__name__", place.owner))
            raise RestoreError(
                f"{patch_name}: {owner}.{place.name} was replaced by {place.current()!r} after verl-fixes had wrapped "
                f"it. Take that wrapper off first, then call deactivate() again; nothing of this patch was changed."
            )
    for place in reversed(chosen):
        place.undo()
        places.remove(place)


def forget(patch_name: str, target: Target) -> None:
    """Drop the notes on one target without touching anything: the module that it was installed in is gone."""
    places = _ledger.get(patch_name, [])
    places[:] = [place for place in places if place.target != str(target)]


def _put(patch_name: str, target: str, owner: Any, name: str, value: Any) -> None:
    place = _Place(target, owner, name, value, vars(owner).get(name, _MISSING))
    setattr(owner, name, value)
    if place.current() is not value:
        raise InstallError("it did not stay in place when it was set")
    _ledger.setdefault(patch_name, []).append(place)


def _bind(wrapper: Wrapper, original: Any) -> Any:
    """A plain function around ``original`` that looks and pickles like it (coroutine-ness and attributes kept)."""
    if not isinstance(original, FunctionType):
        raise InstallError(f"it is a {type(original).__name__}, not a plain function")

    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def bound(*args: Any, **kwargs: Any) -> Any:
            return await wrapper(original, *args, **kwargs)

    else:

        @functools.wraps(original)
        def bound(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

    return bound


def _bind_descriptor(wrapper: Wrapper, raw: Any) -> Any:
    if isinstance(raw, (classmethod, staticmethod)):
        return type(raw)(_bind(wrapper, raw.__func__))
    return _bind(wrapper, raw)


def _overriding_subclasses(cls: type, name: str) -> Iterator[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        if name in vars(subclass):
            yield subclass
        yield from _overriding_subclasses(subclass, name)


def _wrap_function(patch_name: str, target: str, module: ModuleType, name: str, wrapper: Wrapper) -> None:
    original = vars(module)[name]
    bound = _bind(wrapper, original)
    for holder, alias in list(_names_of(original)):
        _put(patch_name, target, holder, alias, bound)


def _names_of(function: Any) -> Iterator[tuple[ModuleType, str]]:
    """Every loaded module that knows the function, with its name there: ``from x import f`` binds it early."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is function:
                    yield module, name
