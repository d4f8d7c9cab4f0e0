"""``python -m verl.trainer.main_ppo_sync`` up to its trainer's first validation, in a real Ray actor.

verl imports this module in the driver and in the actor (VERL_USE_EXTERNAL_MODULES). In the script it replaces what
needs GPUs and TransferQueue, so that ``TaskRunner.run`` gets to ``PPOTrainer._validate``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

BATCHES = "BATCHES_OF_THE_TEST"
ANSWER = "ANSWER_OF_THE_TEST"


class Nothing:
    """TransferQueue and the worker groups: nothing to start, nothing to stop."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def fit(trainer: Any) -> None:
    """In the actor, instead of ``PPOTrainer.fit``: one validation after another, as before training and after steps."""
    import verl_fixes
    from tests.stock.rollouts import validate

    metrics = [validate(batches, type(trainer)) for batches in json.loads(os.environ[BATCHES])]
    states = {record.name: str(record.state) for record in verl_fixes.status()}
    with open(os.environ[ANSWER], "w") as file:
        json.dump({"metrics": metrics, "states": states, "module": type(trainer).__module__, "pid": os.getpid()}, file)


def prepare(**_: Any) -> None:
    """In the driver, before the script's ``main`` hands over to ``run_ppo``."""
    script = sys.modules["__main__"]
    script.tq = Nothing()
    script.PPOTrainer.__init__ = lambda self, **_: setattr(self, "replay_buffer", Nothing())
    script.PPOTrainer.init_workers = lambda self: None
    script.PPOTrainer.fit = fit


def _install() -> None:
    import wrapt

    def replace(module: Any) -> None:
        module.validate_config = prepare

    if getattr(sys, "orig_argv", [""])[1:3] == ["-m", "verl.trainer.main_ppo_sync"]:
        wrapt.register_post_import_hook(replace, "verl.utils.config")


_install()
