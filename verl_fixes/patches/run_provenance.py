"""The experiment tracker knows which fixes a run had.

What goes wrong: months later nobody can tell whether a run's numbers came from stock code.

What the wrapper does: ``verl_fixes`` (version, hash, states) goes into the config that ``Tracking`` hands to its
backends. A backend that refuses it gets the config as it was.

When it can go: never, it is about this package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from verl_fixes import identity
from verl_fixes.arguments import Call
from verl_fixes.patch import Patch, Target
from verl_fixes.stderr import say
from verl_fixes.trees import replace_items

_TRACKING = ("self", "project_name", "experiment_name", "default_backend", "config")


def add_to_config(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``Tracking.__init__(self, project_name, experiment_name, default_backend, config)``."""
    call = Call(original, _TRACKING, args, kwargs)
    config = call["config"]
    if not isinstance(config, Mapping) or "verl_fixes" in config:
        return call()
    if "mlflow" in call["default_backend"] and os.environ.get("MLFLOW_RUN_ID"):
        say("the config of the resumed mlflow run does not name its fixes: mlflow refuses params that changed")
        return call()
    mine = identity.of_this_process()
    fixes = {"verl_fixes": {"version": mine.version, "hash": mine.digest, "states": dict(mine.states)}}
    try:
        extended = replace_items(config, fixes)
    except Exception:  # an OmegaConf config that takes no new keys
        extended = {**config, **fixes}
    try:
        return call(config=extended)
    except Exception as error:
        result = call()  # raises again what has nothing to do with us
        say(f"the run's config does not name its fixes, a backend refused them: {type(error).__name__}: {error}")
        return result


PATCH = Patch(
    name="run-provenance",
    title="The experiment tracker names the fixes of a run",
    hurts="Months later nobody can tell whether the numbers of a run came from stock code or from which fixes.",
    does=(
        "Adds verl_fixes (version, hash, states) to the config that verl's Tracking hands to wandb, mlflow, swanlab "
        "and the others. A backend that refuses gets the config as it was, and the run goes on."
    ),
    removable="Never: it is about this package.",
    upstream=(),
    fixed_in="none yet",
    targets=(
        Target(
            module="verl.utils.tracking",
            qualname="Tracking.__init__",
            wrapper=add_to_config,
            question=None,
        ),
    ),
    plumbing=True,
)
