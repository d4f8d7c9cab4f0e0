"""Validations of the real trainers, and ``process_validation_metrics`` itself."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from tests.stock.jobs.phases import phases
from tests.stock.rollouts import Batch, Outside, connect, plain, queue, trainer_class, trainer_with, validate


def everything(scenarios: dict[str, list[Batch]], seeds: int, explicit: dict[str, Any]) -> dict[str, Any]:
    """All that this file measures, in one process: importing the trainers takes longer than measuring."""
    return {
        "validations": validations(scenarios) if has_trainer() else None,
        "processed": processed(seeds),
        "explicit": under_each_name(**explicit),
    }


def validations(scenarios: dict[str, list[Batch]]) -> dict[str, Any]:
    """Each scenario: stock, with each of the two fixes alone, with both, and stock again."""
    cls = trainer_class()

    def measure() -> dict[str, Any]:
        return {name: attempt(lambda batches=batches: validate(batches, cls)) for name, batches in scenarios.items()}

    return {
        "both": phases(measure, enable=["val-accuracy"]),
        "accuracy": phases(measure, only=["fixed"], enable=["val-accuracy"], disable=["val-none-safe"]),
        "none-safe": phases(measure, only=["fixed"]),
        "trainer": behaviour(scenarios, cls),
    }


def attempt(measure: Callable[[], Any]) -> Any:
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def behaviour(scenarios: dict[str, list[Batch]], cls: Any) -> dict[str, Any]:
    """What is on the trainer during and after a validation, when it raises, with subclasses and in threads."""
    first, second = scenarios["failed"], scenarios["all there"]

    def measure() -> dict[str, Any]:
        with queue(cls) as queues:

            def run(trainer: Any, batches: list[Batch], dies_in: int | None = None) -> Any:
                outside = queues.outside = Outside(batches, dies_in)
                connect(trainer, outside)
                before = dict(vars(trainer))
                result = attempt(lambda: plain(trainer._validate()))
                clean = before.keys() == vars(trainer).keys() and all(v is before[k] for k, v in vars(trainer).items())
                return [result, clean]

            one = trainer_with(Outside(first), cls)
            return {
                "one after another": [run(one, first), run(one, second), run(one, first, dies_in=1), run(one, second)],
                "overrides": {heir.__name__: run(trainer_with(Outside(first), heir), first) for heir in heirs(cls)},
                "threads": in_threads(run, cls, [first, second, first, second]),
            }

    return phases(measure, enable=["val-accuracy"])


def heirs(cls: Any) -> list[type]:
    """Trainers of users that override ``_validate``."""

    class Twice(cls):  # type: ignore[misc]
        """Two validations in one."""

        def _validate(self) -> Any:
            loader, first = self.val_dataloader, super()._validate()
            connect(self, Outside(loader.batches[-1:]))
            queues = inspect.unwrap(cls._validate).__globals__["tq"]
            before, queues.outside = queues.outside, self.val_dataloader
            second = super()._validate()
            connect(self, loader)
            queues.outside = before
            return {**{f"first {k}": v for k, v in first.items()}, **{f"second {k}": v for k, v in second.items()}}

    class Own(cls):  # type: ignore[misc]
        """Nothing of verl's."""

        def _validate(self) -> Any:
            assert type(self.val_dataloader) is Outside
            return {"batches": len([batch for batch in self.val_dataloader if "uid" not in batch])}

    class Later(cls):  # type: ignore[misc]
        """A coroutine, run by somebody else."""

        async def _later(self) -> Any:
            await asyncio.sleep(0)
            return super()._validate()

        def _validate(self) -> Any:
            return asyncio.run(self._later())

    class Looks(cls):  # type: ignore[misc]
        """Uses the dataloader while it is being read."""

        def _maybe_log_val_generations(self, *_: Any, **__: Any) -> None:
            assert len(self.val_dataloader) == len(self.val_dataloader.batches) == 2

    return [Twice, Own, Later, Looks]


