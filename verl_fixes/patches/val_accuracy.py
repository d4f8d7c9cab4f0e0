"""Failed validation sessions count as wrong answers.

What goes wrong: a session that fails (an agent loop that raises, or returns nothing) leaves no row behind. Validation
averages over the rows that are there, so a model that crashes its tools on hard prompts looks better than one that
answers them wrong. With n sessions a prompt it is worse: ``val-core/.../acc/mean@n`` is over the prompts of which no
session failed.

What the wrappers do: ``_validate`` runs with a ``val_dataloader`` that notes how many sessions each prompt is to have:
``__rollout_n__`` of its row, else ``rollout.val_kwargs.n``. When the metrics are taken, each missing session of a
prompt is one more ``acc`` of 0. A prompt without any session counts with n zeros. What stock reports as ``acc`` stays
as ``acc_success_only``, under ``val-aux``. Data sources whose rewards have no ``acc`` stay as they are. The numbers
are those of verl 0.9.1.

What ``maj`` means then: a failed session has no ``pred`` and votes for nothing. ``acc/maj@n`` is over the prompts of
which every session came back, ``acc/mean@n`` and ``acc/best@n`` are over all prompts. Within a prompt all of them are
about the same n sessions.

Counted are whole validations, never single batches: a session of a failed prompt may finish during a later batch.

When it can go: with verl 0.9.1.
Source: https://github.com/verl-project/verl/pull/7781
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from verl_fixes.arguments import Call
from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict, locate, mentions
from verl_fixes.validation_metrics import PARAMETERS, Prompts, by_prompt, metrics_of, takes_none
from verl_fixes.wrapping import cover

Expected = dict[tuple[str, str], int]
"""Data source and uid of a prompt: how many sessions it is to have."""

_expected: ContextVar[Expected | None] = ContextVar("verl_fixes_expected_sessions", default=None)
"""Of the validation that runs in this thread; None outside of one."""


def add_failed_sessions(prompts: Prompts, expected: Expected) -> bool:
    """Put an ``acc`` of 0 for each session that is missing into ``prompts``, and the old ones as ``acc_success_only``.

    A session that is there without an ``acc`` counts as failed, too. Prompts that are not expected stay as they are.

    Returns:
        Whether a data source has an ``acc`` at all; ``prompts`` is unchanged where not.
    """
    with_acc = {
        str(data_source): uids
        for data_source, uids in prompts.items()
        if any(acc is not None for variables in uids.values() for acc in variables.get("acc", ()))
    }
    for (data_source, uid), sessions in expected.items():
        if data_source in with_acc:
            variables = with_acc[data_source].setdefault(uid, {})
            successful = [acc for acc in variables.get("acc", ()) if acc is not None]
            variables["acc_success_only"] = successful
            variables["acc"] = successful + [0.0] * max(sessions - len(successful), 0)
    return bool(with_acc)


class _Counting:
    """A dataloader that notes what the validation loop expects of each batch, once the loop is done with it."""

    def __init__(self, dataloader: Any, trainer: Any, expected: Expected) -> None:
        self.dataloader = dataloader
        self._trainer = trainer
        self._expected = expected

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataloader:
            yield batch
            self._note(batch)  # by now the loop has put the uids in

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def _note(self, batch: Mapping[str, Any]) -> None:
        uids = batch["uid"]
        data_sources = batch.get("data_source", ["unknown"] * len(uids))
        sessions = batch.get("__rollout_n__")
        if sessions is None:
            sessions = [self._trainer.config.actor_rollout_ref.rollout.val_kwargs.n] * len(uids)
        for uid, data_source, count in zip(uids, data_sources, sessions, strict=True):
            self._expected[str(data_source), str(uid)] = int(count)


def count_expected_sessions(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``PPOTrainer._validate(self)``. Nothing of it stays on the trainer, also when it raises."""
    expected: Expected = {}
    dataloader = self.val_dataloader
    if isinstance(dataloader, _Counting):  # a validation inside a validation counts for itself
        dataloader = dataloader.dataloader
    counting = self.val_dataloader = _Counting(dataloader, self, expected)
    token = _expected.set(expected)
    try:
        return original(self, *args, **kwargs)
    finally:
        _expected.reset(token)
        if self.val_dataloader is counting:
            self.val_dataloader = dataloader


