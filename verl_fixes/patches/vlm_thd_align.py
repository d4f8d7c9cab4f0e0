"""What the vision path gives a Megatron model has the lengths that its packed sequences are said to have.

What goes wrong: a vision model gets its rows padded to the longest one, together with ``packed_seq_params``, which
count padding in every row: to a multiple of TP, of 2 x TP x CP under context parallelism, more with fp8, and in the
last row what ``pad_to_length_bucket`` asks for. One row is taken for the packed sequence as it is: sequence parallelism
cannot scatter 4026 tokens over TP=4, and the run stops. Several rows are packed by the model itself, which knows of TP
and CP only: with a bucket or fp8 its sequence is shorter than was said, and attention over packed sequences fails.
verl 0.9.1 pads for TP and CP, and for nothing else.

Under context parallelism verl cuts each row into slices. 0.7.0 fails where a row ends before the second half of its
padded length, 0.7.1 to 0.9.0 where it does because of fp8 or a bucket. A row without tokens fails on 0.7.0, and
spoils a label of the row before it on every other release.

What the wrappers do: before the model's forward, a hook pads ``input_ids`` with the pad token to the longest row of
``packed_seq_params``, on every pipeline stage, and ``attention_mask`` with False. Where the model would pack a row to
another length, the mask covers the padding, too. Short rows are filled up before they are cut, empty ones left out of
it, for text models as well. Padding comes after every token of its row: outputs and gradients of real tokens are the
same. With ``pad_to_length_bucket`` each row of the dense batch is as wide as the last one with its bucket. BSHD and a
mask that is None (verl on NPU) are left as they are, and so are the legacy workers of verl 0.7, whose rows are as long
as ``max_prompt_length`` and ``max_response_length`` make them.

When it can go: with the first release that has verl#7948; 0.9.1 does not.
Sources: https://github.com/verl-project/verl/pull/7702, https://github.com/verl-project/verl/pull/7948
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from verl_fixes.arguments import Call
from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict, mentions
from verl_fixes.token_counts import layout_multiple

if TYPE_CHECKING:
    import torch

_PLAIN = "verl.models.mcore.model_forward"
_FUSED = "verl.models.mcore.model_forward_fused"
_UTIL = "verl.models.mcore.util"
_BUILDER = "build_vlm_attn_mask_thd"
_PACK = ("input_ids", "pre_process", "need_roll")


def covered_lengths(lengths: Sequence[int], padded: Sequence[int], multiple: int) -> list[int]:
    """How much of each row the mask has to cover, so that a model that packs rows by their mask gets ``padded``.

    Such a model pads what is covered to a multiple of ``multiple``: that of the row's own length where it leads to
    the padded length, as it does without fp8 and bucket; else all of the padded row.
    """
    return [
        length if length + -length % multiple == target else max(length, target)
        for length, target in zip(lengths, padded, strict=True)
    ]


def pad_rows(
    ids: torch.Tensor, mask: torch.Tensor | None, padded: Sequence[int], multiple: int, pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Right-padded rows, as wide as the longest padded one.

    Args:
        ids: ``[rows, width]``.
        mask: ``[rows, width]``, True for the first tokens of each row; None stays None.
        padded: what ``packed_seq_params`` says of the length of each row.
        multiple: what each row is padded to a multiple of for TP and CP.
    """
    import torch

    missing = max(max(padded, default=0) - ids.shape[1], 0)
    ids = torch.nn.functional.pad(ids, (0, missing), value=pad_token_id)
    if mask is None:
        return ids, None
    covered = covered_lengths(mask.sum(dim=1).tolist(), padded, multiple)
    positions = torch.arange(ids.shape[1], device=mask.device)
    reached = positions < torch.tensor(covered, device=mask.device).unsqueeze(1)
    return ids, torch.nn.functional.pad(mask, (0, missing)) | reached.to(mask.dtype)


def _padded_lengths(packed_seq_params: Any) -> list[int]:
    boundaries: torch.Tensor = packed_seq_params.cu_seqlens_q_padded
    lengths: list[int] = boundaries.diff().tolist()
    return lengths


