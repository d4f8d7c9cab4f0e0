"""dynamic-batch-sync: verl#5591, field case A (verl#6176, verl#6178). Two ranks whose rows differ in length."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import environment
from tests.stock.conftest import RELEASE
from verl_fixes.demo.gloo_processes import run

pytestmark = pytest.mark.skipif(RELEASE >= "0.8", reason="this release has no legacy workers")

BUGGY = RELEASE == "0.7.1"
ROLES = ("actor", "critic")


def job(what: str, role: str, timeout: float = 120) -> dict[str, Any]:
    arguments = [what, role]
    printed = run("tests.stock.jobs.dynamic_batches", 2, arguments, fixes=True, timeout=timeout, env=environment())
    answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return answer


@pytest.mark.parametrize("role", ROLES)
def test_all_ranks_make_as_many_micro_batches(role: str) -> None:
    stock = [1, 2] if BUGGY else [2, 2]
    assert job("split", role) == {"stock": stock, "fixed": [2, 2], "back": stock}


@pytest.mark.skipif(not BUGGY, reason="here no group means the default group")
@pytest.mark.parametrize("role", ROLES)
def test_stock_ranks_meet_in_different_collectives(role: str) -> None:
    """On NCCL they wait for each other until it times out; gloo may also notice that the sizes differ."""
    with pytest.raises(RuntimeError, match=r"did not end in time|collective mismatch|[Tt]imed out|Connection closed"):
        job("stock", role, timeout=60)


@pytest.mark.parametrize("role", ROLES)
def test_the_update_runs_and_sequence_means_do_not_depend_on_the_number(role: str) -> None:
    """Inference and update each split once; with one row per micro-batch nothing needs to be agreed on."""
    fixed, one_by_one = job("fixed", role), job("one-by-one", role)
    assert fixed["counts"] == [[2, 2], [2, 2]]
    assert one_by_one["counts"] == [[], []]
    assert fixed["grad_norm"] == pytest.approx(one_by_one["grad_norm"], rel=1e-4)
