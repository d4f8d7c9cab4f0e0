"""One step for each megatron-core, stock and with the fixes; ``nox -s bench`` writes docs/megatron-core.md.

``python -m benchmarks.megatron_core measure FILE`` measures the megatron-core and the verl that are on the path;
``python -m benchmarks.megatron_core render FILE...`` puts what all of them measured into the page.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.megatron.steps import Steps, relative_error, steps

PAGE = Path(__file__).parent.parent / "docs" / "megatron-core.md"
LAYOUTS = {"one process": {}, "CP=2": {"cp": 2}, "TP=2": {"tp": 2}}
MODELS = {"no router loss": {}, "aux and z loss": {"aux_loss_coeff": 1e-2, "z_loss_coeff": 1e-3}}
CASES = {"step": {"micro_batches": 1}}


def measure(file: Path) -> None:
    """One micro-batch of the standard batch in every layout, with the flag off and on."""
    plans: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for layout, sizes in LAYOUTS.items():
        for model, losses in MODELS.items():
            for on, flag in ((False, "off"), (True, "on")):
                plans[2 if sizes else 1][f"{layout}/{model}/{flag}"] = {
                    "per_token_loss": on,
                    "layout": sizes,
                    "model": losses,
                    "cases": CASES,
                    "phases": ["stock", "fixed"],
                }
    with tempfile.TemporaryDirectory() as folder:
        measured = [steps(Path(folder), world_size, plan) for world_size, plan in plans.items()]
    rows = [_row(found, layout, model) for found in measured for layout in LAYOUTS for model in MODELS]
    versions = {name: metadata.version(name) for name in ("megatron-core", "verl")}
    file.write_text(json.dumps({**versions, "rows": [row for row in rows if row]}))


def _row(found: Steps, layout: str, model: str) -> dict[str, Any] | None:
    name = f"{layout}/{model}"
    if f"{name}/on" not in found.answers:
        return None
    off = found.gradient("stock", f"{name}/off", "step")
    columns = {"off": ("stock", "off"), "stock": ("stock", "on"), "fixed": ("fixed", "on")}
    return {
        "layout": layout,
        "model": model,
        "grad_norm": {
            column: found.answers[f"{name}/{flag}"]["step"][phase]["grad_norm"]
            for column, (phase, flag) in columns.items()
        },
        "error": {
            phase: relative_error(found.gradient(phase, f"{name}/on", "step"), off) for phase in ("stock", "fixed")
        },
    }


def table(measurements: list[dict[str, Any]]) -> str:
    """Markdown: a line for each megatron-core, model and layout."""
    lines = [
        "| megatron-core | verl | model | layout | flag off | on, stock | on, fixed | error, stock | error, fixed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for measurement in measurements:
        for row in sorted(measurement["rows"], key=lambda row: list(MODELS).index(row["model"])):
            norms, errors = row["grad_norm"], row["error"]
            cells = [measurement["megatron-core"], measurement["verl"], row["model"], row["layout"]]
            cells += [f"{norms[column]:.7f}" for column in ("off", "stock", "fixed")]
            cells += [f"{errors[column]:.1e}" for column in ("stock", "fixed")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render(files: list[Path]) -> None:
    """Replace the table in the page."""
    measurements = [json.loads(file.read_text()) for file in files]
    text = PAGE.read_text()
    block = rf"\g<1>{table(measurements)}\g<2>"
    PAGE.write_text(re.sub(r"(<!-- table: .*? -->\n).*?(<!-- end of table -->)", block, text, flags=re.S))


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    if command == "measure":
        measure(Path(paths[0]))
    else:
        render([Path(path) for path in paths])
