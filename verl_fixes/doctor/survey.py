"""Asks every node of a Ray cluster what is installed there. A program of its own: it imports nothing of verl_fixes.

It is given to ``python -`` on stdin, for two reasons. ``ray.init`` cannot be interrupted while a cluster does not
answer, so its process must be one that can be killed. And functions of ``__main__`` are pickled by value, so they run
on nodes that have never heard of verl_fixes.

One JSON object a line comes out, each as soon as it is known, so that what came before a hang is not lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any


def describe() -> dict[str, str]:
    """What this machine has. Runs in a worker of any node: everything that it needs is in its own body."""
    import os
    import platform
    import socket
    from importlib import metadata, util
    from pathlib import Path

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return ""

    def version_of_verl() -> str:
        try:
            spec = util.find_spec("verl")
        except ValueError:
            return ""
        folders = (spec.submodule_search_locations or []) if spec else []
        for folder in folders:
            file = Path(folder, "version", "version")
            if file.is_file():
                return file.read_text().strip()
        return "of unknown version" if folders else ""

    answer = {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "verl": version_of_verl(),
        "verl_fixes": "",
        "identity": "",
        "torch": version("torch"),
        "ray": version("ray"),
        "megatron-core": version("megatron-core"),
        "VERL_FULL_DETERMINISM": os.environ.get("VERL_FULL_DETERMINISM", ""),
        "VLLM_BATCH_INVARIANT": os.environ.get("VLLM_BATCH_INVARIANT", ""),
        "trouble": "",
    }
    try:
        import verl_fixes

        answer["verl_fixes"] = verl_fixes.__version__
        from verl_fixes.identity import Identity

        answer["identity"] = Identity.of(verl_fixes.status()).encode()
    except Exception as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name == "verl_fixes"):
            answer["verl_fixes"] = answer["verl_fixes"] or "cannot be imported"
            answer["trouble"] = f"{type(error).__name__}: {error}"
    return answer


def main(address: str, timeout: float, variables: Mapping[str, str]) -> None:
    """Connect, list the nodes, ask each of them once, and say what came of it.

    Args:
        address: of a running cluster, as ``ray.init`` takes it.
        timeout: seconds for the connection, and again for the nodes.
        variables: environment of the workers, what a job would give to its own.
    """
    _exit_after(timeout, {"error": f"the cluster did not answer within {timeout:g} s"})
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # as verl does: under `uv run`, Ray would upload files
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        _refuse_closed_port(address, min(timeout, 5))
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    except Exception as error:
        _leave({"error": f"{type(error).__name__}: {error}"})
    _exit_after(timeout + 10, {})
    _say(
        {"nodes": {i: {"ip": n["NodeManagerAddress"], "hostname": n["NodeManagerHostname"]} for i, n in nodes.items()}}
    )

    task = ray.remote(num_cpus=0, max_retries=0)(describe)
    environment = {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
    asked = {}
    for node_id in nodes:
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        asked[task.options(scheduling_strategy=here, name="verl-fixes doctor", **environment).remote()] = node_id
    _, pending = ray.wait(list(asked), num_returns=len(asked), timeout=timeout)
    for ref, node_id in asked.items():
        if ref not in pending:
            try:
                _say({"node": node_id, "answer": ray.get(ref, timeout=5)})
            except Exception as error:
                _say({"node": node_id, "failure": f"{type(error).__name__}: {error}"})
    for ref in pending:
        with contextlib.suppress(Exception):
            ray.cancel(ref, force=True)
    ray.shutdown()


def _refuse_closed_port(address: str, timeout: float) -> None:
    """Ray waits for minutes where nothing listens.

    Raises:
        ConnectionError: there is no running cluster, or nothing listens at its address.
    """
    from ray._private import services

    if "://" in address:
        where = address.partition("://")[2]
    else:
        with contextlib.suppress(AttributeError):  # not a public function; ray.init says it, too, only later
            where = services.canonicalize_bootstrap_address(address)
    if where in (None, "auto"):
        raise ConnectionError("no running Ray cluster is known on this machine")
    host, _, port = where.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {where}: {error.strerror or error}") from None


def _exit_after(seconds: float, last_words: Mapping[str, Any]) -> None:
    """End this process after a while, whatever its main thread waits for. A second call replaces the first."""
    global _watch
    if _watch is not None:
        _watch.cancel()
    _watch = threading.Timer(seconds, _leave, (last_words,))
    _watch.daemon = True
    _watch.start()


_watch: threading.Timer | None = None


def _leave(last_words: Mapping[str, Any]) -> None:
    if last_words:
        _say(last_words)
    os._exit(0)


def _say(value: Mapping[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
