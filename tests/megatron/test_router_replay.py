"""r2-replay: verl#7805. Recorded routes are those that happened, replayed routes those that were recorded.

The engines of 0.8.0 and later, and the legacy workers of 0.7.0 and 0.7.1, whose engines cannot record. Where verl 0.9.1
has the fix by itself, stock code has to give the same answers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron.steps import Steps, relative_error, steps
from tests.stock.conftest import RELEASE
from verl_fixes.demo.megatron_on_cpu import flatten

FIXED = RELEASE >= "0.9.1"
ENGINE = RELEASE >= "0.8"
PHASES = ["stock", "fixed", "back"]
JOB = "tests.megatron.replay_job"

FREQUENCIES = {
    "four layers": [1, 1, 1, 1],
    "unequal stages": [0, 1, 1, 1],
    "a stage without": [0, 0, 1, 1],
    "a chunk without": [1, 0, 1, 1],
}
"""Which of four layers have a router."""


def _model(layers: str, **model: Any) -> dict[str, Any]:
    return {"layers": 4, "transformer_overrides": {"moe_layer_freq": FREQUENCIES[layers]}, **model}


REFERENCES: dict[str, dict[str, Any]] = {layers: {"model": _model(layers)} for layers in FREQUENCIES}
REFERENCES["a stage without"]["model"]["experts"] = 260
PAIRS = {
    "cp": ("four layers", {"cp": 2}),
    "tp": ("four layers", {"tp": 2}),
    "pp, unequal": ("unequal stages", {"pp": 2}),
    "pp, none": ("a stage without", {"pp": 2}),
    "vpp, none": ("a chunk without", {"pp": 2, "chunks_per_stage": 2}),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    scenes = dict.fromkeys(["alone", "others_in_front", "others_only", "refused"], PHASES)
    if ENGINE:
        scenes |= dict.fromkeys(["after_an_exception", "nested", "itself_inside", "switched_off"], PHASES)
    else:
        scenes |= dict.fromkeys(["reference", "not_here_yet"], PHASES)
    plan = {
        "small": {"model": {"layers": 3}, "scenes": scenes},
        "wide": {"model": {"experts": 300}, "scenes": {"alone": PHASES}},
        **REFERENCES,
        "recomputed": {"model": _model("four layers", recompute=True)},
    }
    plan["unequal stages"]["scenes"] = {"alone": ["fixed"], "rollout_routes": PHASES}
    if ENGINE:
        plan["dense"] = {"model": {"moe": False}, "scenes": {"dense": PHASES}}
        plan["vision"] = {"model": {"mtp_layers": 1}, "scenes": {"vision_with_mtp": PHASES}}
    return steps(tmp_path_factory.mktemp("single"), 1, plan, job=JOB)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    plan: dict[str, Any] = {
        name: {"layout": layout, "model": REFERENCES[layers]["model"]} for name, (layers, layout) in PAIRS.items()
    }
    plan["pp, none"]["scenes"] = {"gathers": PHASES, "alone": ["fixed"]}
    return steps(tmp_path_factory.mktemp("pair"), 2, plan, job=JOB)


SILENT = "the routers of layers [1] recorded no routes"
OWN_CHECK = pytest.mark.skipif(FIXED, reason="upstream looks by itself, in the first micro-batch")
RIGHT = {"recorded what happened": True, "replayed what was recorded": True}


def check(answers: dict[str, Any], stock: Any, fixed: Any) -> None:
    """Stock code has the bug where this release has it, before and after the fix was active."""
    expected = fixed if FIXED else stock
    assert answers == {"stock": expected, "fixed": fixed, "back": expected}


@pytest.mark.parametrize("phase", PHASES)
def test_a_model_alone_is_right_on_every_release(single: Steps, phase: str) -> None:
    dtype = "torch.int16" if FIXED else "torch.uint8"
    assert single.answers["small"]["alone"][phase] == {"dtype": dtype, "largest": 3, **RIGHT}


def test_expert_ids_above_255_survive(single: Steps) -> None:
    answers = single.answers["wide"]["alone"]
    assert answers["fixed"]["largest"] > 255
    assert answers["fixed"] == {"dtype": "torch.int16" if ENGINE else "torch.int32", **RIGHT} | {
        "largest": answers["fixed"]["largest"]
    }
    if not FIXED:
        cut = {"dtype": "torch.uint8", "largest": 255, **RIGHT, "recorded what happened": False}
        assert answers["stock"] == answers["back"] == cut


def test_routers_of_another_model_come_first(single: Steps) -> None:
    answers = single.answers["small"]["others_in_front"]
    assert answers["fixed"].items() >= RIGHT.items()
    if FIXED:
        assert answers["stock"] == answers["back"] == answers["fixed"]
    else:
        assert answers["stock"] == answers["back"] == "AttributeError: 'NoneType' object has no attribute 'to'"


def test_another_model_has_emptied_the_list(single: Steps) -> None:
    answers = single.answers["small"]["others_only"]
    assert answers["fixed"] == {"recorded what happened": True, "list": True, "others": ["None"] * 3}
    error = "did not capture all local routers" if FIXED else "AttributeError: 'NoneType' object has no attribute 'to'"
    assert error in answers["stock"]
    assert error in answers["back"]


@pytest.mark.skipif(not ENGINE, reason="the legacy workers are started one by one")
def test_nothing_is_left_behind_by_an_exception(single: Steps) -> None:
    answers = single.answers["small"]["after_an_exception"]
    assert answers["fixed"] == {"list": True, "actions": ["None"]}
    for phase in ("stock", "back"):
        assert answers[phase]["actions"] == ["RouterReplayAction.REPLAY_BACKWARD"]
        assert "next forward" in answers[phase]


@pytest.mark.skipif(not ENGINE, reason="the legacy workers are started one by one")
def test_another_model_is_forwarded_inside_the_loss(single: Steps) -> None:
    answers = single.answers["small"]["nested"]
    assert answers["fixed"] == {"teacher": [True, True], "replayed what was recorded": True}
    for phase in ("stock", "back"):
        assert "Error: " in answers[phase]


@pytest.mark.skipif(not ENGINE, reason="the legacy workers are started one by one")
def test_a_model_is_forwarded_inside_its_own_loss(single: Steps) -> None:
    answers = single.answers["small"]["itself_inside"]
    assert answers["fixed"] == {"inner": [True, True], "gradient": True}
    for phase in ("stock", "back"):
        assert "Error: " in answers[phase]


@pytest.mark.parametrize("phase", PHASES)
def test_routes_of_a_rollout_go_to_the_layers_that_they_are_of(single: Steps, phase: str) -> None:
    """verl 0.7.0 takes the rows of the first layers for those of the layers that have a router."""
    assert single.answers["unequal stages"]["rollout_routes"][phase] is (phase == "fixed" or RELEASE != "0.7.0")


def test_recomputed_layers_replay_as_well(single: Steps) -> None:
    plain, recomputed = (
        flatten(single.gradients[f"fixed/{name}/alone/gradient"]) for name in ("four layers", "recomputed")
    )
    assert relative_error(recomputed, plain) < 1e-6


@pytest.mark.skipif(not ENGINE or FIXED, reason="of the engines; 0.9.1 refuses it by itself")
@pytest.mark.parametrize("phase", PHASES)
def test_a_dense_model_runs_with_r2_as_before(single: Steps, phase: str) -> None:
    assert single.answers["dense"]["dense"][phase] == ["log_probs"]


@pytest.mark.skipif(not ENGINE, reason="of the engines")
def test_routers_of_multi_token_prediction_stay_out(single: Steps) -> None:
    answers = single.answers["vision"]["vision_with_mtp"]
    assert answers["fixed"] == {"layers": 2, "mtp": [["None", 0]]}
    if FIXED:  # the older ones take as many routers as the model has layers
        assert answers["stock"]["layers"] == answers["back"]["layers"] == 3


@pytest.mark.skipif(RELEASE != "0.7.1", reason="of the legacy workers; those of 0.7.0 know no LoRA")
def test_the_reference_of_a_lora_actor_returns_no_routes(single: Steps) -> None:
    """The trainer would compare them with the actor's, and stop."""
    check(single.answers["small"]["reference"], ["ref_log_prob", "routed_experts"], ["ref_log_prob"])


