"""How vlm-thd-align tells code that pads from code that does not, beyond the releases that are tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from verl_fixes.patch import Target
from verl_fixes.patches.vlm_thd_align import PATCH
from verl_fixes.probe import Source, Verdict, judge

FORWARD = "def gptmodel_forward_model_engine(model, input_ids, pad_token_id=None):\n    return {}\n"
BUILDER = "def build_vlm_attn_mask_thd(input_ids, pad_token_id=None, {more}):\n    return input_ids.{to_dense}\n"
LONGEST, SIZED = "to_padded_tensor(pad_token_id)", "to_padded_tensor(pad_token_id, output_size=size)"
PREPROCESS = "def preprocess_thd_engine(input_ids, cp_rank):\n    half_seqlen = 2 * cp_rank\n{fill}"
GOAL = "    goal = max(align_size, seqlen_padded_i)\n"
FILL = "    if d.shape[0] < {bound}:\n        d = torch.cat([d, pad])\n"

Write = Callable[..., Source]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    folder = tmp_path / "verl" / "models" / "mcore"
    folder.mkdir(parents=True)

    def write_modules(**modules: str) -> Source:
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        return Source((tmp_path / "verl",))

    return write_modules


def judged(source: Source, qualname: str) -> Verdict:
    (target,) = (target for target in PATCH.targets if target.qualname == qualname)
    return judge(source, target.module, target.judged, {}, target.question)


@pytest.mark.parametrize(
    "call, to_dense, verdict",
    [
        pytest.param("build_vlm_attn_mask_thd(input_ids, pad_token_id)", LONGEST, "BUGGY", id="to the longest row"),
        pytest.param("build_vlm_attn_mask_thd(input_ids, pad_token_id)", SIZED, "INCOMPLETE", id="TP and CP"),
        pytest.param(
            "build_vlm_attn_mask_thd(input_ids, pad_token_id, packed_seq_params=packed)", SIZED, "FIXED", id="told"
        ),
        pytest.param(
            "build_vlm_attn_mask_thd(input_ids, pad_token_id, packed)", LONGEST, "BUGGY", id="told and not used"
        ),
        pytest.param("build_vlm_attn_mask_thd(input_ids, pad_token_id)", "values()", "DRIFTED", id="unknown"),
        pytest.param(f"input_ids.{LONGEST}", LONGEST, "BUGGY", id="in place"),
        pytest.param("None", LONGEST, "DRIFTED", id="nowhere"),
    ],
)
def test_padding(write: Write, call: str, to_dense: str, verdict: str) -> None:
    source = write(
        model_forward=FORWARD.format(call), util=BUILDER.format(more="packed_seq_params=None", to_dense=to_dense)
    )
    assert judged(source, "gptmodel_forward_model_engine") is Verdict[verdict]


def test_a_builder_that_is_not_there(write: Write) -> None:
    source = write(model_forward=FORWARD.format("build_vlm_attn_mask_thd(input_ids, pad_token_id)"), util="")
    assert judged(source, "gptmodel_forward_model_engine") is Verdict.DRIFTED


@pytest.mark.parametrize(
    "fill, verdict",
    [
        pytest.param("", "BUGGY", id="not filled"),
        pytest.param(FILL.format(bound="align_size"), "BUGGY", id="to the alignment"),
        pytest.param(FILL.format(bound="seqlen_padded_i"), "INCOMPLETE", id="to the padded length"),
        pytest.param(
            "    goal = max(align_size, seqlen_padded_i)\n" + FILL.format(bound="goal"), "INCOMPLETE", id="max"
        ),
        pytest.param(FILL.format(bound="something"), "DRIFTED", id="to something"),
    ],
)
def test_filling(write: Write, fill: str, verdict: str) -> None:
    source = write(util=PREPROCESS.format(fill=fill))
    assert judged(source, "preprocess_thd_engine") is Verdict[verdict]


def test_slices_that_are_cut_in_another_way(write: Write) -> None:
    source = write(util="def preprocess_thd_engine(input_ids):\n    return input_ids\n")
    assert judged(source, "preprocess_thd_engine") is Verdict.DRIFTED


def names(source: Source) -> set[str]:
    def is_there(target: Target) -> bool:
        return target.exists is None or target.exists(source)

    return {target.qualname for target in PATCH.targets if is_there(target)}


def test_each_release_has_one_name_for_each_function(write: Write) -> None:
    newer = {"gptmodel_forward_model_engine", "fused_forward_model_engine", "preprocess_thd_engine"}
    assert names(write(model_forward="", model_forward_fused="", util="")) == newer
    write(model_forward="def gptmodel_forward_no_padding(): pass", util="def preprocess_thd_no_padding(): pass")
    older = {"gptmodel_forward_no_padding", "preprocess_thd_no_padding"}
    assert names(write()) == older
    assert names(write(model_forward_fused="def fused_forward_no_padding_gen(): pass")) == older | {
        "fused_forward_no_padding_gen"
    }
