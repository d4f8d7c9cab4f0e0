"""The same measurement on stock code, with the fixes, and on stock code again, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import verl_fixes

verl_fixes.deactivate()

PHASES = ("stock", "fixed", "back")


def phases(measure: Callable[[], Any], only: Sequence[str] = PHASES, **activate: Any) -> dict[str, Any]:
    """``measure()`` before activation, while active and after ``deactivate()``; an exception counts as its answer."""
    answers = {}
    if "stock" in only:
        answers["stock"] = attempt(measure)
    if "fixed" in only:
        verl_fixes.activate(**activate)
        try:
            answers["fixed"] = attempt(measure)
        finally:
            verl_fixes.deactivate()
    if "back" in only:
        answers["back"] = attempt(measure)
    return answers


def attempt(measure: Callable[[], Any]) -> Any:
    """What ``measure()`` returns, or the exception that it raised, in words."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