@pytest.mark.skipif(ENGINE, reason="of the legacy workers")
def test_rows_that_come_later_are_not_looked_at(single: Steps) -> None:
    """With a transfer queue the worker gets a reference to its rows."""
    answers = single.answers["small"]["not_here_yet"]
    assert answers["fixed"] == answers["stock"] == answers["back"]
    assert all(answers["stock"])


@pytest.mark.skipif(not ENGINE, reason="the legacy workers are started one by one")
def test_a_batch_without_replay_does_not_touch_the_list(single: Steps) -> None:
    check(single.answers["small"]["switched_off"], {"routes": True, "kept": True}, {"routes": False, "kept": True})


@pytest.mark.parametrize(
    "attempt, says",
    [
        ("no routes", "has no routed_experts"),
        ("a layer too few", "routes of 2 layers; the model has 3 layers, 3 of them with a router"),
        ("another topk", "names 1 experts for each token, and moe_router_topk is 2"),
        ("shorter rows", "rows of routed_experts and of input_ids differ in length"),
        ("a layer number twice", "layer numbers [1] belong to more than one router"),
        pytest.param("a router that is not called", SILENT, marks=OWN_CHECK),
        pytest.param("a router that is called in one micro-batch only", SILENT, marks=OWN_CHECK),
        ("a router that was built without replay", "the router of layer 2 was built without router replay"),
    ],
)
def test_missing_incomplete_and_ambiguous_routes(single: Steps, attempt: str, says: str) -> None:
    answers = single.answers["small"]["refused"]
    assert answers["fixed"][attempt].startswith("RoutesError: r2-replay: ")
    assert says in answers["fixed"][attempt]
    assert "VERL_FIXES_R2_REPLAY=0" in answers["fixed"][attempt]
    assert not answers["stock"][attempt].startswith("RoutesError")
    assert answers["back"][attempt] == answers["stock"][attempt]


@pytest.mark.parametrize("attempt", ["as recorded", "a layer more"])
def test_what_stock_replays_rightly_is_not_refused(single: Steps, attempt: str) -> None:
    answers = single.answers["small"]["refused"]
    assert [answers[phase][attempt] for phase in PHASES] == ["", "", ""]


LAYOUTS = [pytest.param(name, marks=[pytest.mark.long] if FIXED else []) for name in PAIRS]
"""0.9.1 alone is compared with itself elsewhere."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_routes_and_gradients_are_those_of_one_process(single: Steps, pair: Steps, name: str) -> None:
    reference = PAIRS[name][0]
    ours, theirs = (
        {what: found.gradients[f"fixed/{key}/alone/{what}"] for what in ("routes", "gradient")}
        for found, key in ((pair, name), (single, reference))
    )
    assert ours["routes"].equal(theirs["routes"])  # type: ignore[attr-defined]
    assert relative_error(flatten(ours["gradient"]), flatten(theirs["gradient"])) < 1e-5


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.skipif(FIXED, reason="upstream's own gather, see nox -s layouts")
def test_a_stage_without_a_router_takes_part_in_the_gather(pair: Steps, phase: str) -> None:
    assert pair.answers["pp, none"]["gathers"][phase] == ([0, 2] if phase == "fixed" else [-1, 2])
