"""moe-aux-scale (NVIDIA/Megatron-LM#5047, field case 8) beside the gradients, which test_invariance compares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import verl_fixes
from tests.megatron.steps import MEGATRON_CORE, Steps, relative_error, steps
from tests.stock.conftest import RELEASE
from verl_fixes import probe
from verl_fixes.patches.moe_aux_scale import PATCH

EXACT = 1e-5
MISSING = MEGATRON_CORE < (0, 19)
SEVERAL = {
    "z_loss_coeff": 1e-3,
    "transformer_overrides": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [1e-2, 1e-3, 1e-3],
    },
}
CASES = {"step": {"micro_batches": 2}, "eval": {"forward_only": True}}
OVERRIDE = {"below an override": {"micro_batches": 2, "heir": "selects"}}
BUGGY = RELEASE < "0.9"


def engine(layout: dict[str, int], on: bool = True, **more: Any) -> dict[str, Any]:
    model = {**SEVERAL, **more.pop("model", {})}
    return {"per_token_loss": on, "layout": layout, "model": model, "cases": CASES, **more}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    tp = {"tp": 2}
    plan = {
        "tp": engine(tp, cases=CASES | OVERRIDE),
        "tp recomputed": engine(tp, model={"recompute": True}),
        "tp router heirs": engine(tp, router_heirs=True),
        "tp without it": engine(tp, disable=["moe-aux-scale"]),
        "tp without counts": engine(tp, disable=["per-token-loss"]),
        "flag off": engine(tp, on=False),
        "dp": engine({}),
        "dp without it": engine({}, disable=["moe-aux-scale"]),
    }
    return steps(tmp_path_factory.mktemp("pair"), 2, plan)


def test_the_state_follows_from_the_code_of_megatron_core() -> None:
    record = next(record for record in verl_fixes.status() if record.name == PATCH.name)
    assert record.expected == ("applied" if MISSING else "upstream")
    source = probe.locate("megatron")
    assert source is not None
    for target in PATCH.targets:
        function = source.function(target.module, target.qualname)
        assert function is not None
        assert target.question is not None
        assert target.known[probe.fingerprint(function)] is target.question(function, source)


def test_the_log_stays_as_it_was(pair: Steps) -> None:
    for name, cases in pair.answers.items():
        logged = cases["step"]["stock"]["logged"]
        assert {"z_loss", "load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss"} == set(logged)
        assert all(value > 0 for losses in logged.values() for value in losses)
        assert (name, cases["step"]["fixed"]["logged"]) == (name, logged)


@pytest.mark.skipif(not MISSING, reason="this megatron-core has the factor")
def test_it_acts(pair: Steps) -> None:
    without = pair.gradient("fixed", "tp without it", "step")
    for name in ("tp", "tp recomputed", "tp router heirs"):
        assert relative_error(pair.gradient("fixed", name, "step"), without) > 0.05


def test_recomputed_layers_and_heirs_are_scaled_once(pair: Steps) -> None:
    plain = pair.gradient("fixed", "tp", "step")
    for name in ("tp recomputed", "tp router heirs"):
        assert relative_error(pair.gradient("fixed", name, "step"), plain) <= EXACT
    assert relative_error(pair.gradient("fixed", "tp", "below an override"), plain) <= EXACT


def test_nothing_changes_without_the_flag_or_when_no_tokens_are_shared(pair: Steps) -> None:
    assert torch.equal(*(pair.gradient(phase, "flag off", "step") for phase in ("fixed", "stock")))
    assert torch.equal(*(pair.gradient("fixed", name, "step") for name in ("dp", "dp without it")))


@pytest.mark.skipif(not MISSING, reason="this megatron-core has the factor")
def test_it_acts_only_where_counts_are_reported(pair: Steps) -> None:
    """verl up to 0.8.0 reports none by itself: nothing is divided, and the factor would make it worse."""
    fixed, stock = (pair.gradient(phase, "tp without counts", "step") for phase in ("fixed", "stock"))
    if BUGGY:
        assert torch.equal(fixed, stock)
    else:
        assert relative_error(fixed, stock) > 0.05


def test_it_is_put_back(pair: Steps) -> None:
    for cases in pair.answers.values():
        for answer in cases.values():
            assert answer["back"] == answer["stock"]
