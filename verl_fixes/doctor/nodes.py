"""Node by node: what a Ray cluster has, and where it differs from this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_fixes import activation, propagation, toggles
from verl_fixes.doctor import determinism, survey
from verl_fixes.doctor.findings import Finding, error, ok, warning
from verl_fixes.identity import Identity
from verl_fixes.patch import State
from verl_fixes.patches import ray_propagation
from verl_fixes.version import __version__

COLUMNS = ("python", "verl", "verl_fixes", "identity", "torch", "ray", "megatron-core")
"""What is compared, in the order of the table."""

_GRACE = 20
"""Seconds for starting Python, importing Ray and cleaning up, above what the survey allows itself."""


@dataclass(frozen=True)
class Node:
    """One node, or this machine.

    Args:
        node_id, ip, hostname: as Ray knows them.
        answer: what :func:`verl_fixes.doctor.survey.describe` found there; empty when it did not answer.
        failure: why it did not answer.
    """

    node_id: str
    ip: str
    hostname: str
    answer: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""

    @property
    def label(self) -> str:
        """How people find it."""
        return f"{self.hostname or 'node'} ({self.ip}, {self.node_id[:8]})"

    def as_dict(self) -> dict[str, Any]:
        """The node as plain data, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Cluster:
    """What came of asking. ``trouble`` says why there are no nodes, or not all of them could be asked."""

    here: Node
    nodes: Sequence[Node] = ()
    trouble: str = ""


def ask(address: str, timeout: float) -> Cluster:
    """Ask every alive node once, in the environment that a job of this process would give its workers.

    Args:
        address: of a running cluster, ``auto`` for the one of this machine.
        timeout: seconds for the connection, and again for the nodes.
    """
    here = Node("", "this machine", "", survey.describe())
    lines, trouble = _survey(address, timeout)
    nodes: dict[str, Node] = {}
    for line in lines:
        if "nodes" in line:
            silent = f"did not answer within {timeout:g} s"
            nodes = {i: Node(i, n["ip"], n["hostname"], failure=silent) for i, n in line["nodes"].items()}
        elif "node" in line:
            old = nodes[line["node"]]
            nodes[old.node_id] = Node(
                old.node_id, old.ip, old.hostname, line.get("answer", {}), line.get("failure", "")
            )
        trouble = line.get("error", trouble)
    return Cluster(here, tuple(nodes.values()), "" if nodes else trouble)


def _survey(address: str, timeout: float) -> tuple[list[dict[str, Any]], str]:
    """Run the survey in a process that can be killed: the lines that it said, and why they may be too few."""
    with subprocess.Popen(
        [sys.executable, "-", address, str(timeout), json.dumps(_of_a_worker())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    ) as process:
        try:
            out, noise = process.communicate(Path(survey.__file__).read_text(), timeout=2 * timeout + _GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            out, noise = process.communicate()
            noise += f"\nno answer within {2 * timeout + _GRACE:g} s"
        except BaseException:
            process.kill()
            raise
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return lines, (noise.strip().splitlines() or ["Ray ended without a word"])[-1]


def _of_a_worker() -> dict[str, str]:
    """What a job of this process would add to the environment of its workers."""
    record = next((r for r in activation.status() if r.name == ray_propagation.PATCH.name), None)
    if record is None or record.expected is not State.APPLIED:
        return {}
    skipped = (toggles.DRIVER, toggles.STRICT)  # the comparison is made here, and must not end the worker
    return {k: v for k, v in propagation.environment_of_this_process().items() if k not in skipped}


def findings(address: str, cluster: Cluster, environ: Mapping[str, str]) -> list[Finding]:
    """What is wrong with the nodes. An unlike plugin is an error; unlike fixes are one where workers are strict."""
    check = "ray"
    if cluster.trouble:
        way_out = "Give the address of the head node's GCS, as in `--ray 10.0.0.1:6379`, from a machine of the cluster."
        return [error(check, f"cannot ask the cluster at {address}: {cluster.trouble}", way_out)]
    found = [finding for node in cluster.nodes for finding in _node(node, cluster.here, environ)]
    found += [
        f for n in cluster.nodes if n.answer for f in determinism.of_a_node(n.label, n.answer, cluster.here.answer)
    ]
    return found or [ok(check, f"all {len(cluster.nodes)} nodes have what this machine has")]


def _node(node: Node, here: Node, environ: Mapping[str, str]) -> list[Finding]:
    check = "ray"
    theirs, ours = node.answer, here.answer
    if node.failure:
        way_out = "Look at the raylet's log on that node, or raise --timeout."
        return [error(check, f"{node.label} is unreachable: {node.failure}", way_out)]
    install = f"Run `pip install verl-fixes=={__version__}` on {node.ip}, in the environment of its Ray workers."
    if not theirs["verl_fixes"]:
        return [error(check, f"{node.label}: verl-fixes is not installed", install), *_packages(node, here)]
    if theirs["trouble"]:
        return [error(check, f"{node.label}: verl-fixes does not work: {theirs['trouble']}", install)]
    found = []
    if theirs["verl_fixes"] != ours["verl_fixes"]:
        message = f"{node.label} has verl-fixes {theirs['verl_fixes']}, this machine {ours['verl_fixes']}"
        found.append(error(check, message, install))
    elif theirs["identity"] != ours["identity"]:
        message = f"{node.label} runs {Identity.decode(theirs['identity'])}; this machine runs "
        message += str(Identity.decode(ours["identity"]))
        way_out = "Install the same verl on both, and set the same VERL_FIXES variables, or none, for `ray start`."
        say = error if toggles.is_strict(environ) else warning
        found.append(say(check, message, way_out))
    return [*found, *_packages(node, here)]


def _packages(node: Node, here: Node) -> list[Finding]:
    unlike = [name for name in differing(node, here) if name not in ("verl_fixes", "identity")]
    if not unlike:
        return []
    sides = ", ".join(
        f"{name} {node.answer[name] or 'missing'} (here {here.answer[name] or 'missing'})" for name in unlike
    )
    return [warning("ray", f"{node.label} has {sides}", "Give all nodes the same environment.")]


def differing(node: Node, here: Node) -> list[str]:
    """The columns in which a node that answered is unlike this machine."""
    return [name for name in COLUMNS if node.answer and node.answer.get(name) != here.answer.get(name)]


def shown(node: Node, column: str) -> str:
    """One cell of the table."""
    value = node.answer.get(column, "")
    if column == "identity":
        return Identity.decode(value).digest if value else ""
    if column == "verl_fixes" and node.failure:
        return "unreachable"
    return value or ("not installed" if node.answer else "")
