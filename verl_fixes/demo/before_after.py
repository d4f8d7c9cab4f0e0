"""``verl-fixes demo``: the installed verl's own engines on this machine's CPU, each without and with the fixes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_fixes.report import heading

MICRO_BATCHES = (1, 8, 32)
ROUTER_LOSS = ("--z", "1e-3")
TIMEOUT_S = 170
_NEEDED = ("verl", "torch", "megatron.core", "mbridge", "transformers", "tensordict", "einops")


@dataclass(frozen=True)
class Run:
    """One measurement in a process of its own."""

    title: str
    module: str
    arguments: tuple[str, ...] = ()
    fixes: bool = False

    def measure(self) -> dict[str, Any]:
        """Run it and return what it printed.

        Raises:
            RuntimeError: it failed; the message ends with its output.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_FIXES")}
        environment |= {"OMP_NUM_THREADS": "1"} | ({} if self.fixes else {"VERL_FIXES": "0"})
        done = subprocess.run(
            [sys.executable, "-m", f"verl_fixes.demo.{self.module}", *self.arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.title} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result


def _runs() -> dict[str, Run]:
    counts = [str(count) for count in MICRO_BATCHES]
    memory = ("--micro-batches", *counts)
    per_token = ("--per-token-loss", *ROUTER_LOSS)
    return {
        "megatron off": Run("Megatron, flag off", "megatron_on_cpu", ROUTER_LOSS),
        "megatron off fixed": Run("Megatron, fixed", "megatron_on_cpu", (*ROUTER_LOSS, "--fixes"), fixes=True),
        "megatron on": Run("Megatron, flag on", "megatron_on_cpu", per_token),
        "megatron on fixed": Run("Megatron, flag on, fixed", "megatron_on_cpu", (*per_token, "--fixes"), fixes=True),
        "memory": Run("FSDP2, memory", "fsdp_on_cpu", memory),
        "memory fixed": Run("FSDP2, memory, fixed", "fsdp_on_cpu", (*memory, "--fixes"), fixes=True),
        "types": Run("metrics", "metric_types"),
        "types fixed": Run("metrics, fixed", "metric_types", fixes=True),
    }


def run(plot: Path | None) -> int:
    """Measure, print the table, write the picture; the exit code."""
    from rich.console import Console

    missing = [name for name in (*_NEEDED, *(("matplotlib",) if plot else ())) if not _is_installed(name)]
    if missing:
        print(
            f"verl-fixes demo runs real engines and needs {', '.join(missing)}. Install torch, then "
            "`pip install 'verl-fixes[demo]'`, or run `nox -s demo` in a checkout, which builds the environment.",
            file=sys.stderr,
        )
        return 1
    try:
        results = _measure_all(_runs())
    except RuntimeError as error:
        print(f"verl-fixes demo: {error}", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(heading(), highlight=False, soft_wrap=True)
    console.print(_table(results))
    if plot:
        _draw(results, plot)
        console.print(f"picture: {plot}", highlight=False)
    return 0


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is missing
        return False


def _measure_all(runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, ThreadPoolExecutor(2) as pool:
        task = progress.add_task("real engines on CPU", total=len(runs))
        pending: dict[str, Future[dict[str, Any]]] = {}
        for name, one in runs.items():
            pending[name] = pool.submit(one.measure)
            pending[name].add_done_callback(_advance(progress, task))
        return {name: future.result() for name, future in pending.items()}


def _advance(progress: Any, task: Any) -> Callable[[object], None]:
    return lambda _: progress.advance(task)


def _table(results: dict[str, dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, justify in (("measured on stock code", "left"), ("stock", "right"), ("with verl-fixes", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for name, kind in results["types"].items():
        table.add_row(f"type of metrics\\['{name}'] at the driver", kind, results["types fixed"][name])
    table.add_section()
    for flag in ("off", "on"):
        before, after = (f"{results[f'megatron {flag}{suffix}']['grad_norm']:.6f}" for suffix in ("", " fixed"))
        table.add_row(f"grad_norm, MoE with z loss, calculate_per_token_loss {flag}", before, after)
    table.add_section()
    for stock, fixed in zip(_held(results, "memory"), _held(results, "memory fixed"), strict=True):
        count = stock["micro_batches"]
        row = f"bytes held by autograd graphs after {count} micro-batch{'' if count == 1 else 'es'}"
        table.add_row(row, f"{stock['bytes']:,}", f"{fixed['bytes']:,}")
    return table


def _held(results: dict[str, dict[str, Any]], name: str) -> Sequence[dict[str, Any]]:
    held: Sequence[dict[str, Any]] = results[name]["held"]
    return held


def _draw(results: dict[str, dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stock, fixed = "#c44e52", "#4c72b0"
    figure, (memory, gradient) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, label, colour in (("memory", "stock", stock), ("memory fixed", "with verl-fixes", fixed)):
        held = _held(results, name)
        megabytes = [row["bytes"] / 1e6 for row in held]
        memory.plot([row["micro_batches"] for row in held], megabytes, "o-", label=label, color=colour)
    memory.set(
        title="Held by autograd graphs (FSDP2, LoRA, checkpointed)", xlabel="micro-batches", ylabel="MB", ylim=(0, None)
    )
    memory.legend()

    names = ("megatron off", "megatron on", "megatron on fixed")
    norms = [results[name]["grad_norm"] for name in names]
    bars = gradient.bar(["flag off", "flag on,\nstock", "flag on,\nverl-fixes"], norms, color=["grey", stock, fixed])
    gradient.bar_label(bars, [f"{norm:.4f}" for norm in norms])
    gradient.set(
        title="grad_norm under calculate_per_token_loss (MoE, z loss)", yscale="log", ylabel="grad_norm (log scale)"
    )
    gradient.margins(y=0.15)
    figure.savefig(file, dpi=120)
