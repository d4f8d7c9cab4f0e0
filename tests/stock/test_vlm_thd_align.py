"""vlm-thd-align: verl#7702, verl#7948. What Megatron vision models are given under TP and CP, and what comes of it.

Where a release pads by itself, it has to pass with the same numbers.
"""

from __future__ import annotations

import functools
import json
import operator
from typing import Any

import pytest

from tests.processes import environment
from tests.stock.conftest import RELEASE
from verl_fixes.demo.gloo_processes import run

LAYOUTS = {"tp1": 1, "tp2": 2, "tp4": 4, "tp2cp2": 8}
"""What a row is padded to a multiple of."""
PADS, HAS_BUCKET = RELEASE >= "0.9.1", RELEASE >= "0.9"
PATHS = ("plain",) if RELEASE == "0.7.0" else ("plain", "fused")
ROWS, BUCKET = [27, 9, 29], 96

Answers = list[dict[str, Any]]
"""For each rank: layout, what was measured, phase, case."""


@pytest.fixture(scope="module")
def ranks() -> Answers:
    printed = run("tests.stock.jobs.vlm_thd", 4, fixes=True, timeout=240, env=environment())
    answers: Answers = json.loads(printed.splitlines()[-1])
    return answers


def same_everywhere(ranks: Answers, *keys: str) -> Any:
    first, *others = (functools.reduce(operator.getitem, keys, rank) for rank in ranks)
    assert all(other == first for other in others)
    return first


def up(length: int, multiple: int) -> int:
    return length + -length % multiple


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradients_are_those_of_one_rank(ranks: Answers, layout: str) -> None:
    """Real language models of megatron-core, packed and cut as Megatron-Bridge does, and mbridge's own Qwen2.5-VL."""
    for rank in ranks:
        cases = dict(rank[layout]["runs"]["fixed"])
        long = cases.pop("4026 tokens", 0.0)
        assert long == pytest.approx(0, abs=1e-5)
        assert ("mbridge, one row" in cases) is (layout != "tp2cp2")
        assert ("fused, rows, bucket" in cases) is HAS_BUCKET
        for case, answer in cases.items():
            assert isinstance(answer, dict), (case, answer)
            assert answer["lengths"] == [max(length - 1, 0) for length in lengths_of(case)]
            assert answer["log_probs"] < 3e-6, case
            assert answer["gradients"] < 3e-6, case