def in_threads(run: Any, cls: Any, work: list[list[Batch]]) -> list[Any]:
    """Validations of several trainers at once; without what verl bootstraps with numpy's one global generator."""
    answers: list[Any] = [None] * len(work)
    start = threading.Barrier(len(work))

    def one(index: int) -> None:
        trainer = trainer_with(Outside([]), cls)
        start.wait()
        metrics, clean = run(trainer, work[index])
        plain_means = {name: value for name, value in metrics.items() if "/mean@" in name}
        answers[index] = [plain_means, clean]

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def random_input(seed: int) -> dict[str, Any]:
    """Sessions of a few prompts of two data sources, some failed, some values None, some prompts not expected."""
    rng = random.Random(seed)
    n_max = rng.choice([1, 2, 3, 5])
    rows: dict[str, list[Any]] = {"data_source": [], "uid": [], "reward": [], "acc": [], "pred": [], "number": []}
    expected = []
    for prompt in range(rng.randint(1, 6)):
        source = rng.choice(["math", "chat"])
        has_acc = source == "math" or rng.random() < 0.05
        if rng.random() < 0.9:
            expected.append([source, f"u{prompt}", n_max])
        for _ in range(rng.choice([0, n_max, n_max, rng.randint(0, n_max + 1)])):
            rows["data_source"].append(source)
            rows["uid"].append(f"u{prompt}")
            rows["reward"].append(rng.random())
            rows["acc"].append(rng.choice([0, 1, True, 0.5]) if has_acc and rng.random() < 0.95 else None)
            rows["pred"].append(rng.choice("AB") if rng.random() < 0.95 else None)
            rows["number"].append(rng.choice([1, 2.5]) if rng.random() < 0.95 else None)
    order = list(range(len(rows["uid"])))
    rng.shuffle(order)
    return {"rows": {name: [values[i] for i in order] for name, values in rows.items()}, "expected": expected}


def expected_metrics(rows: dict[str, list[Any]], expected: list[list[Any]]) -> dict[str, Any]:
    """What verl 0.9.1 answers, written down from scratch: each variable's own values, each prompt on its own."""
    from verl.trainer.ppo import metric_utils

    prompts: dict[str, dict[str, list[int]]] = {}
    for row, (source, uid) in enumerate(zip(rows["data_source"], rows["uid"], strict=True)):
        prompts.setdefault(source, {}).setdefault(uid, []).append(row)
    counted = {source for row, source in enumerate(rows["data_source"]) if rows["acc"][row] is not None}
    for source, uid, _ in expected:
        if source in counted:
            prompts[source].setdefault(uid, [])
    sessions = {(source, uid): n for source, uid, n in expected if source in counted}
    collected: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for source, uids in prompts.items():
        for uid, indices in uids.items():
            votes = [rows["pred"][i] for i in indices]
            for variable in ("reward", "acc", "number", "acc_success_only"):
                column = rows["acc" if variable == "acc_success_only" else variable]
                values = [column[i] for i in indices if column[i] is not None]
                if variable.startswith("acc") and (source, uid) in sessions:
                    if variable == "acc":
                        values += [0.0] * (sessions[source, uid] - len(values))
                elif variable == "acc_success_only":
                    continue
                for metric, value in of_values(values, votes, metric_utils).items():
                    collected[source][variable][metric].append(value)
    return {
        source: {
            variable: {m: float(np.mean(v)) for m, v in metrics.items()} for variable, metrics in variables.items()
        }
        for source, variables in collected.items()
    }


