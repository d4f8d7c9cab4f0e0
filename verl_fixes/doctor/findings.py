"""What a check has to say: plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum


class Severity(str, Enum):
    """How bad it is. What could not be checked is INFO, never OK."""

    ERROR = "error"
    """A run would go wrong, or without a fix that it counts on. The exit code is 1."""
    WARNING = "warning"
    """A run goes wrong under a condition that the doctor cannot see."""
    INFO = "info"
    OK = "ok"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Finding:
    """One answer of one check.

    Args:
        check: what was looked at, in a word or two.
        severity: how bad it is.
        message: what is the case.
        way_out: what to do about it; empty where there is nothing to do.
        link: where upstream tells more; empty where there is no such place.
    """

    check: str
    severity: Severity
    message: str
    way_out: str = ""
    link: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as plain data, ready for JSON."""
        return {name: str(value) for name, value in asdict(self).items()}


def ok(check: str, message: str) -> Finding:
    """Looked at, and in order."""
    return Finding(check, Severity.OK, message)


def info(check: str, message: str, way_out: str = "", link: str = "") -> Finding:
    """Worth knowing, or not checked."""
    return Finding(check, Severity.INFO, message, way_out, link)


def warning(check: str, message: str, way_out: str, link: str = "") -> Finding:
    """Wrong under a condition that the doctor cannot see."""
    return Finding(check, Severity.WARNING, message, way_out, link)


def error(check: str, message: str, way_out: str, link: str = "") -> Finding:
    """Wrong."""
    return Finding(check, Severity.ERROR, message, way_out, link)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether the exit code is 1."""
    return any(finding.severity is Severity.ERROR for finding in findings)
