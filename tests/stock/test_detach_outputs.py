"""detach-outputs on the real engines: field cases 17 (verl#6696), 18 (verl#7166) and 19 (verl#7874)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import call

JOBS = "tests.stock.jobs.detach"
ATTACHED_UNTIL = {"fsdp": "0.9", "veomni": "0.9", "torchtitan": "0.9.1", "automodel": "0.9.1", "megatron": "0.9.1"}
SAME = ("jagged", "other leaves", "values", "loss is live", "loss", "metrics", "gradient")


@pytest.fixture(scope="module")
def shipped() -> Any:
    return call(f"{JOBS}:shipped")


def test_the_engines_of_this_release_were_all_run(shipped: Any, release: str) -> None:
    expected = {"fsdp", "veomni", "megatron", "mindspeed"}
    expected |= {"torchtitan"} if release >= "0.7.1" else set()
    expected |= {"automodel"} if release >= "0.8" else set()
    assert expected - set(shipped) <= {"mindspeed"}
    for name, answer in shipped.items():
        for phase in ("stock", "fixed", "back"):
            assert isinstance(answer[phase], dict), (name, phase, answer[phase])


def test_stock_reports_attached_tensors_where_the_study_says_so(shipped: Any, release: str) -> None:
    for name, answer in shipped.items():
        for phase in ("stock", "back"):
            attached = (answer[phase]["top"], answer[phase]["nested"])
            if release < ATTACHED_UNTIL.get(name, "0.9.1"):
                assert attached == (2, 2), name
            elif release < "0.9.1":
                assert attached == (0, 2), name  # 0.9.0's FSDP detaches the top level only
            else:
                assert attached == (0, 0), name


def test_with_the_fix_nothing_is_attached_and_nothing_else_changes(shipped: Any) -> None:
    for name, answer in shipped.items():
        assert (answer["fixed"]["top"], answer["fixed"]["nested"]) == (0, 0), name
        for key in SAME:
            assert answer["fixed"][key] == answer["stock"][key] == answer["back"][key], (name, key)
        assert answer["fixed"]["loss is live"]
        assert answer["fixed"]["jagged"]


def test_engines_of_the_users_own() -> None:
    answer = call(f"{JOBS}:registered")
    attached = {"own": 2, "heir": 3, "mixed": 2, "pipeline": 2, "silent": 0, "adds": 2}
    for phase in ("stock", "back"):
        for engines in answer[phase].values():
            assert {name: result[0] for name, result in engines.items()} == attached
    for when, engines in answer["fixed"].items():
        assert {name: result[0] for name, result in engines.items()} == dict.fromkeys(attached, 0), when
        for name, (_, pair, gradient) in engines.items():
            assert pair == (None if name == "silent" else "Pair")
            assert gradient == answer["stock"][when][name][2]


def test_subclasses_of_a_shipped_engine_may_use_what_super_reports(release: str) -> None:
    answer = call(f"{JOBS}:heirs")
    for phase in ("stock", "fixed", "back"):
        for when in ("early", "late"):
            adds, replaces = (answer[phase][when][name] for name in ("adds", "replaces"))
            if release < "0.9" or (phase == "fixed" and release < "0.9.1"):  # 0.9.1's own engine is not wrapped
                assert (adds[0] > 0, replaces[0] > 0) == (phase != "fixed", phase != "fixed")
            assert adds[1] == answer["stock"]["early"]["adds"][1]
            assert replaces[1] == answer["stock"]["early"]["replaces"][1]
    if release < "0.9":
        assert answer["fixed"]["late"]["adds"][1][1][0] > 0  # the entropy's part of the gradient


def test_memory_is_flat_over_the_micro_batches(release: str) -> None:
    answer = call(f"{JOBS}:memory", counts=[4, 64])
    for phase in ("stock", "back"):
        few, many = answer[phase]["4"], answer[phase]["64"]
        if release < "0.9":
            assert many["tensors"] == 16 * few["tensors"] > 0
            assert many["bytes"] > 10 * few["bytes"]
        else:
            assert many["tensors"] == few["tensors"] == 0
    few, many = answer["fixed"]["4"], answer["fixed"]["64"]
    assert few["tensors"] == many["tensors"] == 0
    assert few["bytes"] == many["bytes"]
    assert few["nodes"] == many["nodes"] == 0
    for count in ("4", "64"):
        for key in ("grad_norm", "loss"):
            assert answer["fixed"][count][key] == answer["stock"][count][key] == answer["back"][count][key]
