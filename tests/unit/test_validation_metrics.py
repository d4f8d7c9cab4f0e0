"""What val-none-safe and val-accuracy do to rows, and which code they take for buggy."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_fixes.patches import val_accuracy
from verl_fixes.patches.val_accuracy import _loses_sessions, add_failed_sessions, count_expected_sessions
from verl_fixes.probe import Source, Verdict
from verl_fixes.validation_metrics import by_prompt, takes_none

sessions = st.tuples(st.sampled_from(["math", "chat"]), st.sampled_from("abcd"), st.sampled_from([0, 0.5, 1, None]))


@given(
    st.lists(sessions, max_size=20),
    st.dictionaries(st.tuples(st.sampled_from(["math", "chat", "gone"]), st.sampled_from("abcde")), st.integers(0, 5)),
)
def test_each_missing_session_is_one_zero(
    rows: list[tuple[str, str, float | None]], expected: dict[tuple[str, str], int]
) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    prompts = by_prompt(columns[0], columns[1], {"acc": columns[2]})
    counted = {source for source, _, acc in rows if acc is not None}
    assert add_failed_sessions(prompts, expected) is bool(counted)
    for source in ("math", "chat"):
        uids = prompts.get(source, {})
        assert set(uids) == {u for s, u, _ in rows if s == source} | {
            u for s, u in expected if s == source and s in counted
        }
        for uid, variables in uids.items():
            observed = [acc for s, u, acc in rows if (s, u) == (source, uid)]
            there = [acc for acc in observed if acc is not None]
            if source in counted and (source, uid) in expected:
                assert variables["acc_success_only"] == there
                assert variables["acc"][: len(there)] == there
                assert variables["acc"][len(there) :] == [0.0] * max(0, expected[source, uid] - len(there))
            else:
                assert variables == {"acc": observed}
    assert "gone" not in prompts


def test_keys_agree_whatever_type_a_data_source_has() -> None:
    prompts = by_prompt([7, 7], ["a", "b"], {"acc": [1, 1]})
    assert add_failed_sessions(prompts, {("7", "a"): 2, ("7", "c"): 1})
    assert {uid: variables["acc"] for uid, variables in prompts[7].items()} == {"a": [1, 0.0], "b": [1], "c": [0.0]}


class Trainer:
    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self.val_dataloader: Any = batches

    def validate(self, fail: bool = False) -> Any:
        loader = self.val_dataloader
        assert val_accuracy._expected.get() == {}
        assert len(loader) == len(list(loader)) == 1
        if fail:
            raise RuntimeError("no")
        return loader.index  # what a dataloader has of its own can be reached


@pytest.mark.parametrize("inner", [False, True])
def test_nothing_outlives_a_validation(inner: bool) -> None:
    batches = [{"uid": ["a"], "__rollout_n__": [1]}]
    trainer = Trainer(batches)

    def around(self: Trainer, fail: bool = False) -> Any:
        return count_expected_sessions(Trainer.validate, self, fail)

    validate = around if inner else Trainer.validate
    assert count_expected_sessions(validate, trainer) == batches.index
    assert trainer.val_dataloader is batches
    assert val_accuracy._expected.get() is None
    with pytest.raises(RuntimeError, match="no"):
        count_expected_sessions(validate, trainer, fail=True)
    assert trainer.val_dataloader is batches
    assert val_accuracy._expected.get() is None


def test_a_dataloader_that_the_loop_replaces_stays_replaced() -> None:
    trainer = Trainer([])

    def replace(self: Trainer) -> None:
        self.val_dataloader = "new"

    count_expected_sessions(replace, trainer)
    assert trainer.val_dataloader == "new"


METRICS = """
def process_validation_metrics(data_sources, sample_uids, infos_dict, seed=42{more}):
    has_pred = pred_vals is not None
    for var_vals in infos_dict:
        {body}
        bootstrap_metric(var_vals)
"""
VALIDATE = """
class PPOTrainer:
    {kind} _validate(self):
        for batch_dict in self.val_dataloader:
            batch_dict[{key}] = 1
            n = batch_dict.get("__rollout_n__")
        return self._val_metrics_update(data_sources, sample_uids, infos, turns{more})
"""
FILTER = "var_vals = [value for value in var_vals if value is not None]"
COUNTS = ", expected_acc_counts=None"
BUGGY, FIXED, DRIFTED = Verdict.BUGGY, Verdict.FIXED, Verdict.DRIFTED


@pytest.mark.parametrize(
    "body, verdict",
    [
        ("pass", BUGGY),
        (FILTER, FIXED),
        ("var_vals = [v for v in var_vals if var_vals is not None]", DRIFTED),
        ("var_vals = list(filter(known, var_vals))", DRIFTED),
        ("if var_vals[0] is not None: continue", DRIFTED),
    ],
)
def test_which_metrics_leave_none_out(body: str, verdict: Verdict) -> None:
    function = ast.parse(METRICS.format(more="", body=body)).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert takes_none(function) is verdict


@pytest.mark.parametrize(
    "validate, metrics, verdict",
    [
        ({}, {}, BUGGY),
        ({}, {"body": FILTER}, BUGGY),  # half of upstream's fix
        ({"more": COUNTS}, {"more": COUNTS, "body": FILTER}, FIXED),
        ({"more": COUNTS}, {}, DRIFTED),
        ({}, {"more": COUNTS}, DRIFTED),
        ({"key": "'id'"}, {}, DRIFTED),
        ({"kind": "async def"}, {}, DRIFTED),
        ({}, {"body": "var_vals = list(filter(known, var_vals))"}, DRIFTED),
    ],
)
def test_which_trainers_lose_sessions(
    tmp_path: Path, validate: dict[str, str], metrics: dict[str, str], verdict: Verdict
) -> None:
    folder = tmp_path / "trainer" / "ppo"
    (folder / "v1").mkdir(parents=True)
    (folder / "metric_utils.py").write_text(METRICS.format(**{"more": "", "body": "pass", **metrics}))
    words = {"kind": "def", "key": "'uid'", "more": "", **validate}
    (folder / "v1" / "trainer_base.py").write_text(VALIDATE.format(**words))
    source = Source((tmp_path,))
    function = source.function("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._validate")
    assert function is not None
    assert _loses_sessions(function, source) is verdict