@contextmanager
def _rows_padded(model: Any, pad_token_id: int) -> Iterator[None]:
    """While it lasts, ``model``, wrapped in DDP and Float16Module or not, gets padded rows."""

    def pad(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        packed_seq_params, ids = kwargs.get("packed_seq_params"), kwargs.get("input_ids")
        if packed_seq_params is None or ids is None or ids.is_nested or ids.dim() != 2:
            return None
        padded = _padded_lengths(packed_seq_params)
        if len(padded) != len(ids):
            return None  # packed already
        multiple = layout_multiple(None, local_cp_size=getattr(packed_seq_params, "local_cp_size", None))
        ids, mask = pad_rows(ids, kwargs.get("attention_mask"), padded, multiple, pad_token_id)
        return args, kwargs | ({"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask})

    hook = model.register_forward_pre_hook(pad, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def pad_plain(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``gptmodel_forward_no_padding``, from 0.8.0 on ``gptmodel_forward_model_engine``."""
    call = Call(original, ("model", "input_ids"), args, kwargs)
    if not call.get("vision_model") or call.get("data_format", "thd") != "thd":
        return call()
    with _rows_padded(call["model"], call["pad_token_id"]):
        return call()


def pad_fused(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``fused_forward_no_padding_gen``, from 0.8.0 on ``fused_forward_model_engine``: both make the forward."""
    forward = original(*args, **kwargs)
    if not Call(original, ("vision_model",), args, kwargs)["vision_model"]:
        return forward

    @functools.wraps(forward)
    def padded_forward(model: Any, *args: Any, pad_token_id: int, **kwargs: Any) -> Any:
        with _rows_padded(model, pad_token_id):
            return forward(model, *args, pad_token_id=pad_token_id, **kwargs)

    return padded_forward


def fill_short_rows(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``preprocess_thd_no_padding``, from 0.8.0 on ``preprocess_thd_engine``: rows that fill their slices.

    A rank's first slice ends in the first half of the padded row, and the label after it is looked up as well: a row
    that ends there is filled with zeros to its padded length. Longer rows are cut as ever. Rows without any token are
    kept from being cut: the label that is looked up for them would take the place of one of the row before.
    """
    import torch

    call = Call(original, _PACK, args, kwargs)
    multiple = layout_multiple(None, local_cp_size=call.get("local_cp_size"))
    without_cp = layout_multiple(None, local_cp_size=1)
    if not call["pre_process"] or multiple == without_cp or call.get("cp_layout", "zigzag") != "zigzag":
        return call()
    packed_seq_params = call(pre_process=False)[1]
    given = list(zip(call["input_ids"].unbind(), _padded_lengths(packed_seq_params), strict=True))
    rows = [_filled(row, length) if length % multiple == 0 else row for row, length in given if length]
    if not rows or (len(rows) == len(given) and all(row is old for row, (old, _) in zip(rows, given, strict=True))):
        return call()
    ids, _, *others = call(input_ids=torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    return (ids, packed_seq_params, *others)


def _filled(row: torch.Tensor, length: int) -> torch.Tensor:
    import torch

    if 2 * len(row) > length:
        return row
    return torch.cat([row, row.new_zeros(length - len(row), *row.shape[1:])])


def _has(module: str, name: str) -> Callable[[Source], bool]:
    return lambda source: source.function(module, name) is not None


def _newer(module: str, name: str, older: str) -> Callable[[Source], bool]:
    """The name since 0.8.0. A release that has neither has renamed it again."""
    return lambda source: source.function(module, name) is not None or source.function(module, older) is None


def _pads_rows(function: Function, source: Source) -> Verdict:
    """The vision path pads rows in place, or in a function of its own: to the longest, or to a size that it computes.

    A call with more than the ids and the pad token passes on what is known of the packed sequences.
    """
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    builders = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == _BUILDER]
    if not builders:
        return _pads_to_size(function)
    builder = source.function(_UTIL, _BUILDER)
    verdict = Verdict.DRIFTED if builder is None else _pads_to_size(builder)
    told = all(len(call.args) + len(call.keywords) > 2 for call in builders)
    return Verdict.FIXED if told and verdict is Verdict.INCOMPLETE else verdict


def _pads_to_size(function: Function) -> Verdict:
    dense = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to_padded_tensor"
    ]
    if len(dense) != 1:
        return Verdict.DRIFTED
    sized = any(keyword.arg == "output_size" for keyword in dense[0].keywords)
    return Verdict.INCOMPLETE if sized else Verdict.BUGGY


def _fills_rows(function: Function, source: Source) -> Verdict:
    """Rows are filled with ``torch.cat`` where they are shorter than something: the padded length, from 0.9.1 on.

    What is looked up for rows without tokens, no release handles.
    """
    if not mentions(function, "cp_rank") or not mentions(function, "half_seqlen"):
        return Verdict.DRIFTED
    if not mentions(function, "cat"):
        return Verdict.BUGGY
    filled_to = [
        node.comparators[0]
        for node in ast.walk(function)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt) and mentions(node.left, "d")
    ]
    names = {node.id for bound in filled_to for node in ast.walk(bound) if isinstance(node, ast.Name)}
    if names == {"align_size"}:
        return Verdict.BUGGY
    assigned = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in node.targets)
    ]
    fills = any(mentions(part, "seqlen_padded_i") for part in (*filled_to, *assigned))
    return Verdict.INCOMPLETE if fills else Verdict.DRIFTED


PATCH = Patch(
    name="vlm-thd-align",
    title="Vision models get rows that TP, CP and length buckets divide",
    hurts=(
        "Megatron vision models with use_remove_padding: a micro-batch of one row whose length TP does not divide "
        "stops in the scatter of sequence parallelism, on verl 0.7.0 to 0.9.0. With pad_to_length, of verl 0.9, the "
        "model packs its rows to another length than packed_seq_params says, and attention fails. Under context "
        "parallelism rows that are much shorter than their padding fail when they are cut into slices."
    ),
    does=(
        "Pads input_ids and attention_mask of the vision path to the row lengths of packed_seq_params, in a forward "
        "hook on the model that lasts for one call, and fills short rows before context parallelism cuts them, those "
        "of text models as well. BSHD and an absent mask stay as they are."
    ),
    removable="With the first release that has verl#7948; 0.9.1 does not.",
    upstream=(
        "https://github.com/verl-project/verl/pull/7702",
        "https://github.com/verl-project/verl/pull/7948",
    ),
    fixed_in="none yet",
    atomic=False,
    targets=(
        Target(
            module=_PLAIN,
            qualname="gptmodel_forward_no_padding",
            exists=_has(_PLAIN, "gptmodel_forward_no_padding"),
            wrapper=pad_plain,
            question=_pads_rows,
        ),
        Target(
            module=_PLAIN,
            qualname="gptmodel_forward_model_engine",
            exists=_newer(_PLAIN, "gptmodel_forward_model_engine", "gptmodel_forward_no_padding"),
            wrapper=pad_plain,
            question=_pads_rows,
        ),
        Target(
            module=_FUSED,
            qualname="fused_forward_no_padding_gen",
            exists=_has(_FUSED, "fused_forward_no_padding_gen"),
            wrapper=pad_fused,
            question=_pads_rows,
        ),
        Target(
            module=_FUSED,
            qualname="fused_forward_model_engine",
            exists=lambda source: (  # 0.7.0 has no fused engine path at all
                _has(_FUSED, "fused_forward_model_engine")(source)
                or not _has(_PLAIN, "gptmodel_forward_no_padding")(source)
            ),
            wrapper=pad_fused,
            question=_pads_rows,
        ),
        Target(
            module=_UTIL,
            qualname="preprocess_thd_no_padding",
            exists=_has(_UTIL, "preprocess_thd_no_padding"),
            wrapper=fill_short_rows,
            question=_fills_rows,
            known={
                "81f3e7317d2a1f5c": Verdict.BUGGY,  # 0.7.0
                "bf80f54b0e892427": Verdict.BUGGY,  # 0.7.1
            },
        ),
        Target(
            module=_UTIL,
            qualname="preprocess_thd_engine",
            exists=_newer(_UTIL, "preprocess_thd_engine", "preprocess_thd_no_padding"),
            wrapper=fill_short_rows,
            question=_fills_rows,
            known={
                "dddbab5e5df85dd6": Verdict.BUGGY,  # 0.8.0
                "87bb6febd9a9fdb0": Verdict.BUGGY,  # 0.9.0
                "dbf77d9a371ccbd9": Verdict.INCOMPLETE,  # 0.9.1
            },
        ),
    ),
)
