"""Backported fixes for a stock verl. Importing this package activates them; see the README."""

from __future__ import annotations

from verl_fixes.activation import activate, activate_on_import, deactivate, is_own_command_line, status
from verl_fixes.patch import Patch, State
from verl_fixes.records import Record
from verl_fixes.version import __version__

__all__ = ["Patch", "Record", "State", "__version__", "activate", "deactivate", "status"]

if not is_own_command_line():  # it activates for itself, where it can turn an error into words
    activate_on_import()
