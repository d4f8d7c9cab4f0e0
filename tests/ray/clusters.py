"""Ray clusters of a test's own, started as users start them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

RAY = os.fspath(Path(sys.executable).with_name("ray"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_cluster(**environment: str) -> Iterator[str]:
    """A head node started by ``ray start`` with none of our variables, and its address; ended with all it started."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "MINE"))}
    port = _free_port()
    command = [RAY, "start", "--head", "--block", f"--port={port}", "--num-cpus=4", "--include-dashboard=false"]
    options = ["--disable-usage-stats", "--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
    variables = kept | {"RAY_AUTH_MODE": "disabled"} | environment
    process = subprocess.Popen([*command, *options], env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, "ray start failed"
            assert time.monotonic() < deadline, "ray start did not listen in time"
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
