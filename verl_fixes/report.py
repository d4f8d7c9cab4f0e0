"""Records to a table, JSON and Markdown. Needs rich only for the table."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_fixes import probe
from verl_fixes.patch import TROUBLE, Patch, State
from verl_fixes.records import Record
from verl_fixes.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {
    State.APPLIED: "green",
    State.REFINED: "green",
    State.PENDING: "cyan",
    State.UPSTREAM: "dim",
    State.ABSENT: "dim",
    State.DISABLED: "yellow",
    State.DRIFTED: "red",
    State.FAILED: "red",
}


def installed_verl() -> str | None:
    """The version of the verl that this Python would import, read from its files; None when there is none."""
    source = probe.locate("verl")
    if source is None:
        return None
    for root in source.roots:
        file = root / "version" / "version"
        if file.is_file():
            return file.read_text().strip()
    return "of unknown version"


def heading() -> str:
    """One line: this package, the verl that it looks at, and where that one is."""
    source, version = probe.locate("verl"), installed_verl()
    where = f"verl {version} in {source.roots[0]}" if source and version else "verl is not installed"
    return f"verl-fixes {__version__}, {where}"


def default_path() -> str:
    """Which workers the default configuration trains with, for releases that have two kinds; else empty."""
    source = probe.locate("verl")
    files = [root / "trainer" / "config" / "ppo_trainer.yaml" for root in source.roots] if source else []
    if not any("use_legacy_worker_impl: auto" in _text(file) for file in files):
        return ""
    return (
        "By default this release trains RL through its legacy workers (workers/actor, workers/critic), and SFT through "
        "the engine workers. trainer.use_legacy_worker_impl=disable takes the engine workers for RL, too."
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def in_trouble(records: Sequence[Record]) -> bool:
    """Whether something is drifted or failed, or will be once its module is imported."""
    return any(record.state in TROUBLE or record.expected in TROUBLE for record in records)


def as_json(records: Sequence[Record]) -> str:
    """The whole status as JSON: the versions, and one object a patch with the fields of :class:`Record`."""
    status: dict[str, Any] = {
        "verl_fixes": __version__,
        "verl": installed_verl(),
        "default_path": default_path(),
        "patches": [record.as_dict() for record in records],
    }
    return json.dumps(status, indent=2)


def table(records: Sequence[Record]) -> Table:
    """The status for people: state and reason, the variable that switches it, the upstream link."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("patch", "state", "why", "switch", "upstream"):
        result.add_column(column, overflow="fold", no_wrap=column in ("patch", "switch"))
    for record in records:
        result.add_row(
            record.name, _state(record), _why(record), record.env, "\n".join(map(short_link, record.upstream))
        )
    return result


def _state(record: Record) -> str:
    state = f"[{_COLOURS[record.state]}]{record.state}[/]"
    if record.expected is not record.state:
        state += f"\nthen [{_COLOURS[record.expected]}]{record.expected}[/]"
    return state


def _why(record: Record) -> str:
    if record.state is not State.PENDING:
        return record.reason
    waiting = [t for t in record.targets if t.state is State.PENDING]
    reason = next(t.reason.partition(";")[0] for t in waiting if t.expected is record.expected)
    return f"{reason}; goes in with " + ", ".join(dict.fromkeys(_short_module(t.module) for t in waiting))


def _short_module(module: str) -> str:
    for prefix in ("verl.", "workers.", "utils.", "trainer.", "models.", "megatron.core.transformer."):
        module = module.removeprefix(prefix)
    return module.removesuffix(".transformer_impl")


def short_link(url: str) -> str:
    """``https://github.com/owner/name/pull/1`` as ``name#1``, anything else as its host."""
    parts = url.split("/")
    return f"{parts[-3]}#{parts[-1]}" if parts[-2] in ("pull", "issues") else parts[2]


def markdown_table(catalog: Sequence[Patch]) -> str:
    """The table of fixes in the README."""
    lines = ["| fix | what you get | upstream | in verl since | switch | default |", "|---|---|---|---|---|---|"]
    for patch in catalog:
        links = ", ".join(f"[{short_link(url)}]({url})" for url in patch.upstream)
        default = "on" if patch.default else "off"
        lines.append(f"| `{patch.name}` | {patch.title} | {links} | {patch.fixed_in} | `{patch.env}` | {default} |")
    return "\n".join(lines) + "\n"


def explanation(patch: Patch, record: Record) -> str:
    """Everything about one patch, for a terminal."""
    blocks = [
        f"{patch.name}: {patch.title}",
        _paragraph("What goes wrong without it", patch.hurts),
        _paragraph("What it does", patch.does),
        _paragraph("Here", f"{record.state}. {record.reason}."),
        "  Targets\n" + "\n".join(f"    {t.module}:{t.qualname}\n      {_target_state(t)}" for t in record.targets),
        _paragraph("How to switch it off", f"{patch.env}=0 (on: {patch.env}=1; default: {_default(patch)})"),
        _paragraph("When it can go", patch.removable),
    ]
    if patch.upstream:
        blocks.append("  Upstream\n" + "\n".join(f"    {url}" for url in patch.upstream))
    return "\n\n".join(blocks) + "\n"


def _default(patch: Patch) -> str:
    return "on" if patch.default else "off"


def _target_state(target: Any) -> str:
    then = f", then {target.expected}" if target.expected is not target.state else ""
    return f"{target.state}{then}: {target.reason}"


def _paragraph(title: str, text: str) -> str:
    return f"  {title}\n" + textwrap.fill(text, width=100, initial_indent="    ", subsequent_indent="    ")
