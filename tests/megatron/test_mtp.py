"""Multi-token prediction under calculate_per_token_loss is weighed as with the flag off.

The MTP gradient is what ``mtp_loss_scaling_factor=1`` adds to a factor of 0, over all parameters. The reference is
stock verl with the flag off on one process and one micro-batch, where the loss is the mean over all response tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron.steps import MEGATRON_CORE, Steps, relative_error, steps
from tests.stock.conftest import RELEASE

pytestmark = [
    pytest.mark.skipif(RELEASE < "0.8", reason="0.7.0 has no MTP, 0.7.1 does not run with this megatron-core"),
    pytest.mark.skipif(MEGATRON_CORE < (0, 16), reason="this megatron-core has no MTP for packed sequences"),
]

EXACT = 1e-5
ROUTED, RESPONSE = 183, 129  # tokens of the standard batch
UPSTREAM_IS_RIGHT = RELEASE >= "0.9" and MEGATRON_CORE >= (0, 17)  # its correction needs process_mtp_loss
LAYOUTS = {"dp": {}, "pp": {"pp": 2}, "cp": {"cp": 2}}
SPLITS = {"one": {"micro_batches": 1}, "four": {"micro_batches": 4}}
AFTERWARDS = {
    "below an override": {"micro_batches": 1, "heir": "selects"},
    "failing": {"micro_batches": 1, "loss": "raising"},
    "after a failure": {"micro_batches": 1},
}
TWO_LAYERS = {"moe": True, "mtp_layers": 2}


def engines(name: str, on: bool, layout: dict[str, int], cases: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {
        f"{name} {factor}": {
            "per_token_loss": on,
            "layout": layout,
            "cases": cases,
            "model": {"moe": False, "mtp_layers": 1, "mtp_loss_scaling_factor": factor, **model},
        }
        for factor in (0.0, 1.0)
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    plan = engines("two layers off", False, {}, {"one": SPLITS["one"]}, **TWO_LAYERS)
    plan |= engines("off", False, {}, SPLITS) | engines("on", True, {}, SPLITS | AFTERWARDS)
    plan |= engines("bshd off", False, {}, {"one": SPLITS["one"]}, use_remove_padding=False)
    plan |= engines("bshd on", True, {}, {"one": SPLITS["one"]}, use_remove_padding=False)
    return steps(tmp_path_factory.mktemp("alone"), 1, plan)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    # first, because Megatron's log of MTP losses keeps the number of layers of the first step
    plan = engines("two layers, tp", True, {"tp": 2}, {"one": SPLITS["one"]}, **TWO_LAYERS)
    for name, layout in LAYOUTS.items():
        plan |= engines(name, True, layout, SPLITS)
    return steps(tmp_path_factory.mktemp("pair"), 2, plan)


def mtp_gradient(where: Steps, phase: str, engine: str, case: str) -> torch.Tensor:
    with_mtp, without = (where.gradient(phase, f"{engine} {factor}", case) for factor in (1.0, 0.0))
    return with_mtp - without


@pytest.mark.parametrize("case", SPLITS)
def test_what_stock_weighs_it_by(alone: Steps, case: str) -> None:
    reference = mtp_gradient(alone, "stock", "off", "one")
    wrong = 1.0 if UPSTREAM_IS_RIGHT else RESPONSE / ROUTED if RELEASE >= "0.9" else RESPONSE
    assert relative_error(mtp_gradient(alone, "stock", "on", case), wrong * reference) <= EXACT


@pytest.mark.parametrize("case", SPLITS)
@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_it_is_the_mean_over_response_tokens(alone: Steps, pair: Steps, layout: str, case: str) -> None:
    reference = mtp_gradient(alone, "stock", "off", "one")
    where, engine = (alone, "on") if layout == "alone" else (pair, layout)
    error = relative_error(mtp_gradient(where, "fixed", engine, case), reference)
    if layout == "cp" and RELEASE >= "0.9":
        # Upstream scales by the tokens before and after the shift, of each rank alone, where neighbours move tokens.
        assert 1e-3 < error < 0.06
    else:
        assert error <= EXACT


@pytest.mark.parametrize("case", ["below an override", "after a failure"])
def test_nothing_is_scaled_twice(alone: Steps, case: str) -> None:
    reference = mtp_gradient(alone, "stock", "off", "one")
    assert "the loss function failed" in alone.answers["on 1.0"]["failing"]["fixed"]
    assert relative_error(mtp_gradient(alone, "fixed", "on", case), reference) <= EXACT


def test_two_layers_of_a_mixture_of_experts_under_tensor_parallelism(alone: Steps, pair: Steps) -> None:
    reference = mtp_gradient(alone, "stock", "two layers off", "one")
    assert relative_error(mtp_gradient(pair, "fixed", "two layers, tp", "one"), reference) <= EXACT


def test_padded_batches(alone: Steps) -> None:
    reference = mtp_gradient(alone, "stock", "bshd off", "one")
    assert relative_error(mtp_gradient(alone, "fixed", "bshd on", "one"), reference) <= EXACT


def test_the_flag_off_and_the_config_stay_as_they_are(alone: Steps, pair: Steps) -> None:
    for where in (alone, pair):
        for name, cases in where.answers.items():
            for case, answer in cases.items():
                assert answer["back"] == answer["stock"], (name, case)
    for factor in (0.0, 1.0):
        for case in SPLITS:
            fixed, stock = (alone.gradient(phase, f"off {factor}", case) for phase in ("fixed", "stock"))
            assert torch.equal(fixed, stock)
