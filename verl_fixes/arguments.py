"""Takes a call's arguments as they come and finds them by name, so that a new parameter upstream breaks nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_signature = functools.lru_cache(maxsize=256)(inspect.signature)


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Bind a call to the signature of ``function``, defaults included.

    Raises:
        TypeError: as the call itself would.
    """
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound
