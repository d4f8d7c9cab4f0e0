"""The tables of README.md that are rendered; ``python -m tests.readme`` writes them into the file."""

from __future__ import annotations

import re
import sys

from tests.processes import ROOT
from verl_fixes.catalog import CATALOG
from verl_fixes.report import markdown_table

README = ROOT / "README.md"


def states_table() -> str:
    """tests/states.toml as Markdown: a line for each patch, a column for each release."""
    import tomllib

    states = tomllib.loads((ROOT / "tests" / "states.toml").read_text())
    releases = [key for key in next(iter(states.values())) if key != "targets"]
    lines = [f"| | {' | '.join(releases)} |", "|---" * (len(releases) + 1) + "|"]
    lines += [f"| `{name}` | {' | '.join(row[release] for release in releases)} |" for name, row in states.items()]
    return "\n".join(lines) + "\n"


def rendered(text: str) -> str:
    """The README with its tables as they should be."""
    for name, table in (("fixes", markdown_table(CATALOG)), ("states", states_table())):
        text = re.sub(f"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", rf"\g<1>{table}\g<2>", text, flags=re.S)
    return text


def main() -> int:
    """Write the tables."""
    README.write_text(rendered(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
