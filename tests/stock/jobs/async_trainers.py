"""Everything that is measured on a TransferQueue, in one process: it takes Ray and some seconds to start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.stock.jobs import dapo_reward_filter, resume_warmup
from tests.stock.jobs import transfer_queue as queue
from tests.stock.jobs.phases import phases


def measure(dapo_phases: Sequence[str]) -> dict[str, Any]:
    """Each module's cases on stock code, with the fixes, and on stock code again."""
    for mode in ("sync", *resume_warmup.MODES):
        queue.trainer_class(mode)
    with queue.transfer_queue():
        return {
            "resume-warmup": phases(resume_warmup.measure),
            "dapo-reward-filter": phases(dapo_reward_filter.measure, only=dapo_phases),
        }
