"""What verl's Tracking hands to its backends, which are stand-ins: other people's packages, made for a network."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.stock.jobs.phases import phases


def _backends(configs: dict[str, Any], refuse: bool) -> None:
    def take(name: str, config: Any) -> Any:
        configs[name] = dict(config)
        if refuse and "verl_fixes" in config:
            raise TypeError(f"{name} takes no such config")
        return SimpleNamespace(experiment_id="1")

    def module(name: str, **attributes: Any) -> None:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes)

    nothing: Any = lambda *args, **kwargs: SimpleNamespace(experiment_id="1")  # noqa: E731
    module("wandb", init=lambda config=None, **_: take("wandb", config), Settings=nothing)
    module("swanlab", init=lambda config=None, **_: take("swanlab", config), login=nothing)
    module(
        "mlflow",
        log_params=lambda params: take("mlflow", params),
        set_tracking_uri=nothing,
        set_experiment=nothing,
        start_run=nothing,
    )
    module("trackio", init=lambda config=None, **_: take("trackio", config))
    module("trackio.context_vars", current_run=SimpleNamespace(get=lambda: None))
    sys.modules["trackio"].context_vars = sys.modules["trackio.context_vars"]  # type: ignore[attr-defined]


def configs(refuse: bool) -> dict[str, Any]:
    """The config that each backend got, and the one that the caller still has."""
    from verl.utils.tracking import Tracking

    def measure() -> dict[str, Any]:
        seen: dict[str, Any] = {}
        _backends(seen, refuse)
        config = {"trainer": {"lr": 1.0}}
        names = ["wandb", "swanlab", "mlflow", "trackio", "console"]
        tracking = Tracking("project", "experiment", names if not refuse else ["wandb", "console"], config)
        tracking.logger.pop("wandb", None)  # its __del__ would finish a run
        tracking.logger = {"console": tracking.logger["console"]}
        return {"seen": seen, "caller": config, "logger": sorted(tracking.logger)}

    return phases(measure)


def without_config() -> dict[str, Any]:
    """A Tracking that got no config at all."""
    from verl.utils.tracking import Tracking

    return phases(lambda: sorted(Tracking("project", "experiment", "console").logger))


def log_lines(rank: str) -> list[list[str]]:
    """Level and text of what a process logs about its fixes when it imports verl and the plugin, more than once."""
    import importlib
    import os

    os.environ["RANK"] = rank
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl_fixes"]:
        del sys.modules[name]
    lines: list[list[str]] = []
    logger = logging.getLogger("verl_fixes")
    logger.setLevel(logging.DEBUG)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append([record.levelname, record.getMessage()])  # type: ignore[method-assign]
    logger.addHandler(handler)
    for _ in range(2):
        importlib.import_module("verl_fixes").activate()
    importlib.import_module("verl.workers.engine_workers")
    return lines
