"""Dynamic context parallelism of verl 0.9 counts by itself, and per-token-loss leaves its counts alone.

verl's engine, its scheduler and its loss run as they are, on two processes. Each micro-batch is held by one of them or
shared between both. No released megatron-core has what this asks for: dynamic_cp.py in this folder says what stands
in. On Megatron-LM's ``dev`` branch, which has it, the router's losses are right and moe-aux-scale stays out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron.steps import Steps, relative_error, steps
from tests.stock.conftest import RELEASE

pytestmark = pytest.mark.skipif(RELEASE < "0.9", reason="verl counts the tokens of dynamic CP groups since 0.9.0")

EXACT = 1e-5
Z_LOSS = {"z_loss_coeff": 1e-3}
POLICY: dict[str, dict[str, Any]] = {
    "standard": {"micro_batches": 1, "every_rank": True},
    "odd lengths": {
        "micro_batches": 1,
        "every_rank": True,
        "lengths": [[3, 2], [4, 9], [1, 30], [6, 1], [2, 11], [10, 1], [5, 4], [8, 13]],
    },
}
WITH_Z_LOSS = {
    "standard": POLICY["standard"],
    "router alone": {"micro_batches": 1, "every_rank": True, "advantage": 0.0},
}
AUX_LOSS = {"aux_loss_coeff": 1e-2}
SCHEDULED_TOGETHER = {"two long rows": ([4, 7], 53), "six short rows": ([0, 1, 2, 3, 5, 6], 130)}
"""The standard batch's rows and tokens in the first micro-batch of both processes, and in the second."""
REAL_TOKENS = {"standard": 183, "odd lengths": 110}
STATIC_CP = (1, 2)


def references() -> dict[str, Any]:
    """Flag off, one process, one micro-batch: every token weighs the same, and nothing is padded."""
    off: dict[str, Any] = {"per_token_loss": False, "phases": ["stock"]}
    return {
        "policy": {**off, "cases": POLICY},
        "z": {**off, "cases": WITH_Z_LOSS, "model": Z_LOSS},
        "aux": {
            **off,
            "cases": {
                name: {"micro_batches": 1, "advantage": 0.0, "rows": rows}
                for name, (rows, _) in SCHEDULED_TOGETHER.items()
            },
            "model": AUX_LOSS,
        },
    }


def on(cp: int, cases: dict[str, Any], **build: Any) -> dict[str, Any]:
    """Two processes, which are one static CP group or two data parallel ranks."""
    layout = {"cp": cp, "max_seqlen_per_dp_cp_rank": 24}
    return {"per_token_loss": True, "layout": layout, "cases": cases, **build}


def dynamic() -> dict[str, Any]:
    router_alone = {"router alone": WITH_Z_LOSS["router alone"]}
    without = {"disable": ["moe-aux-scale"]}
    return {
        **{f"policy cp={cp}": on(cp, POLICY) for cp in STATIC_CP},
        **{f"z cp={cp}": on(cp, WITH_Z_LOSS, model=Z_LOSS) for cp in STATIC_CP},
        "z cp=2 without moe-aux-scale": on(2, WITH_Z_LOSS, model=Z_LOSS, **without),
        "aux cp=2": on(2, router_alone, model=AUX_LOSS),
        "aux cp=2 without moe-aux-scale": on(2, router_alone, model=AUX_LOSS, **without),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return steps(tmp_path_factory.mktemp("alone"), 1, references())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return steps(tmp_path_factory.mktemp("pair"), 2, dynamic())


def handed_over(answer: dict[str, Any]) -> list[tuple[list[float], list[int]]]:
    """Loss sums and token counts of all micro-batches, for each rank."""
    return [(rank["sums"], rank["tokens"]) for rank in answer["ranks"]]


@pytest.mark.parametrize("cp", STATIC_CP)
def test_stock_counts_every_real_token_once_and_its_policy_gradient_is_right(
    alone: Steps, pair: Steps, cp: int
) -> None:
    """What is left alone is worth being left alone, and the batches do reach groups of both sizes."""
    for case in POLICY:
        answer = pair.answers[f"policy cp={cp}"][case]["stock"]
        assert {size for rank in answer["ranks"] for size in rank["cp_sizes"]} == {1, 2}
        assert sum(sum(rank["tokens"]) for rank in answer["ranks"]) == REAL_TOKENS[case]
        gradient = pair.gradient("stock", f"policy cp={cp}", case)
        assert relative_error(gradient, alone.gradient("stock", "policy", case)) <= EXACT


@pytest.mark.parametrize("engine", dynamic())
def test_the_engine_hands_over_what_stock_hands_over(pair: Steps, engine: str) -> None:
    for case, answer in pair.answers[engine].items():
        assert handed_over(answer["fixed"]) == handed_over(answer["stock"]), case
        assert answer["back"] == answer["stock"], case


@pytest.mark.parametrize("engine", [name for name in dynamic() if name not in ("z cp=2", "aux cp=2")])
def test_the_gradient_is_the_one_of_stock_bit_for_bit(pair: Steps, engine: str) -> None:
    """At CP=2 moe-aux-scale has something to correct, so it is switched off there. At CP=1 it is on."""
    for case, answer in pair.answers[engine].items():
        assert answer["fixed"]["grad_norm"] == answer["stock"]["grad_norm"], case
        fixed, stock = (pair.gradient(phase, engine, case) for phase in ("fixed", "stock"))
        assert torch.equal(fixed, stock), case


@pytest.mark.parametrize("cp", STATIC_CP)
def test_the_z_loss_keeps_its_size(alone: Steps, pair: Steps, cp: int) -> None:
    """The router's group is the static one, whichever group shares the micro-batch.

    Each router adds ``coefficient / cp`` times the sum over its own real tokens, and the gradient is divided by the
    real tokens of all: ``1 / cp`` of the mean, and moe-aux-scale's factor ``cp`` makes it the mean.
    """
    reference = alone.gradient("stock", "z", "router alone")
    stock, fixed = (pair.gradient(phase, f"z cp={cp}", "router alone") for phase in ("stock", "fixed"))
    assert relative_error(stock, reference / cp) <= EXACT
    assert relative_error(fixed, reference) <= EXACT
    whole = pair.gradient("fixed", f"z cp={cp}", "standard")
    assert relative_error(whole, alone.gradient("stock", "z", "standard")) <= EXACT


def aux_reference(alone: Steps) -> torch.Tensor:
    """The static group's ranks balance what they hold at a time; every real token weighs the same."""
    parts = [alone.gradient("stock", "aux", name) * tokens for name, (_, tokens) in SCHEDULED_TOGETHER.items()]
    return torch.stack(parts).sum(dim=0) / sum(tokens for _, tokens in SCHEDULED_TOGETHER.values())


def test_stock_load_balancing_loss_has_its_size(alone: Steps, pair: Steps) -> None:
    """With a padding mask, which only this path has, megatron-core counts the tokens of the whole group by accident.

    Its all-reduce works in place, on the tensor from which the local count is taken afterwards.
    """
    assert relative_error(pair.gradient("stock", "aux cp=2", "router alone"), aux_reference(alone)) <= EXACT


def test_the_load_balancing_loss_keeps_its_size(alone: Steps, pair: Steps) -> None:
    assert relative_error(pair.gradient("fixed", "aux cp=2", "router alone"), aux_reference(alone)) <= EXACT
