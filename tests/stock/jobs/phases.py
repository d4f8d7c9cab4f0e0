"""The same measurement on stock code, with the fixes, and on stock code again, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import verl_fixes

verl_fixes.deactivate()


def phases(measure: Callable[[], Any], **activate: Any) -> dict[str, Any]:
    """``measure()`` before activation, while active and after ``deactivate()``; an exception counts as its answer."""
    before = attempt(measure)
    verl_fixes.activate(**activate)
    try:
        fixed = attempt(measure)
    finally:
        verl_fixes.deactivate()
    return {"stock": before, "fixed": fixed, "back": attempt(measure)}


def attempt(measure: Callable[[], Any]) -> Any:
    """``measure()``, or the exception that it raised, as text."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
