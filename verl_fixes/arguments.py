"""Takes a call's arguments as they come and finds them by name, so that a new parameter upstream breaks nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


class Call:
    """The arguments of one call, found and replaced by name; everything else passes through as it came.

    Args:
        function: what is called. A subclass's override may say only ``*args``, or call a parameter something else:
            where it does not know a name, the position in ``upstream`` decides.
        upstream: parameter names of verl's method, ``self`` first.
    """

    def __init__(
        self, function: Callable[..., Any], upstream: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._function = function
        self._order, self._defaults = _parameters(function)
        self._upstream = upstream
        self._args = args
        self._kwargs = kwargs

    def __getitem__(self, name: str) -> Any:
        position, name_there = self._find(name)
        if name_there in self._kwargs:
            return self._kwargs[name_there]
        if position < len(self._args):
            return self._args[position]
        if name_there in self._defaults:
            return self._defaults[name_there]
        raise TypeError(f"{self._function.__qualname__}() was called without {name!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """The argument, or ``default`` where it was not given and the function names no default for it."""
        try:
            return self[name]
        except TypeError:
            return default

    def __call__(self, **replaced: Any) -> Any:
        """Call the function, with other values for some of the arguments."""
        args, kwargs = list(self._args), dict(self._kwargs)
        for name, value in replaced.items():
            position, name_there = self._find(name)
            if name_there in kwargs or position >= len(args):
                kwargs[name_there] = value
            else:
                args[position] = value
        return self._function(*args, **kwargs)

    def _find(self, name: str) -> tuple[int, str]:
        """Position among the positional arguments, and the function's own name for the parameter."""
        if name in self._kwargs:
            return len(self._args), name
        if name in self._order:
            return self._order.index(name), name
        if name not in self._upstream:
            return len(self._args), name
        position = self._upstream.index(name)
        return position, self._order[position] if position < len(self._order) else name


@functools.lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names in the order of positional arguments, and the defaults."""
    parameters = inspect.signature(function).parameters.values()
    order = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return order, {p.name: p.default for p in parameters if p.default is not p.empty}
