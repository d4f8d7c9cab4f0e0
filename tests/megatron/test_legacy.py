"""The legacy Megatron actor and critic, through which verl 0.7.0 and 0.7.1 run RL by default: field case 12.

Their losses are means of micro-batch means. With equal rows in every micro-batch ``seq-mean-token-mean`` gives one
gradient in every layout and split, and ``token-mean`` one for each split. The reference is stock with the flag off.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron.steps import Steps, relative_error, steps
from tests.stock.conftest import RELEASE

pytestmark = pytest.mark.skipif(RELEASE >= "0.8", reason="this release has no legacy workers")

EXACT = 1e-5
ROLES = ("actor", "critic")
LAYOUTS: dict[str, dict[str, int]] = {"cp": {"cp": 2}, "dp": {}, "pp": {"pp": 2}, "tp": {"tp": 2}}
if RELEASE == "0.7.0":  # it computes what 0.7.1 computes
    LAYOUTS = {"cp": LAYOUTS["cp"]}
PACKED_TO = {"cp": 4, "dp": 1, "pp": 1, "tp": 2}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
SPLITS = {f"{mode} {count}": {"loss_agg_mode": mode, "micro_batches": count} for mode in MODES for count in (1, 4)}
DYNAMIC = {"dynamic": {"max_token_len": 60}}
HEIRS = {heir: {"loss_agg_mode": MODES[-1], "micro_batches": 4, "heir": heir} for heir in ("same", "copied")}
SEQUENCES = {f"in {count}": {"loss_agg_mode": MODES[-1], "micro_batches": count} for count in (1, 2, 4)}
ROUTER = {"z_loss_coeff": 1e-3}
BSHD = {"use_remove_padding": False}
INTERLEAVED = {"pp": 2, "chunks_per_stage": 2}


def trainer(role: str, on: bool, cases: dict[str, Any], layout: dict[str, int] | None = None, **more: Any) -> Any:
    return {"role": role, "per_token_loss": on, "cases": cases, "layout": layout or {}, **more}


def job(folder: Any, world_size: int, plan: dict[str, Any]) -> Steps:
    return steps(folder, world_size, plan, job="tests.megatron.legacy_job")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    plan: dict[str, Any] = {}
    for role in ROLES:
        plan[f"{role} off"] = trainer(role, False, SPLITS | DYNAMIC)
        plan[f"{role} on"] = trainer(role, True, SPLITS | DYNAMIC | HEIRS)
        plan[f"{role} tensors"] = trainer(role, False, {"step": {"tensor_norm": True}})
        plan[f"{role} bshd off"] = trainer(role, False, SEQUENCES, model={"moe": False, **BSHD}, phases=["stock"])
        plan[f"{role} bshd on"] = trainer(role, True, SEQUENCES, model={"moe": False, **BSHD})
        plan[f"{role} router bshd on"] = trainer(role, True, {"in 1": SEQUENCES["in 1"]}, model={**ROUTER, **BSHD})
        for multiple in sorted(set(PACKED_TO.values())):
            plan[f"{role} z packed to {multiple}"] = trainer(
                role, False, {"in 1": SEQUENCES["in 1"]}, model=ROUTER, packed_to=multiple, phases=["stock"]
            )
        plan[f"{role} z on"] = trainer(role, True, SEQUENCES, model=ROUTER)
    return job(tmp_path_factory.mktemp("alone"), 1, plan)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    plan: dict[str, Any] = {}
    for role in ROLES:
        for name, layout in LAYOUTS.items():
            plan[f"{role} {name} off"] = trainer(role, False, SPLITS | DYNAMIC, layout, phases=["stock"])
            plan[f"{role} {name} on"] = trainer(role, True, SPLITS | DYNAMIC, layout, phases=["stock", "fixed"])
            plan[f"{role} {name} z on"] = trainer(
                role, True, SEQUENCES, layout, model=ROUTER, phases=["stock", "fixed"]
            )
        for on, flag in ((False, "off"), (True, "on")):
            plan[f"{role} vpp {flag}"] = trainer(role, on, SEQUENCES, INTERLEAVED, model={"layers": 4})
    return job(tmp_path_factory.mktemp("pair"), 2, plan)


@pytest.mark.parametrize("case", SPLITS | DYNAMIC)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", ROLES)
def test_the_flag_changes_nothing(alone: Steps, pair: Steps, role: str, layout: str, case: str) -> None:
    off, stock, fixed = (
        pair.gradient(phase, f"{role} {layout} {flag}", case)
        for phase, flag in (("stock", "off"), ("stock", "on"), ("fixed", "on"))
    )
    assert relative_error(fixed, off) <= EXACT
    if layout in ("cp", "dp"):
        assert relative_error(stock, 2 * off) <= EXACT  # nothing is divided, and DDP adds up
    if case.startswith(MODES[-1]):
        assert relative_error(fixed, alone.gradient("stock", f"{role} off", f"{MODES[-1]} 1")) <= EXACT


@pytest.mark.parametrize("case", SPLITS | DYNAMIC)
@pytest.mark.parametrize("role", ROLES)
def test_the_flag_changes_nothing_on_one_process(alone: Steps, role: str, case: str) -> None:
    off = alone.gradient("stock", f"{role} off", case)
    assert relative_error(alone.gradient("fixed", f"{role} on", case), off) <= EXACT
    assert torch.equal(alone.gradient("fixed", f"{role} off", case), off)
    for flag in ("off", "on"):
        answer = alone.answers[f"{role} {flag}"][case]
        assert answer["back"] == answer["stock"]


@pytest.mark.parametrize("role", ROLES)
def test_trainers_that_override_the_method(alone: Steps, role: str) -> None:
    off = alone.gradient("stock", f"{role} off", f"{MODES[-1]} 4")
    assert relative_error(alone.gradient("fixed", f"{role} on", "same"), off) <= EXACT
    answer = alone.answers[f"{role} on"]["copied"]
    assert answer["fixed"].startswith("UncountedError")
    assert answer["back"] == answer["stock"]


@pytest.mark.parametrize("role", ROLES)
def test_interleaved_pipelines(pair: Steps, role: str) -> None:
    for case in SEQUENCES:
        if case == "in 1":  # not a multiple of the stages: refused by Megatron, with and without the fix
            continue
        fixed, off = pair.gradient("fixed", f"{role} vpp on", case), pair.gradient("stock", f"{role} vpp off", case)
        assert relative_error(fixed, off) <= EXACT


@pytest.mark.parametrize("case", SEQUENCES)
@pytest.mark.parametrize("role", ROLES)
def test_the_z_loss_on_one_process(alone: Steps, role: str, case: str) -> None:
    reference = alone.gradient("stock", f"{role} z packed to 1", "in 1")
    stock, fixed = (alone.gradient(phase, f"{role} z on", case) for phase in ("stock", "fixed"))
    assert relative_error(stock, reference) > 0.3
    assert relative_error(fixed, reference) <= EXACT


@pytest.mark.parametrize("case", SEQUENCES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", ROLES)
def test_the_z_loss_in_every_layout(alone: Steps, pair: Steps, role: str, layout: str, case: str) -> None:
    reference = alone.gradient("stock", f"{role} z packed to {PACKED_TO[layout]}", "in 1")
    assert relative_error(pair.gradient("fixed", f"{role} {layout} z on", case), reference) <= EXACT


@pytest.mark.parametrize("role", ROLES)
def test_bshd(alone: Steps, role: str) -> None:
    for case in SEQUENCES:
        off = alone.gradient("stock", f"{role} bshd off", case)
        assert relative_error(alone.gradient("fixed", f"{role} bshd on", case), off) <= EXACT
    answer = alone.answers[f"{role} router bshd on"]["in 1"]["fixed"]
    if role == "actor":
        assert answer.startswith("UnsupportedSettingError")
    else:  # the critic packs all the same
        reference = alone.gradient("stock", f"{role} z packed to 1", "in 1")
        assert relative_error(alone.gradient("fixed", f"{role} router bshd on", "in 1"), reference) <= EXACT


@pytest.mark.parametrize("role", ROLES)
def test_metrics_are_plain_numbers(alone: Steps, role: str) -> None:
    answer = alone.answers[f"{role} tensors"]["step"]
    assert "Tensor" in answer["stock"]["kinds"]
    assert set(answer["fixed"]["kinds"]) <= {"float", "int", "bool"}
    assert answer["back"] == answer["stock"]


@pytest.mark.parametrize("role", ROLES)
def test_no_output_keeps_its_graph(alone: Steps, role: str) -> None:
    """On stock code: there is nothing for detach-outputs to do here."""
    for case in SPLITS:
        assert alone.answers[f"{role} off"][case]["stock"]["attached"] == []
