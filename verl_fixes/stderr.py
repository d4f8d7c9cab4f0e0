"""Says something on stderr, once a process, whatever logging configuration the job has."""

from __future__ import annotations

import contextlib
import sys

_said: set[str] = set()


def say(message: str) -> None:
    """Print a line, the first time. A stderr that is closed or gone is no reason to break the user's import."""
    if message in _said or sys.stderr is None:
        return
    _said.add(message)
    with contextlib.suppress(OSError, ValueError):
        print(f"verl-fixes: {message}", file=sys.stderr, flush=True)