def lengths_of(case: str) -> list[int]:
    return {"one row": [27], "rows": ROWS, "aligned": [32, 8, 16], "empty": [27, 0, 14]}[case.split(", ")[1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stock_code_does_with_it(ranks: Answers, layout: str) -> None:
    for rank in ranks:
        cases = rank[layout]["runs"]["stock"]
        fails = {case for case, answer in cases.items() if isinstance(answer, str)}
        one_row = {case for case in cases if case.endswith("one row")} | ({"4026 tokens"} & set(cases))
        expected = set(one_row) if layout != "tp1" and not PADS else set()
        expected |= {case for case in cases if case.endswith("bucket")}
        if layout == "tp2cp2" and RELEASE == "0.7.0":
            expected |= {"plain, empty"}
        assert fails == expected
        if layout in ("tp2", "tp4"):
            assert all("divisible by tensor parallel size" in cases[case] for case in one_row & expected)
        if layout == "tp2cp2" and RELEASE != "0.7.0":
            assert cases["plain, empty"]["log_probs"] > 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_works_on_stock_code_is_the_same_to_the_bit(ranks: Answers, layout: str) -> None:
    for rank in ranks:
        stock, fixed = (rank[layout]["runs"][phase] for phase in ("stock", "fixed"))
        same = {"plain, rows", "plain, aligned"}
        assert {case: stock[case] for case in same} == {case: fixed[case] for case in same}


def test_all_is_stock_again_afterwards(ranks: Answers) -> None:
    for rank in ranks:
        for layout in LAYOUTS:
            for measured in filter(None, rank[layout].values()):
                assert measured.get("back", measured["stock"]) == measured["stock"]
        assert rank["tp2"]["runs"]["back"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_padded_for_tp_and_cp_and_the_mask_does_not_cover_it(ranks: Answers, layout: str, path: str) -> None:
    multiple = LAYOUTS[layout]
    for phase in ("fixed", "stock") if PADS else ("fixed",):
        cases = same_everywhere(ranks, layout, "inputs", phase, path)
        for case, lengths in (
            ("long", [4026]),
            ("rows", ROWS),
            ("aligned", [32, 8, 16]),
            ("empty", [27, 0, 14]),
            ("nothing", [9, 0, 0]),
        ):
            width = up(max(lengths), multiple)
            assert cases[case] == {
                "ids": [len(lengths), width],
                "pad": len(lengths) * width - sum(lengths),
                "covered": lengths,
                "mask": ["torch.bool", [len(lengths), width], True],
                "padded": [up(length, multiple) for length in lengths],
                "hooks": 0,
            }, case


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stock_code_pads_to_the_longest_row(ranks: Answers, layout: str, path: str) -> None:
    answer = same_everywhere(ranks, layout, "inputs", "stock", path, "rows")
    assert answer["ids"] == [3, up(29, LAYOUTS[layout]) if PADS else 29]


@pytest.mark.skipif(not HAS_BUCKET, reason="this release has no pad_to_length_bucket")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_by_the_mask_makes_the_length_of_the_bucket(ranks: Answers, layout: str, path: str) -> None:
    multiple = LAYOUTS[layout]
    cases = same_everywhere(ranks, layout, "inputs", "fixed", path)
    last = BUCKET - up(27, multiple) - up(9, multiple)
    assert cases["bucket"]["padded"] == [up(27, multiple), up(9, multiple), last]
    assert cases["bucket"]["covered"] == [27, 9, last]
    assert cases["bucket"]["ids"] == [3, max(last, up(27, multiple))]
    assert sum(up(length, multiple) for length in cases["bucket"]["covered"]) == BUCKET
    assert (cases["bucket, one row"]["ids"], cases["bucket, one row"]["covered"]) == ([1, BUCKET], [BUCKET])
    assert (cases["bucket, aligned"]["ids"], cases["bucket, aligned"]["covered"]) == ([2, 64], [64, 32])
    stock = ranks[0][layout]["inputs"]["stock"][path]["bucket"]
    assert sum(up(length, multiple) for length in stock["covered"]) < BUCKET


@pytest.mark.skipif(RELEASE < "0.7.1", reason="this release does not pad for fp8")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_by_the_mask_makes_the_lengths_of_fp8(ranks: Answers, layout: str, path: str) -> None:
    multiple = LAYOUTS[layout]
    answer = same_everywhere(ranks, layout, "inputs", "fixed", path, "fp8")
    total = sum(answer["padded"])
    assert total % (multiple * 128) == 0
    assert answer["padded"] == [32, 16, total - 48]
    assert [up(length, multiple) for length in answer["covered"]] == answer["padded"]
    assert answer["ids"] == [3, max(answer["padded"])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pipeline_stages_and_wrapped_models_get_the_same(ranks: Answers, layout: str) -> None:
    cases = same_everywhere(ranks, layout, "inputs", "fixed", "plain")
    assert cases["first stage"] == cases["rows"]  # of a stage in the middle
    assert cases["wrapped"].items() <= cases["rows"].items()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_absent_mask_stays_absent(ranks: Answers, layout: str) -> None:
    """verl on NPU gives none, on 0.8.0 and 0.9.0; older and newer releases ask for no device there."""
    fixed = same_everywhere(ranks, layout, "inputs", "fixed", "plain")
    if RELEASE in ("0.8.0", "0.9.0"):
        assert fixed["npu"] == {**fixed["rows"], "covered": None, "mask": None}
    else:
        assert fixed["npu"] == fixed["rows"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_models_and_bshd_are_left_alone(ranks: Answers, layout: str) -> None:
    for path in PATHS:
        given = [same_everywhere(ranks, layout, "inputs", phase, path, "text") for phase in ("stock", "fixed")]
        assert given == [[1, up(27, LAYOUTS[layout]) // (2 if layout == "tp2cp2" else 1)]] * 2
    if layout != "tp2cp2":
        bshd = [same_everywhere(ranks, layout, "bshd", phase) for phase in ("stock", "fixed")]
        assert bshd[0] == bshd[1]
        assert bshd[0]["padded"] is None


def test_no_hook_stays_on_a_model_that_fails(ranks: Answers) -> None:
    assert ranks[0]["tp2"]["inputs"]["fixed"]["plain"]["hooks after an error"] == 0


def test_every_cp_rank_gets_its_complete_slice(ranks: Answers) -> None:
    fixed = same_everywhere(ranks, "tp2cp2", "slices", "fixed")
    assert fixed == {case: [True] * len(rows) for case, rows in fixed.items()}
    assert {"long rows", "short rows", "an empty row", "empty first"} <= set(fixed)
    assert ("fp8" in fixed, "bucket" in fixed) == (RELEASE >= "0.7.1", HAS_BUCKET)


def test_which_slices_fail_on_stock_code(ranks: Answers) -> None:
    stock = same_everywhere(ranks, "tp2cp2", "slices", "stock")
    wrong = {case for case, rows in stock.items() if isinstance(rows, str) or not all(rows)}
    assert (
        wrong
        == {
            "0.7.0": {"short rows", "an empty row", "empty first"},
            "0.7.1": {"an empty row", "fp8"},
            "0.8.0": {"an empty row", "fp8"},
            "0.9.0": {"an empty row", "fp8", "bucket"},
            "0.9.1": {"an empty row"},
        }[RELEASE]
    )
