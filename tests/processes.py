"""Runs Python in processes of their own: verl, torch.distributed and import hooks keep global state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without any toggle, with this checkout on the path, and with ``variables``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_FIXES", "VERL_USE_"))}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    kept["OMP_NUM_THREADS"] = "1"
    return {**kept, **variables}


def python(*arguments: str, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with ``arguments`` and return what came of it, whatever the exit code."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def script(source: str, *, timeout: float = 240, **variables: str) -> Any:
    """Run a script that prints one JSON value as its last line, and return that value.

    Raises:
        AssertionError: the script failed; the message is its whole output.
    """
    done = python("-c", textwrap.dedent(source), timeout=timeout, **variables)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def call(function: str, *, timeout: float = 240, **arguments: Any) -> Any:
    """Call ``module:function`` in a process of its own, with and for values that JSON can carry.

    Raises:
        AssertionError: it failed; the message is the end of its output.
    """
    module, _, name = function.partition(":")
    source = f"""
        import json, importlib
        answer = importlib.import_module({module!r}).{name}(**json.loads({json.dumps(arguments)!r}))
        print(json.dumps(answer))
    """
    return script(source, timeout=timeout)
