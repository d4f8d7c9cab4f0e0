"""The command line of the doctor. Everything heavy is imported when it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from verl_fixes.doctor.findings import Finding, Severity, has_errors
from verl_fixes.errors import StrictError, ToggleError
from verl_fixes.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

    from verl_fixes.doctor.nodes import Cluster

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "dim", Severity.OK: "green"}


@click.command()
@click.option(
    "--ray",
    "address",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="Also ask every node of the Ray cluster at ADDRESS, by default the one of this machine.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the cluster, and again for its nodes.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: every finding, and every node.")
def doctor(address: str | None, timeout: float, as_json: bool) -> None:
    """What keeps the fixes from running, here and on the nodes of a Ray cluster. Imports verl.

    Exit codes: 0 no error, 1 an error was found, 2 usage.
    """
    from verl_fixes.doctor import nodes

    findings = local_findings()
    cluster = None
    if address is not None:
        cluster = nodes.ask(address, timeout)
        findings += nodes.findings(address, cluster, os.environ)
    if as_json:
        click.echo(_as_json(findings, cluster))
    else:
        _print(findings, cluster)
    sys.exit(1 if has_errors(findings) else 0)


def local_findings() -> list[Finding]:
    """Activate, import what the patches target, and run every check of this machine."""
    from verl_fixes import activation
    from verl_fixes.doctor import determinism, loaded, local, platforms

    environ = dict(os.environ)  # before verl changes it
    try:
        activation.activate()
    except ToggleError as error:
        raise click.UsageError(str(error)) from error
    except StrictError:
        pass  # the records say it
    imports = loaded.import_targets()
    records = activation.status()
    return [
        *local.route(environ),
        *local.versions(),
        *local.switches(environ),
        *local.patches(records),
        *imports,
        *loaded.early_bound(),
        *loaded.serialization(),
        *local.router_losses(records),
        *local.multi_token_prediction(),
        *local.router_replay(),
        *platforms.platform(environ, loaded.registered_platforms(), *loaded.detected_platform()),
        *determinism.determinism(environ, loaded.forwarded_to_workers()),
        *determinism.batch_invariance(),
    ]


def _as_json(findings: Sequence[Finding], cluster: Cluster | None) -> str:
    from verl_fixes import report

    answer: dict[str, Any] = {
        "verl_fixes": __version__,
        "verl": report.installed_verl(),
        "findings": [finding.as_dict() for finding in findings],
    }
    if cluster is not None:
        answer["here"] = cluster.here.as_dict()
        answer["nodes"] = [node.as_dict() for node in cluster.nodes]
    return json.dumps(answer, indent=2)


def _print(findings: Sequence[Finding], cluster: Cluster | None) -> None:
    from rich.console import Console

    from verl_fixes import report

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(report.heading(), highlight=False, soft_wrap=True)
    console.print(_table(findings))
    if cluster is not None and cluster.nodes:
        console.print(_node_table(cluster))
    counts = [
        (severity, sum(f.severity is severity for f in findings)) for severity in (Severity.ERROR, Severity.WARNING)
    ]
    console.print(", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts))


def _table(findings: Sequence[Finding]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("check", "severity", "what is the case, and what to do"):
        result.add_column(column, overflow="fold", no_wrap=column != "what is the case, and what to do")
    for finding in findings:
        words = "\n".join(filter(None, (finding.message, finding.way_out, finding.link)))
        severity = f"[{_COLOURS[finding.severity]}]{finding.severity}[/]"
        result.add_row(escape(finding.check), severity, escape(words))
    return result


def _node_table(cluster: Cluster) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from verl_fixes.doctor import nodes

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="* unlike this machine", caption_justify="left")
    result.add_column("node", overflow="fold")
    for column in nodes.COLUMNS:
        result.add_column({"verl_fixes": "verl-fixes", "identity": "fixes"}.get(column, column), overflow="fold")
    for node in (cluster.here, *cluster.nodes):
        unlike = nodes.differing(node, cluster.here)
        cells = []
        for column in nodes.COLUMNS:
            cell = escape(nodes.shown(node, column))
            bad = column in unlike or (node.failure and cell)
            cells.append(f"[red]{cell} *[/]" if bad else cell)
        result.add_row(escape("this machine" if node is cluster.here else node.label), *cells)
    return result
