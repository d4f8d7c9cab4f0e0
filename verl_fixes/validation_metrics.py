"""Validation metrics of prompts whose variables do not all have as many values as the prompt has sessions.

``process_validation_metrics`` of verl takes one value per session and variable. Here it is asked about one variable of
one prompt at a time, and its answers are averaged over prompts as it does itself, so that every number is its own.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from verl_fixes.arguments import Call
from verl_fixes.probe import Function, Verdict, mentions

PARAMETERS = ("data_sources", "sample_uids", "infos_dict", "seed")
"""Of ``process_validation_metrics``."""

Prompts = dict[Any, dict[Any, dict[str, list[Any]]]]
"""Data source, then prompt uid, then variable: one value a session, None where a session has none."""


def by_prompt(data_sources: Sequence[Any], sample_uids: Sequence[Any], infos: Mapping[str, Sequence[Any]]) -> Prompts:
    """Sort what ``process_validation_metrics`` is given, one row a session, by prompt."""
    prompts: Prompts = {}
    for row, data_source in enumerate(data_sources):
        variables = prompts.setdefault(data_source, {}).setdefault(sample_uids[row], {})
        for name, values in infos.items():
            variables.setdefault(name, []).append(values[row])
    return prompts


def metrics_of(prompts: Prompts, call: Call) -> Any:
    """What ``process_validation_metrics`` answers, over the values that are there.

    None is no value. A prompt has ``maj`` metrics of a variable where each of its values has a ``pred`` beside it, as
    in verl 0.9.1: with fewer votes than values nobody knows which value belongs to which vote.

    Args:
        call: of ``process_validation_metrics``, for its other arguments.

    Returns:
        Data source, then variable, then metric: the mean over the prompts that have this metric.
    """
    import numpy as np

    answer: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    for data_source, uids in prompts.items():
        over_prompts: dict[str, dict[str, list[float]]] = {}
        for variables in uids.values():
            for name, values in variables.items():
                metrics = _metrics_of_one(values, variables.get("pred"), call)
                for metric, value in metrics.items():
                    over_prompts.setdefault(name, {}).setdefault(metric, []).append(value)
        for name, metrics_of_all in over_prompts.items():
            for metric, numbers in metrics_of_all.items():
                answer[data_source][name][metric] = np.mean(numbers)
    return answer


def _metrics_of_one(values: Sequence[Any], votes: Sequence[Any] | None, call: Call) -> Mapping[str, float]:
    """The metrics of one variable of one prompt: none for text, or where there is no value."""
    present = [value for value in values if value is not None]
    if not present or isinstance(present[0], str):
        return {}
    infos = {"value": present}
    if votes is not None and len(votes) == len(present) and all(vote is not None for vote in votes):
        infos = {"pred": list(votes), **infos}
    one = ["prompt"] * len(present)
    metrics: Mapping[str, float] = call(data_sources=one, sample_uids=one, infos_dict=infos)["prompt"]["value"]
    return metrics


def takes_none(function: Function) -> Verdict:
    """Whether ``process_validation_metrics`` leaves None out of what it averages: FIXED if so, BUGGY if not."""
    if any(_drops_none(node) for node in ast.walk(function) if isinstance(node, ast.comprehension)):
        return Verdict.FIXED
    arguments = [argument.arg for argument in function.args.args]
    other_ways = ("filter", "isnan", "isna", "isnull", "notna", "nanmean")
    compared = sum(_is_not_none(node) for node in ast.walk(function))  # of pred with None
    known = arguments[:3] == list(PARAMETERS[:3]) and mentions(function, "bootstrap_metric") and compared == 1
    return Verdict.BUGGY if known and not any(mentions(function, word) for word in other_ways) else Verdict.DRIFTED


def _drops_none(comprehension: ast.comprehension) -> bool:
    item = comprehension.target
    return isinstance(item, ast.Name) and any(
        _is_not_none(test) and isinstance(test.left, ast.Name) and test.left.id == item.id  # type: ignore[attr-defined]
        for test in comprehension.ifs
    )


def _is_not_none(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.IsNot)
        and isinstance(node.comparators[0], ast.Constant)
        and node.comparators[0].value is None
    )
