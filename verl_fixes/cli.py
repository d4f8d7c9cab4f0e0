"""``verl-fixes status | explain | doctor | run | demo``. Exit codes: 0 fine, 1 something drifted or failed, 2 usage."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from verl_fixes import toggles
from verl_fixes.activation import activate
from verl_fixes.catalog import CATALOG
from verl_fixes.doctor.command import doctor
from verl_fixes.errors import ToggleError
from verl_fixes.patch import Patch
from verl_fixes.propagation import EXTERNAL_MODULES, with_package
from verl_fixes.records import Record
from verl_fixes.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="verl-fixes")
def main() -> None:
    """Gives a stock verl the fixes that were merged after its release."""


main.add_command(doctor)


@main.command("status")
@click.option("--json", "as_json", is_flag=True, help="For programs: every record, with its targets.")
def status_command(as_json: bool) -> None:
    """What is or will be fixed in the installed verl, and why. Imports neither verl nor torch."""
    from verl_fixes import report

    records = _activated()
    if as_json:
        click.echo(report.as_json(records))
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(report.heading(), highlight=False, soft_wrap=True)
        if path := report.default_path():
            console.print(path, highlight=False)
        console.print(report.table(records))
    sys.exit(1 if report.in_trouble(records) else 0)


@main.command()
@click.argument("name")
def explain(name: str) -> None:
    """What goes wrong without the patch NAME, who is hit, what it does, how to switch it off."""
    from verl_fixes import report

    records = _activated()
    patch = _patch(name)
    record = next(record for record in records if record.name == patch.name)
    click.echo(report.explanation(patch, record), nl=False)
    sys.exit(1 if report.in_trouble([record]) else 0)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: Sequence[str]) -> None:
    """Run COMMAND with the fixes, on any verl: verl-fixes run -- python -m verl.trainer.main_ppo ...

    Adds verl_fixes to VERL_USE_EXTERNAL_MODULES and becomes the command: same process, stdin, signals, exit code.
    """
    _check_environment()
    environment = {**os.environ, EXTERNAL_MODULES: with_package(os.environ.get(EXTERNAL_MODULES, ""))}
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        click.echo(f"verl-fixes: cannot run {command[0]!r}: {error.strerror}", err=True)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


@main.command()
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write the pictures to this PNG file.")
def demo(plot: Path | None) -> None:
    """Run stock verl 0.8.0's own engines on this machine's CPU, without and with the fixes, and compare."""
    from verl_fixes.demo import before_after

    sys.exit(before_after.run(plot))


def _activated() -> list[Record]:
    _check_environment()
    return activate()


def _check_environment() -> None:
    """Turn a toggle that names nothing into a usage error."""
    try:
        toggles.read(os.environ, CATALOG)
    except ToggleError as error:
        raise click.UsageError(str(error)) from error


def _patch(name: str) -> Patch:
    names = [patch.name for patch in CATALOG]
    if name in names:
        return CATALOG[names.index(name)]
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    raise click.UsageError(f"There is no patch {name!r}.{hint} Patches: {', '.join(names)}.")
