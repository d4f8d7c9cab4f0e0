"""Takes a call's arguments as they come and finds them by name, so that a new parameter upstream breaks nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


class Call:
    """The arguments of one call, found and replaced by name; everything else passes through as it came.

    Args:
        function: what is called. Where its own signature says only ``*args``, as that of a subclass's override may,
            the names of ``upstream`` hold for the positions.
        upstream: parameter names of verl's method, ``self`` first.
    """

    def __init__(
        self, function: Callable[..., Any], upstream: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._function = function
        self._order, self._defaults = _parameters(function, upstream)
        self._args = args
        self._kwargs = kwargs

    def __getitem__(self, name: str) -> Any:
        if name in self._kwargs:
            return self._kwargs[name]
        position = self._order.index(name) if name in self._order else len(self._args)
        if position < len(self._args):
            return self._args[position]
        if name in self._defaults:
            return self._defaults[name]
        raise TypeError(f"{self._function.__qualname__}() was called without {name!r}")

    def __call__(self, **replaced: Any) -> Any:
        """Call the function, with other values for some of the arguments."""
        args, kwargs = list(self._args), dict(self._kwargs)
        for name, value in replaced.items():
            position = self._order.index(name) if name in self._order else len(args)
            if name in kwargs or position >= len(args):
                kwargs[name] = value
            else:
                args[position] = value
        return self._function(*args, **kwargs)


@functools.lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any], upstream: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names in the order of positional arguments, and the defaults."""
    parameters = inspect.signature(function).parameters.values()
    order = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        order += upstream[len(order) :]
    return order, {p.name: p.default for p in parameters if p.default is not p.empty}
