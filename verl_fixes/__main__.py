"""``python -m verl_fixes`` is ``verl-fixes``."""

from verl_fixes.cli import main

main(prog_name="verl-fixes")
