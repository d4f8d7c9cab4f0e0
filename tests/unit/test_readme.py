"""The README's tables are in step with the patches and their states, and its words with what is there."""

from __future__ import annotations

import re
import sys

import pytest

from tests.processes import ROOT
from verl_fixes.catalog import CATALOG
from verl_fixes.patch import State
from verl_fixes.toggles import ALL, LOG, STRICT


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_tables_are_in_step() -> None:
    from tests.readme import README, rendered

    text = README.read_text()
    assert rendered(text) == text, "run `python -m tests.readme`"
    assert all(f"| `{patch.name}` |" in text for patch in CATALOG)


def test_every_state_and_switch_is_explained() -> None:
    text = (ROOT / "README.md").read_text()
    explained = re.findall(r"^\| `(\w+)` \| .* \|$", text.split("## States")[1].split("##")[0], re.M)
    assert explained == [state.value for state in State]
    switches = text.split("## Switches")[1].split("##")[0]
    assert all(variable in switches for variable in (f"{ALL}=0", STRICT, LOG))


def test_the_changelog_names_every_patch() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert all(f"`{patch.name}`" in text for patch in CATALOG)
    assert "## [Unreleased]" in text
