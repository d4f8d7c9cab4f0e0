"""Starts a script once for each rank of a gloo group, with a timeout, and leaves no process behind."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from verl_fixes.demo.megatron_arrangement import arrange

_STORE = "GLOO_PROCESSES_STORE"


@contextlib.contextmanager
def process_group(timeout: float = 60.0) -> Iterator[int]:
    """A gloo group over the processes that :func:`run` started (or over this one alone); yields this one's rank.

    ``timeout``, in seconds, is for one collective operation.
    """
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    rank, world_size = int(os.environ["RANK"]), int(os.environ.setdefault("WORLD_SIZE", "1"))
    arrange()
    # a file, because a port that is free now may be taken before rank 0 listens on it
    store = torch.distributed.HashStore()
    if world_size > 1:
        store = torch.distributed.FileStore(os.environ[_STORE], world_size)
    limit = datetime.timedelta(seconds=timeout)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        yield torch.distributed.get_rank()
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def run(
    target: str,
    world_size: int,
    arguments: Sequence[str] = (),
    *,
    fixes: bool = False,
    timeout: float = 120.0,
    python: str = sys.executable,
    env: dict[str, str] | None = None,
) -> str:
    """Start ``world_size`` processes of a script (``*.py``) or module and return what rank 0 printed.

    Args:
        target: path of a script, or name of a module.
        arguments: command line of every process.
        fixes: False switches verl-fixes off in them (``VERL_FIXES=0``), also where it is installed as a plugin.
        timeout: seconds for all of them together.
        python: interpreter, for an environment with another release of verl.
        env: more environment variables.

    Raises:
        RuntimeError: a process failed or the time is over. The message ends with its output, and no process is left.
    """
    command = [python, *([target] if target.endswith(".py") else ["-m", target]), *arguments]
    common = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size)}
    common.pop("VERL_FIXES", None)
    if not fixes:
        common["VERL_FIXES"] = "0"
    common |= env or {}

    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="megatron_on_cpu_") as folder:
        common[_STORE] = os.path.join(folder, "store")
        outputs = [Path(folder, f"{rank}.out") for rank in range(world_size)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, output in enumerate(outputs):
                with output.open("wb") as stdout, output.with_suffix(".err").open("wb") as stderr:
                    environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    processes.append(
                        subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True)
                    )
            problems = _wait(processes, deadline)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if problems:
            texts = [f"rank {rank} {problem}:\n{_tail(outputs[rank])}" for rank, problem in problems.items()]
            raise RuntimeError("\n".join([" ".join(command), *texts]))
        return outputs[0].read_text()


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> dict[int, str]:
    """Wait for all processes, or for the first that fails; what went wrong, by rank."""
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            return {rank: f"ended with {code}" for rank, code in enumerate(codes) if code}
        if None not in codes:
            return {}
        if time.monotonic() > deadline:
            return {rank: "did not end in time" for rank, code in enumerate(codes) if code is None}
        time.sleep(0.05)


def _tail(output: Path, characters: int = 4000) -> str:
    texts = (path.read_text(errors="replace") for path in (output, output.with_suffix(".err")))
    return "".join(text[-characters:] for text in texts)