def count_failed_sessions(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``process_validation_metrics(data_sources, sample_uids, infos_dict, seed=42)``."""
    call = Call(original, PARAMETERS, args, kwargs)
    expected = _expected.get()
    if not expected:
        return call()
    prompts = by_prompt(call["data_sources"], call["sample_uids"], call["infos_dict"])
    return metrics_of(prompts, call) if add_failed_sessions(prompts, expected) else call()


def reach_the_script(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``run_ppo(config, task_runner_class)``: wraps ``_validate`` of a trainer that is run as a script.

    ``python -m verl.trainer.main_ppo_sync`` executes the module under the name ``__main__``, where no import hook
    fires. When it calls ``run_ppo``, its classes are there and Ray has not pickled them yet; by value then, with what
    is on them.
    """
    script = sys.modules["__main__"]
    source = locate("verl")
    file = source and source.file(_SYNC)
    if file and os.path.realpath(getattr(script, "__file__", None) or "") == os.path.realpath(file):
        cover(PATCH, _SCRIPT, script.PPOTrainer, "_validate", count_expected_sessions)
    return original(*args, **kwargs)


def _loses_sessions(function: Function, source: Source) -> Verdict:
    """Whether ``_validate`` forgets the prompts that it submits, and the metrics are taken by code that we know."""
    metrics = source.function(_METRICS, "process_validation_metrics")
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "_val_metrics_update"
    ]
    if metrics is None or isinstance(function, ast.AsyncFunctionDef) or len(calls) != 1 or not _puts_uids_in(function):
        return Verdict.DRIFTED
    handed_over = len(calls[0].args) + len(calls[0].keywords)
    if handed_over > 4 and mentions(function, "__rollout_n__") and _takes_counts(metrics):
        return Verdict.FIXED
    known = takes_none(metrics) is not Verdict.DRIFTED and not _takes_counts(metrics)
    return Verdict.BUGGY if handed_over == 4 and known else Verdict.DRIFTED


def _puts_uids_in(function: Function) -> bool:
    """``for batch in self.val_dataloader: batch["uid"] = ...``"""
    for loop in ast.walk(function):
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and isinstance(loop.iter, ast.Attribute):
            stored = [n for n in ast.walk(loop) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
            if loop.iter.attr == "val_dataloader" and any(
                isinstance(n.value, ast.Name) and n.value.id == loop.target.id and mentions(n.slice, "uid")
                for n in stored
            ):
                return True
    return False


def _takes_counts(metrics: Function) -> bool:
    return any(argument.arg == "expected_acc_counts" for argument in (*metrics.args.args, *metrics.args.kwonlyargs))


def _of_the_trainers(function: Function, source: Source) -> Verdict:
    """The metrics take part where a trainer needs it."""
    found = [source.function(module, "PPOTrainer._validate") for module in (_V1, _SYNC)]
    verdicts = [_loses_sessions(validate, source) for validate in found if validate is not None]
    if not verdicts:
        return Verdict.ABSENT
    return Verdict.BUGGY if Verdict.BUGGY in verdicts else verdicts[0]


def _of_the_script(function: Function, source: Source) -> Verdict:
    validate = source.function(_SYNC, "PPOTrainer._validate")
    return Verdict.ABSENT if validate is None else _loses_sessions(validate, source)


_METRICS = "verl.trainer.ppo.metric_utils"
_V1 = "verl.trainer.ppo.v1.trainer_base"
_SYNC = "verl.trainer.main_ppo_sync"


def _trainer(module: str) -> Target:
    return Target(
        module=module,
        qualname="PPOTrainer._validate",
        wrapper=count_expected_sessions,
        overrides=False,
        question=_loses_sessions,
        unit=module,
    )


_SCRIPT = Target(
    module="verl.trainer.main_ppo",
    qualname="run_ppo",
    wrapper=reach_the_script,
    overrides=False,
    question=_of_the_script,
    absent="no trainer of this release that loses failed sessions is started by running its module as a script",
    unit="script",
)

PATCH = Patch(
    name="val-accuracy",
    title="Failed validation sessions count as acc=0",
    hurts=(
        "A validation session that fails leaves no row, and the accuracy is taken over the rest: val-core acc/mean@n "
        "is over the prompts of which no session failed. A model that crashes on hard prompts looks better than one "
        "that answers them wrong. The V1 trainer (0.9.0) and main_ppo_sync (0.8.0) are hit; in the other trainers a "
        "failed session stops the run."
    ),
    does=(
        "Changes what the main validation metric means, so it is off by default: turn it on at the start of a run, "
        "not in the middle. Each missing session counts as an acc of 0, over a whole validation. The old figure stays "
        "as acc_success_only under val-aux. Data sources whose rewards have no acc stay as they are. maj is over the "
        "prompts of which every session came back, because a failed session has no pred to vote with; mean and best "
        "are over all prompts. A trainer of your own that overrides _validate without calling super() is left alone. "
        "With python -m verl.trainer.main_ppo_sync (0.8.0) the trainer is wrapped when the script calls run_ppo."
    ),
    removable="With verl 0.9.1.",
    upstream=("https://github.com/verl-project/verl/pull/7781",),
    fixed_in="0.9.1",
    default=False,
    stacks_on=("val-none-safe", "r2-replay"),
    targets=(
        _trainer(_V1),
        _trainer(_SYNC),
        Target(
            module=_METRICS,
            qualname="process_validation_metrics",
            wrapper=count_failed_sessions,
            question=_of_the_trainers,
            absent="the trainers of this release stop the run when a validation session fails",
            unit=_METRICS,
        ),
        _SCRIPT,
    ),
)
