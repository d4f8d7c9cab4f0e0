"""moe-aux-scale (NVIDIA/Megatron-LM#5047, field case 8) beside the gradients, which test_invariance compares."""

from __future__ import annotations

import pytest

import verl_fixes
from tests.megatron.steps import MEGATRON_CORE, Steps, relative_error, steps
from verl_fixes import probe
from verl_fixes.patches.moe_aux_scale import PATCH

MISSING = MEGATRON_CORE < (0, 19)
SEVERAL = {
    "z_loss_coeff": 1e-3,
    "transformer_overrides": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [1e-2, 1e-3, 1e-3],
    },
}
CASES = {"step": {"micro_batches": 2}, "eval": {"forward_only": True}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    plan = {
        name: {"per_token_loss": on, "layout": layout, "model": {**SEVERAL, **more}, "cases": CASES}
        for name, on, layout, more in (
            ("tp", True, {"tp": 2}, {}),
            ("tp recomputed", True, {"tp": 2}, {"recompute": True}),
            ("dp", True, {}, {}),
            ("flag off", False, {"tp": 2}, {}),
        )
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


def test_recomputed_layers_are_scaled_once(pair: Steps) -> None:
    plain, recomputed = (pair.gradient("fixed", name, "step") for name in ("tp", "tp recomputed"))
    assert relative_error(recomputed, plain) <= 1e-5


def test_nothing_changes_without_the_flag_or_when_no_tokens_are_shared(pair: Steps) -> None:
    off = (pair.gradient(phase, "flag off", "step") for phase in ("fixed", "stock"))
    assert relative_error(*off) == 0.0
    for name in ("flag off", "dp"):
        for case in CASES:
            fixed, stock = (pair.answers[name][case][phase] for phase in ("fixed", "stock"))
            assert fixed["logged"] == stock["logged"]


def test_it_is_put_back(pair: Steps) -> None:
    for cases in pair.answers.values():
        for answer in cases.values():
            assert answer["back"] == answer["stock"]
