"""run-provenance on the real Tracking, and the one log line of a process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import call

JOBS = "tests.stock.jobs.tracking"


def test_every_backend_gets_the_fixes_of_the_run_in_its_config() -> None:
    answer = call(f"{JOBS}:configs", refuse=False)
    for phase in ("stock", "back"):
        assert not any("verl_fixes" in key for config in answer[phase]["seen"].values() for key in config)
    fixed = answer["fixed"]
    assert set(fixed["seen"]) == {"wandb", "swanlab", "mlflow", "trackio"}
    for name in ("wandb", "swanlab", "trackio"):
        fixes: Any = fixed["seen"][name]["verl_fixes"]
        assert fixes["version"] == "0.1.0"
        assert len(fixes["hash"]) == 12
        assert fixes["states"]["per-token-loss"] in ("applied", "refined")
        assert fixed["seen"][name]["trainer"] == {"lr": 1.0}
    assert any("verl_fixes" in key for key in fixed["seen"]["mlflow"])
    assert fixed["caller"] == {"trainer": {"lr": 1.0}}


def test_a_backend_that_refuses_does_not_stop_the_run() -> None:
    answer = call(f"{JOBS}:configs", refuse=True)
    for phase in ("stock", "fixed", "back"):
        assert answer[phase]["logger"] == ["console"], answer[phase]
        assert answer[phase]["seen"]["wandb"] == {"trainer": {"lr": 1.0}}


def test_no_config_is_left_alone() -> None:
    answer = call(f"{JOBS}:without_config")
    assert answer["stock"] == answer["fixed"] == answer["back"] == ["console"]


@pytest.mark.parametrize("rank, level", [("0", "INFO"), ("3", "DEBUG")])
def test_one_log_line_a_process(rank: str, level: str) -> None:
    lines = call(f"{JOBS}:log_lines", rank=rank)
    assert [line[0] for line in lines] == [level]
    assert lines[0][1].startswith("verl-fixes 0.1.0 [")
    assert "detach-outputs" in lines[0][1]
