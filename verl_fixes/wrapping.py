"""Puts wrappers around functions and methods, under every name by which they are reached, and takes them off again.

Wrappers are plain functions. ``ray.remote`` pickles the methods of an actor class by value, and cloudpickle sees a
wrapt proxy as the function it wraps: a proxy would be dropped on the way to the worker without a word.

Several patches may wrap one attribute. Such an attribute is a stack of layers around what was there before, so that
any of them can be taken out, whatever came first.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from verl_fixes.errors import InstallError, RestoreError
from verl_fixes.patch import Patch, Target, Wrapper

_MISSING: Any = object()
_lock = threading.RLock()


@dataclass(frozen=True, eq=False)
class _Layer:
    patch: Patch
    target: Target
    wrapper: Wrapper


@dataclass(eq=False)
class _Stack:
    """One attribute with our wrappers on it.

    Attributes:
        spots: where it is reached: owner (class or module), name there, and what the owner itself had there before.
        base: what the innermost wrapper goes around; inherited where the owner had nothing of its own.
        layers: innermost first.
        put: what we set last.
        spec: of a function, its module's ``__spec__``, which a reload replaces.
    """

    spots: tuple[tuple[Any, str, Any], ...]
    base: Any
    layers: list[_Layer] = field(default_factory=list)
    put: Any = _MISSING
    spec: Any = None

    def rebuild(self) -> None:
        """Set the attribute to what the layers make of it; without any, to the identical object from before."""
        self._adopt()
        value = self.base
        for layer in self.layers:
            value = _bind_descriptor(layer.wrapper, value)
        for owner, name, before in self.spots:
            wanted = value if self.layers else before
            if wanted is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, wanted)
                if vars(owner).get(name) is not wanted:
                    raise InstallError("it did not stay in place when it was set")
        self.put = value

    def _adopt(self) -> None:
        """Note where else a function of ours has got to: ``from x import f`` in a module that was imported after us."""
        if self.spec is not None and self.put is not _MISSING:
            known = {(id(owner), name) for owner, name, _ in self.spots}
            since = [(owner, name) for owner, name in _names_of(self.put) if (id(owner), name) not in known]
            self.spots += tuple((owner, name, self.base) for owner, name in since)

    def intruder(self) -> str:
        """What somebody has put where our wrapper was, in words; empty when it is in place or only wrapped again."""
        for owner, name, _ in self.spots:
            current = vars(owner).get(name, _MISSING)
            if not any(link is self.put for link in _unwrapped(current)):
                return f"{_label(owner)}.{name} was replaced by {current!r}"
        return ""

    def refuse_if_covered(self) -> None:
        for owner, name, _ in self.spots:
            current = vars(owner).get(name, _MISSING)
            if current is not self.put:
                raise RestoreError(
                    f"{self.layers[-1].patch.name}: {_label(owner)}.{name} was replaced by {current!r} after "
                    "verl-fixes had wrapped it. Take that wrapper off first, then call deactivate() again; nothing of "
                    "this patch was changed."
                )


_stacks: list[_Stack] = []
_uncovered: dict[tuple[str, str], dict[str, str]] = {}
_watched: dict[type, tuple[Any, Any]] = {}
"""Classes whose future subclasses are looked at: what their ``__init_subclass__`` was, and what it is."""


def install(patch: Patch, target: Target, wrapper: Wrapper, module: ModuleType) -> None:
    """Put ``wrapper`` around one target of an imported module, under every name by which it is reached.

    Raises:
        InstallError: the target is not there or cannot be wrapped. Nothing of it stays in place.
    """
    layer = _Layer(patch, target, wrapper)
    with _lock:
        try:
            owner, name = _owner(module, target.qualname)
            if owner is module:
                _wrap_function(module, name, layer, everywhere=target.caller is None)
            else:
                _wrap_method(owner, name, layer)
            if target.on_install is not None:
                target.on_install(module)
        except Exception as error:
            restore(patch.name, target)
            raise InstallError(f"{target} cannot be wrapped: {type(error).__name__}: {error}") from error


def cover(patch: Patch, target: Target, cls: type, name: str, wrapper: Wrapper) -> None:
    """Wrap a method of a class that turned up later, as part of ``target``: what cannot be wrapped is noted."""
    with _lock:
        _noting(_Layer(patch, target, wrapper), cls, name)


def restore(patch_name: str, target: Target | None = None) -> None:
    """Take the wrappers of a patch off, all or those of one target. What nobody else wraps is the identical object.

    Raises:
        RestoreError: somebody wrapped on top of us. Nothing is changed then.
    """
    with _lock:
        affected = _stacks_with(patch_name, target)
        for stack in affected:
            stack.refuse_if_covered()
        for stack in affected:
            _drop_layers(stack, patch_name, target)
            stack.rebuild()
        _forget_empty(patch_name, target)


def forget(patch_name: str, target: Target) -> None:
    """Drop the notes on one target without touching anything: the module or class that it was installed in is gone."""
    with _lock:
        for stack in _stacks:
            _drop_layers(stack, patch_name, target)
        _forget_empty(patch_name, target)


def lives_in(patch_name: str, target: Target, module: ModuleType) -> bool:
    """Whether what was wrapped is what the module holds now: not so after a reload."""
    try:
        owner, name = _owner(module, target.qualname)
    except (KeyError, AttributeError):
        return False
    return any(
        owner is spot[0] and name == spot[1] and (stack.spec is None or stack.spec is module.__spec__)
        for stack in _stacks_with(patch_name, target)
        for spot in stack.spots
    )


def trouble(patch_name: str, target: Target) -> str:
    """What keeps wrappers of a target from running, in words: replaced by somebody, or could not be wrapped."""
    replaced = (stack.intruder() for stack in _stacks_with(patch_name, target))
    missed = (f"{what}: {why}" for what, why in _uncovered.get((patch_name, str(target)), {}).items())
    return "; ".join(filter(None, (*replaced, *missed)))


def touched_classes() -> list[tuple[type, str, tuple[Wrapper, ...]]]:
    """Every method that we have wrapped: its class, its name, and the wrappers around it, innermost first."""
    with _lock:
        return [
            (owner, name, tuple(layer.wrapper for layer in stack.layers))
            for stack in _stacks
            for owner, name, _ in stack.spots
            if isinstance(owner, type)
        ]


def early_bound() -> list[tuple[str, str]]:
    """Names in loaded modules and their classes that still lead around our wrappers: the name, and the patch."""
    with _lock:
        stacks = [stack for stack in _stacks if not all(layer.target.caller for layer in stack.layers)]
    puts = {id(_function(stack.put)) for stack in stacks}
    bases = {id(_function(stack.base)): stack for stack in stacks if id(_function(stack.base)) not in puts}
    found = []
    for place, owner, function in _named_functions():
        links = list(_unwrapped(function))
        stack = next((bases[id(link)] for link in links if id(link) in bases), None)
        if stack is None or any(link is _function(stack.put) for link in links) or _lends(owner, stack):
            continue
        found.append((place, stack.layers[-1].patch.name))
    return found


def _lends(owner: Any, stack: _Stack) -> bool:
    """Whether ``owner`` is an ancestor from which the wrapped class only inherits: it rightly keeps its own."""
    return any(
        before is _MISSING and isinstance(cls, type) and owner in cls.__mro__[1:] for cls, _, before in stack.spots
    )


def _named_functions() -> Iterator[tuple[str, Any, FunctionType]]:
    """Every plain function in loaded modules and in the classes there: where it is, who has it, and the function."""
    seen = set()
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            namespace = object.__getattribute__(module, "__dict__")  # does not load a lazy module
            for name, value in list(namespace.items()):
                if type(value) is FunctionType:
                    yield f"{module.__name__}.{name}", module, value
                elif issubclass(type(value), type) and id(value) not in seen:  # isinstance() would ask the value
                    seen.add(id(value))
                    for attribute, raw in list(vars(value).items()):
                        method = _function(raw)
                        if type(method) is FunctionType:
                            yield f"{value.__module__}.{value.__qualname__}.{attribute}", value, method


def _function(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw


def _owner(module: ModuleType, qualname: str) -> tuple[Any, str]:
    *class_names, name = qualname.split(".")
    owner: Any = module
    for class_name in class_names:
        owner = vars(owner)[class_name]
    return owner, name


def _belongs(layer: _Layer, patch_name: str, target: Target | None) -> bool:
    return layer.patch.name == patch_name and (target is None or layer.target is target)


def _stacks_with(patch_name: str, target: Target | None) -> list[_Stack]:
    return [stack for stack in _stacks if any(_belongs(layer, patch_name, target) for layer in stack.layers)]


def _drop_layers(stack: _Stack, patch_name: str, target: Target | None) -> None:
    stack.layers = [layer for layer in stack.layers if not _belongs(layer, patch_name, target)]


def _forget_empty(patch_name: str, target: Target | None) -> None:
    _stacks[:] = [stack for stack in _stacks if stack.layers]
    for key in [key for key in _uncovered if key[0] == patch_name and (target is None or key[1] == str(target))]:
        del _uncovered[key]
    for cls in [cls for cls in _watched if not any(cls is spot[0] for stack in _stacks for spot in stack.spots)]:
        before, ours = _watched.pop(cls)
        if vars(cls).get("__init_subclass__") is not ours:
            continue  # somebody replaced it; ours does nothing any more
        if before is _MISSING:
            del cls.__init_subclass__
        else:
            cls.__init_subclass__ = before  # type: ignore[method-assign]


def _add(stack: _Stack, layer: _Layer) -> None:
    """Add a layer below those of the patches that stack on it."""
    if any(other.patch is layer.patch and other.wrapper is layer.wrapper for other in stack.layers):
        return
    above = [other for other in stack.layers if layer.patch.name in other.patch.stacks_on]
    if stack.layers:
        stack.refuse_if_covered()
    before = list(stack.layers)
    stack.layers.insert(stack.layers.index(above[0]) if above else len(stack.layers), layer)
    try:
        stack.rebuild()
    except Exception:
        stack.layers = before
        if before:
            stack.rebuild()
        raise
    if stack not in _stacks:
        _stacks.append(stack)


def _wrap_method(cls: type, name: str, layer: _Layer) -> None:
    """Wrap the method that ``cls`` has, every override in a subclass, and those of subclasses that are made later.

    A method that ``cls`` only inherits is added to ``cls`` itself; the parent keeps its own.
    """
    overriding = _overriding_subclasses(cls, name) if layer.target.overrides else ()
    for owner in dict.fromkeys((cls, *overriding)):
        _add(_stack_of(owner, name) or _method_stack(owner, name), layer)
    if layer.target.overrides:
        _watch_subclasses(cls)


def _stack_of(owner: Any, name: str) -> _Stack | None:
    return next((s for s in _stacks if any(spot[0] is owner and spot[1] == name for spot in s.spots)), None)


def _method_stack(cls: type, name: str) -> _Stack:
    return _Stack(((cls, name, vars(cls).get(name, _MISSING)),), inspect.getattr_static(cls, name))


def _overriding_subclasses(cls: type, name: str) -> Iterator[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        if name in vars(subclass):
            yield subclass
        yield from _overriding_subclasses(subclass, name)


def _watch_subclasses(cls: type) -> None:
    if cls in _watched:
        return
    before = vars(cls).get("__init_subclass__", _MISSING)

    def __init_subclass__(subclass: Any, /, **kwargs: Any) -> None:
        if before is _MISSING:
            super(cls, subclass).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        else:
            before.__get__(None, subclass)(**kwargs)
        _cover_heir(subclass)

    ours: Any = classmethod(__init_subclass__)
    cls.__init_subclass__ = ours  # type: ignore[method-assign]
    _watched[cls] = (before, ours)


def _cover_heir(heir: type) -> None:
    """Wrap what a new subclass overrides of the methods that we have wrapped in its ancestors."""
    with _lock:
        ancestors = set(heir.__mro__[1:])
        for stack in list(_stacks):
            for owner, name, _ in stack.spots:
                if owner in ancestors and name in vars(heir):
                    for layer in [layer for layer in stack.layers if layer.target.overrides]:
                        _noting(layer, heir, name)


def _noting(layer: _Layer, cls: type, name: str) -> None:
    """Wrap a method; what goes wrong becomes a note for ``status()``, and whoever listens is told."""
    notes = _uncovered.setdefault((layer.patch.name, str(layer.target)), {})
    what = f"{cls.__module__}.{cls.__qualname__}.{name}"
    try:
        _wrap_method(cls, name, layer)
    except (InstallError, RestoreError, AttributeError, TypeError) as error:
        notes[what] = str(error)
        on_uncovered(layer.patch, f"{what} could not be wrapped: {error}")
    else:
        notes.pop(what, None)


def _ignore(patch: Patch, what: str) -> None:
    """Until an activation wants to know."""


on_uncovered: Callable[[Patch, str], None] = _ignore
"""Told of each class that turned up later and could not be wrapped."""


def _wrap_function(module: ModuleType, name: str, layer: _Layer, everywhere: bool) -> None:
    stack = _stack_of(module, name)
    if stack is None:
        original = vars(module)[name]
        holders = _names_of(original) if everywhere else ((module, name),)
        spots = tuple((holder, alias, original) for holder, alias in holders)
        stack = _Stack(spots, original, spec=getattr(module, "__spec__", None))
    _add(stack, layer)


def _names_of(function: Any) -> Iterator[tuple[ModuleType, str]]:
    """Every loaded module that knows the function, with its name there: ``from x import f`` binds it early."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            namespace = object.__getattribute__(module, "__dict__")  # does not load a lazy module
            for name, value in list(namespace.items()):
                if value is function:
                    yield module, name


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


def _unwrapped(value: Any) -> Iterator[Any]:
    """The value, and what it wraps as ``functools.wraps`` tells it."""
    seen = 0
    while value is not _MISSING and value is not None and seen < 100:
        yield value
        value = getattr(value, "__wrapped__", None)
        seen += 1


def _label(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", getattr(owner, "__name__", owner)))
