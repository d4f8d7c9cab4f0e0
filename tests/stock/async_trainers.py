"""The answers of tests/stock/jobs/async_trainers.py, measured once for all modules that look at them."""

from __future__ import annotations

import functools
from typing import Any

from tests.processes import call
from tests.stock.conftest import RELEASE

EXISTS = RELEASE >= "0.9"
"""The V1 trainers and their replay buffer came with verl 0.9.0."""
BUGGY = RELEASE == "0.9.0"
PHASES = ("stock", "fixed", "back")


@functools.cache
def measured() -> dict[str, Any]:
    """What both patches change, case by case, in three phases."""
    dapo_phases = PHASES if BUGGY else ("stock",)  # where nothing of it is wrapped
    answers: dict[str, Any] = call("tests.stock.jobs.async_trainers:measure", dapo_phases=dapo_phases)
    return answers
