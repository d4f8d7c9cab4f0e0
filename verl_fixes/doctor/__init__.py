"""``verl-fixes doctor``: what can keep the fixes from running, in this process and on the nodes of a Ray cluster."""

from __future__ import annotations

from verl_fixes.doctor.findings import Finding, Severity, has_errors

__all__ = ["Finding", "Severity", "has_errors"]