def of_values(values: list[Any], votes: list[Any], metric_utils: Any) -> dict[str, float]:
    count = len(values)
    if count == 0:
        return {}
    metrics = {f"mean@{count}": float(np.mean(values))}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(np.std(values))
    for n in sorted({2**k for k in range(1, 10) if 2**k < count} | {count}):
        best, worst = metric_utils.bootstrap_metric(values, n, [np.max, np.min], seed=42)
        pairs = {"best": best, "worst": worst}
        if len(votes) == count and None not in votes:
            ballots = [{"val": value, "pred": vote} for value, vote in zip(values, votes, strict=True)]
            decide = [lambda data: metric_utils.calc_maj_val(data, vote_key="pred", val_key="val")]
            (pairs["maj"],) = metric_utils.bootstrap_metric(ballots, n, decide, seed=42)
        for name, (mean, std) in pairs.items():
            metrics |= {f"{name}@{n}/mean": mean, f"{name}@{n}/std": std}
    return metrics


def processed(seeds: int) -> dict[str, Any]:
    """``process_validation_metrics`` itself on random input: which seeds differ from ``expected_metrics``, and where.

    The expected counts are handed over as each release does it: by parameter, or as ``_validate``'s wrapper does.
    """
    from verl.trainer.ppo import metric_utils

    from verl_fixes.patches import val_accuracy

    native = "expected_acc_counts" in inspect.signature(metric_utils.process_validation_metrics).parameters
    bootstrap = metric_utils.bootstrap_metric

    def quick(*args: Any, n_bootstrap: int = 1000, **kwargs: Any) -> Any:
        return bootstrap(*args, n_bootstrap=8, **kwargs)

    def answer(rows: dict[str, list[Any]], expected: list[list[Any]]) -> Any:
        infos = {name: rows[name] for name in ("reward", "acc", "pred", "number")}
        counts = {(source, uid): n for source, uid, n in expected}
        call = metric_utils.process_validation_metrics
        if native:
            return call(rows["data_source"], rows["uid"], infos, expected_acc_counts=counts)
        token = val_accuracy._expected.set(counts)
        try:
            return call(rows["data_source"], rows["uid"], infos)
        finally:
            val_accuracy._expected.reset(token)

    def measure(count: bool, none: bool) -> list[str]:
        outcomes = []
        for seed in range(seeds):
            given = random_input(seed)
            rows, expected = given["rows"], given["expected"] if count else []
            if not none:
                rows = {name: [0.5 if v is None else v for v in values] for name, values in rows.items()}
                rows["pred"] = ["C" if vote == 0.5 else vote for vote in rows["pred"]]
            result = attempt(lambda rows=rows, expected=expected: plain(answer(rows, expected)))
            if isinstance(result, str):
                outcomes.append(result.partition(":")[0])
            else:
                outcomes.append("equal" if result == expected_metrics(rows, expected) else "different")
        return outcomes

    def counted(outcomes: list[str]) -> dict[str, int]:
        return {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}

    with mock.patch.object(metric_utils, "bootstrap_metric", quick):
        return {
            "none": phases(lambda: counted(measure(False, True))),
            "no none": phases(lambda: counted(measure(False, False))),
            "both": phases(lambda: counted(measure(True, True)), only=["fixed"], enable=["val-accuracy"]),
            "accuracy": phases(
                lambda: counted(measure(True, False)),
                only=["fixed"],
                enable=["val-accuracy"],
                disable=["val-none-safe"],
            ),
            "stock counts": counted(measure(True, False)),
        }


def under_each_name(infos: dict[str, list[Any]], sources: list[str], uids: list[str]) -> dict[str, Any]:
    """One call of ``process_validation_metrics`` under each name by which this release's trainers reach it."""
    from verl.trainer.ppo import metric_utils, ray_trainer

    modules = [metric_utils, ray_trainer]
    modules += [inspect.getmodule(inspect.unwrap(trainer_class()._validate))] if has_trainer() else []

    def measure() -> list[Any]:
        return [
            attempt(lambda module=module: plain(module.process_validation_metrics(sources, uids, infos)))
            for module in modules
        ]

    return phases(measure)


def has_trainer() -> bool:
    try:
        trainer_class()
    except ImportError:
        return False
    return True
