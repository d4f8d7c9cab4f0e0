"""val-none-safe and val-accuracy: verl#7781.

``process_validation_metrics`` on every release; whole validations of the V1 trainer (0.9) and main_ppo_sync (0.8.0).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import call, python
from tests.stock.conftest import RELEASE
from tests.stock.jobs.sync_script import ANSWER, BATCHES

NATIVE = RELEASE >= "0.9.1"
buggy = pytest.mark.skipif(NATIVE, reason="this release has the fix")
trainer = pytest.mark.skipif(RELEASE < "0.8", reason="a failed validation session stops the run on this release")
SEEDS = 40
EXPECTED: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("validation_of_0_9_1.json").read_text())
"""What verl 0.9.1 answers to each scenario."""


def good(acc: float, pred: str, **more: Any) -> dict[str, Any]:
    return {"reward": acc, "acc": acc, "pred": pred, **more}


FAILED = None
SCENARIOS: dict[str, list[dict[str, Any]]] = {
    "failed": [
        {
            "data_source": ["math", "math", "math", "math"],
            "sessions": [
                [good(1, "A"), good(0, "B")],
                [FAILED, FAILED],
                [FAILED, good(1, "A", late=1)],
                [good(1, "A"), good(1, "A")],
            ],
        },
        {
            "data_source": ["math", "code"],
            "n": [4, 1],
            "sessions": [[good(1, "A"), FAILED, good(0, "B"), good(1, "A")], [good(1, "A")]],
        },
    ],
    "all there": [
        {"data_source": ["math", "math"], "sessions": [[good(1, "A"), good(0, "B")], [good(1, "B"), good(1, "B")]]}
    ],
    "no acc": [{"data_source": ["chat"], "sessions": [[{"reward": 0.5}, FAILED]]}],
    "mixed": [
        {
            "data_source": ["math", "chat"],
            "sessions": [[good(1, "A"), FAILED], [{"reward": 0.5}, FAILED]],
        }
    ],
    "without a data source": [{"sessions": [[good(1, "A"), FAILED], [FAILED, FAILED]]}],
}
MIXED = ("mixed",)
"""Stock 0.8.0 and 0.9.0 stop here: sessions of one data source lack a reward key that those of another have."""


SOME_NONE: dict[str, Any] = {
    "infos": {"reward": [1.0, 0.5, 0.25], "acc": [1, None, None], "note": [None, "text", None], "never": [None] * 3},
    "sources": ["math", "math", "chat"],
    "uids": ["a", "a", "b"],
}


@pytest.fixture(scope="module")
def job() -> Any:
    return call("tests.stock.jobs.validation:everything", scenarios=SCENARIOS, seeds=SEEDS, explicit=SOME_NONE)


@pytest.fixture
def processed(job: Any) -> Any:
    return job["processed"]


@pytest.fixture
def answer(job: Any) -> Any:
    return job["validations"]


def test_values_that_are_there_count_under_every_name_of_the_function(job: Any) -> None:
    answer = job["explicit"]
    fixed = answer["fixed"]
    assert len(fixed) == (2 if RELEASE < "0.8" else 3)
    for metrics in fixed:
        assert metrics == fixed[0]
        assert metrics["math"]["acc"] == {"mean@1": 1.0}
        assert metrics["math"]["reward"]["mean@2"] == 0.75
        assert metrics["chat"] == {"reward": {"mean@1": 0.25}}
        assert set(metrics["math"]) == {"reward", "acc"}
    if NATIVE:
        assert answer["stock"] == answer["back"] == fixed
    else:
        assert all(error.startswith("TypeError: unsupported operand") for error in answer["stock"] + answer["back"])


def test_random_sessions_give_what_0_9_1_gives(processed: Any) -> None:
    assert processed["none"]["fixed"] == {"equal": SEEDS}
    for phase in ("stock", "back"):
        if NATIVE:
            assert processed["none"][phase] == {"equal": SEEDS}
        else:
            assert processed["none"][phase]["TypeError"] > SEEDS / 2


def test_without_none_nothing_changes(processed: Any) -> None:
    assert [*processed["no none"].values()] == [{"equal": SEEDS}] * 3


@trainer
def test_random_failures_are_counted_as_0_9_1_counts_them(processed: Any) -> None:
    assert processed["both"]["fixed"] == processed["accuracy"]["fixed"] == {"equal": SEEDS}
    assert processed["stock counts"].get("different", 0) > SEEDS / 4 or NATIVE


@trainer
def test_the_numbers_of_0_9_1_on_every_release(answer: Any) -> None:
    assert answer["both"]["fixed"] == {name: pytest.approx(metrics, rel=1e-12) for name, metrics in EXPECTED.items()}
    if NATIVE:
        assert answer["both"]["stock"] == answer["both"]["fixed"] == answer["both"]["back"]


def test_these_numbers_by_hand() -> None:
    """Prompts of math: [1, 0], two failures, a failure and a session that finishes late, [1, 1]; 4: [1, -, 0, 1]."""
    failed = EXPECTED["failed"]
    assert failed["val-aux/math/acc/mean@2"] == (0.5 + 0 + 0.5 + 1) / 4
    assert failed["val-core/math/acc/mean@4"] == (1 + 0 + 0 + 1) / 4
    assert failed["val-aux/math/acc_success_only/mean@1"] == 1
    assert failed["val-aux/math/acc_success_only/mean@2"] == (0.5 + 1) / 2
    assert failed["val-aux/math/acc_success_only/mean@3"] == pytest.approx(2 / 3)
    assert failed["val-core/code/acc/mean@1"] == 1
    assert failed["val-aux/math/reward/mean@1"] == 1
    assert "val-core/math/acc/maj@4/mean" not in failed
    assert EXPECTED["mixed"]["val-core/chat/reward/mean@1"] == 0.5
    assert not any(name.startswith("val-core/chat/acc") for name in EXPECTED["mixed"])


@trainer
@buggy
def test_stock_takes_the_accuracy_over_the_sessions_that_came_back(answer: Any) -> None:
    for phase in ("stock", "back"):
        failed = answer["both"][phase]["failed"]
        assert failed["val-core/math/acc/mean@3"] == pytest.approx(2 / 3)
        assert failed["val-aux/math/acc/mean@2"] == 0.75
        assert not any("acc_success_only" in name for name in failed)
        assert answer["both"][phase]["without a data source"]["val-core/unknown/acc/mean@1"] == 1
        for name in MIXED:
            assert answer["both"][phase][name].startswith("TypeError: unsupported operand type(s) for")


@trainer
@buggy
def test_the_old_figure_stays_and_where_nothing_failed_nothing_changes(answer: Any) -> None:
    for name, fixed in answer["both"]["fixed"].items():
        stock = answer["both"]["stock"][name]
        if name not in MIXED:
            old = {k.replace("val-core/", "val-aux/"): v for k, v in stock.items() if "/acc/" in k}
            new = {k.replace("/acc_success_only/", "/acc/"): v for k, v in fixed.items() if "acc_success_only" in k}
            assert new == old
    stock, fixed = (answer["both"][phase]["all there"] for phase in ("stock", "fixed"))
    assert stock == {k: v for k, v in fixed.items() if "acc_success_only" not in k}
    assert answer["both"]["stock"]["no acc"] == answer["both"]["fixed"]["no acc"]


@trainer
@buggy
def test_each_of_the_two_fixes_works_without_the_other(answer: Any) -> None:
    assert answer["accuracy"]["fixed"] == answer["both"]["fixed"]
    alone, stock = answer["none-safe"]["fixed"], answer["both"]["stock"]
    assert {k: v for k, v in alone.items() if k not in MIXED} == {k: v for k, v in stock.items() if k not in MIXED}
    mixed = alone["mixed"]
    assert (mixed["val-core/math/acc/mean@1"], mixed["val-core/chat/reward/mean@1"]) == (1, 0.5)


@trainer
def test_nothing_is_left_behind_and_nothing_is_handed_on(answer: Any) -> None:
    for phase in ("fixed",) if not NATIVE else ("stock", "fixed", "back"):
        first, second, dead, third = answer["trainer"][phase]["one after another"]
        assert first == [pytest.approx(EXPECTED["failed"]), True]
        assert second == third == [pytest.approx(EXPECTED["all there"]), True]
        assert dead == ["RuntimeError: the replay buffer is gone", True]


@trainer
def test_several_trainers_at_once(answer: Any) -> None:
    means = [{k: v for k, v in EXPECTED[name].items() if "/mean@" in k} for name in ("failed", "all there")]
    expected = [[pytest.approx(metrics), True] for metrics in means]
    assert answer["trainer"]["fixed"]["threads"] == expected * 2


@trainer
def test_overrides(answer: Any) -> None:
    heirs = answer["trainer"]["fixed"]["overrides"]
    once = {k: v for k, v in EXPECTED["failed"].items() if k.startswith("val-core/math/acc")}
    for name in ("Later", "Looks"):
        assert heirs[name] == [pytest.approx(EXPECTED["failed"]), True]
    assert heirs["Own"] == [{"batches": 2}, True]
    twice, clean = heirs["Twice"]
    assert clean
    for which in ("first", "second"):
        assert {k: twice[f"{which} {k}"] for k in once} == pytest.approx(once)
    assert "second val-aux/math/acc/mean@2" not in twice  # no prompt of the first validation counts in the second
    assert answer["trainer"]["back"] == answer["trainer"]["stock"]


SCRIPT = ("failed", "mixed", "all there")


@pytest.mark.skipif(RELEASE != "0.8.0", reason="this release has no trainer that runs as a script")
def test_a_trainer_that_is_run_as_a_script_and_pickled_by_value(tmp_path: Path) -> None:
    """``python -m verl.trainer.main_ppo_sync`` with Ray: the trainer's class lives in ``__main__``."""
    file = tmp_path / "answer.json"
    cluster = {"include_dashboard": "false", "object_store_memory": 100_000_000}
    done = python(
        *("-m", "verl.trainer.main_ppo_sync", f"hydra.run.dir={tmp_path}", "hydra.output_subdir=null"),
        *("ray_kwargs.ray_init.num_cpus=2", *(f"+ray_kwargs.ray_init.{name}={v}" for name, v in cluster.items())),
        VERL_USE_EXTERNAL_MODULES="tests.stock.jobs.sync_script,verl_fixes",
        VERL_FIXES_VAL_ACCURACY="1",
        RAY_AUTH_MODE="disabled",
        **{BATCHES: json.dumps([SCENARIOS[name] for name in SCRIPT]), ANSWER: str(file)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(file.read_text())
    assert answer["module"] == "__main__"
    assert answer["states"]["val-none-safe"] == answer["states"]["val-accuracy"] == "applied"
    assert answer["metrics"] == [pytest.approx(EXPECTED[name]) for name in SCRIPT]
