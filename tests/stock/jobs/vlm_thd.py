"""The vision path of the release's own forward functions under TP=2, TP=4 and TP=2 x CP=2, and its CP slices.

Started in each of the four processes of a gloo group; rank 0 prints one JSON line.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.stock.jobs.phases import PHASES, phases
from tests.stock.vision_models import (
    IMAGE,
    PAD,
    PIXELS,
    VOCABULARY,
    PackingModel,
    mbridge_model,
    token_log_probs,
    transformer_config,
)
from verl_fixes.demo import megatron_on_cpu as cpu
from verl_fixes.demo.cpu_attention import zigzag_positions
from verl_fixes.demo.gloo_processes import process_group

LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "tp4": (4, 1), "tp2cp2": (2, 2)}
ONE_ROW, ROWS, ALIGNED, EMPTY = (27,), (27, 9, 29), (32, 8, 16), (27, 0, 14)
LONG = (4026,)
BUCKET = 96

Batch = tuple[Tensor, dict[str, Tensor]]


def batch(lengths: Sequence[int], seed: int = 0) -> Batch:
    """Jagged ids of rows of these lengths, four image tokens in the first, and the pixels for them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(IMAGE + 2, VOCABULARY, (length,), generator=generator) for length in lengths]
    rows[0][5:9] = IMAGE
    images = {
        "pixel_values": torch.randn(4, PIXELS, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged), images


def plain(model: Any, ids: Tensor, images: dict[str, Tensor], **more: Any) -> Any:
    """What the engine's ``forward_step`` does without fused kernels."""
    from verl.models.mcore import registry

    getter = getattr(registry, "get_mcore_engine_forward_fn", None) or registry.get_mcore_forward_no_padding_fn
    arguments = {"vision_model": True, "pad_token_id": PAD, "logits_processor_args": {"label": ids.clone()}} | more
    return getter(_hf_config())(model, ids, images, logits_processor=token_log_probs, **arguments)


def fused(model: Any, ids: Tensor, images: dict[str, Tensor], vision: bool = True, **more: Any) -> Any:
    """What it does with them."""
    forward = _fused_getter()(_hf_config(vision))
    arguments = {"temperature": 1.0, "calculate_entropy": True, "pad_token_id": PAD} | more
    return forward(model=model, input_ids=ids, labels=ids.clone(), multi_modal_inputs=images, **arguments)


def _fused_getter() -> Any:
    from verl.models.mcore import registry

    names = ("get_mcore_forward_fused_model_engine_fn", "get_mcore_forward_fused_no_padding_fn")
    return next((getattr(registry, name) for name in names if hasattr(registry, name)), None)


def _hf_config(vision: bool = True) -> Any:
    return SimpleNamespace(architectures=["Qwen2_5_VLForConditionalGeneration" if vision else "Qwen3ForCausalLM"])


def _preprocess() -> Any:
    from verl.models.mcore import util

    return getattr(util, "preprocess_thd_engine", None) or util.preprocess_thd_no_padding


def _knows(name: str) -> bool:
    return name in inspect.signature(_preprocess()).parameters


PATHS: dict[str, Callable[..., Any]] = {"plain": plain, "fused": fused}


class Given(torch.nn.Module):
    """A model, or one of its pipeline stages, that notes what it is given."""

    def __init__(self, config: Any, first: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.config, self.pre_process, self.post_process, self.fails = config, first, False, fails
        self.kwargs: dict[str, Any] = {}

    def forward(self, **kwargs: Any) -> Tensor:
        self.kwargs = kwargs
        if self.fails:
            raise ValueError("the model failed")
        return torch.zeros(1)

    def report(self) -> dict[str, Any]:
        ids, mask = self.kwargs["input_ids"], self.kwargs["attention_mask"]
        packed = self.kwargs.get("packed_seq_params")
        return {
            "ids": list(ids.shape),
            "pad": int((ids == PAD).sum()),
            "covered": None if mask is None else mask.sum(dim=1).tolist(),
            "mask": None if mask is None else [str(mask.dtype), list(mask.shape), bool((mask.int().diff() <= 0).all())],
            "padded": None if packed is None else packed.cu_seqlens_q_padded.diff().tolist(),
        }


def _stage(fp8: str | None = None, **what: bool) -> Given:
    """A stage in the middle of a pipeline, where nothing else is said."""
    return Given(SimpleNamespace(fp8=fp8, sequence_parallel=True), **what)


def given(path: str, lengths: Sequence[int], model: Given | None = None, **more: Any) -> Any:
    model = model or _stage()
    try:
        PATHS[path](model, *batch(lengths), **more)
    except (RuntimeError, IndexError) as error:
        return type(error).__name__
    return {**model.report(), "hooks": len(model._forward_pre_hooks)}


def inputs() -> dict[str, Any]:
    """What a model is given, case by case. No communication."""
    from megatron.core.transformer.module import Float16Module
    from verl.models.mcore import util

    answers: dict[str, Any] = {}
    for path in PATHS if _fused_getter() else ["plain"]:
        answers[path] = {
            "long": given(path, LONG),
            "rows": given(path, ROWS),
            "aligned": given(path, ALIGNED),
            "empty": given(path, EMPTY),
            "nothing": given(path, (9, 0, 0)),
        }
        if _knows("use_fp8_padding"):
            answers[path]["fp8"] = given(path, ROWS, _stage("e4m3"))
        if _knows("pad_to_length_bucket"):
            answers[path]["bucket"] = given(path, ROWS, pad_to_length_bucket=BUCKET)
            answers[path]["bucket, one row"] = given(path, ONE_ROW, pad_to_length_bucket=BUCKET)
            answers[path]["bucket, aligned"] = given(path, (64, 32), pad_to_length_bucket=BUCKET)
    bf16 = transformer_config(bf16=True, params_dtype=torch.bfloat16)
    inner = Given(bf16)
    plain(Float16Module(bf16, inner), *batch(ROWS))
    answers["plain"]["wrapped"] = inner.report()
    answers["plain"]["first stage"] = given("plain", ROWS, _stage(first=True))
    answers["plain"]["text"] = given("plain", ONE_ROW, _stage(first=True), vision_model=False)["ids"]
    if _fused_getter():
        answers["fused"]["text"] = given("fused", ONE_ROW, _stage(first=True), vision=False)["ids"]
    with mock.patch.object(util, "is_npu_available", True, create=True):
        answers["plain"]["npu"] = given("plain", ROWS)
    broken = _stage(fails=True)
    try:
        plain(broken, *batch(ROWS))
    except ValueError:
        answers["plain"]["hooks after an error"] = len(broken._forward_pre_hooks)
    return answers


def bshd() -> dict[str, Any]:
    """BSHD needs no packing; before 0.8.0 with CP=1 only."""
    return given("plain", ROWS, data_format="bshd")


class Runs:
    """Log-probs and gradients of the models, compared with those of TP=1 on stock code."""

    def __init__(self) -> None:
        self._reference: dict[str, tuple[list[Tensor], dict[str, Tensor]]] = {}

    def models(self, tp: int, cp: int) -> None:
        self._packing = PackingModel(transformer_config(tp, cp))
        self._mbridge = mbridge_model(transformer_config(tp, cp)) if cp == 1 else None
        for model in filter(None, (self._packing, self._mbridge)):
            cpu.draw_weights([model.language_model], seed=0)
            generator = torch.Generator().manual_seed(1)
            weight = model.vision_model.project.weight
            weight.data.copy_(torch.randn(weight.shape, generator=generator))

    def cases(self) -> dict[str, tuple[str, Any, Sequence[int], dict[str, Any]]]:
        cases: dict[str, tuple[str, Any, Sequence[int], dict[str, Any]]] = {}
        for path in PATHS if _fused_getter() else ["plain"]:
            cases[f"{path}, one row"] = (path, self._packing, ONE_ROW, {})
            if _knows("pad_to_length_bucket"):
                bucket = {"pad_to_length_bucket": BUCKET}
                cases[f"{path}, one row, bucket"] = (path, self._packing, ONE_ROW, bucket)
                cases[f"{path}, rows, bucket"] = (path, self._packing, ROWS, bucket)
        cases["plain, rows"] = ("plain", self._packing, ROWS, {})
        cases["plain, aligned"] = ("plain", self._packing, ALIGNED, {})
        cases["plain, empty"] = ("plain", self._packing, EMPTY, {})
        if self._mbridge is not None:
            cases["mbridge, one row"] = ("plain", self._mbridge, ONE_ROW, {})
        return cases

    def learn(self) -> None:
        for name, (path, model, lengths, _) in self.cases().items():
            self._reference[name] = self._run(path, model, lengths)
        self._long = self._log_probs("plain", self._packing, LONG) if torch.distributed.get_rank() == 0 else None

    def compare(self) -> dict[str, Any]:
        answers = {}
        for name, (path, model, lengths, more) in self.cases().items():
            try:
                log_probs, gradients = self._run(path, model, lengths, **more)
            except (AssertionError, RuntimeError, IndexError) as error:
                answers[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            reference, full = self._reference[name]
            apart = [_distance(a, b) for a, b in zip(log_probs, reference, strict=True)]
            cut = {n: cpu.Cut.of(n, p).local(full[n]) for n, p in model.named_parameters()}
            answers[name] = {
                "lengths": [len(row) for row in log_probs],
                "log_probs": max(apart),
                "gradients": max(_distance(gradients[n], cut[n]) / float(full[n].abs().max()) for n in cut),
            }
        if parallel_size() == (4, 1):
            answers["4026 tokens"] = self._compare_long()
        return answers

    def _compare_long(self) -> Any:
        try:
            log_probs = self._log_probs("plain", self._packing, LONG)
        except AssertionError as error:
            return f"AssertionError: {error}"
        return _distance(log_probs[0][:-1], self._long[0][:-1]) if self._long else 0.0

    def _log_probs(self, path: str, model: Any, lengths: Sequence[int], **more: Any) -> list[Tensor]:
        ids, images = batch(lengths)
        if model is self._packing:
            del images["image_grid_thw"]
        with torch.no_grad():
            return list(PATHS[path](model, ids, images, **more)["log_probs"].unbind())

    def _run(
        self, path: str, model: Any, lengths: Sequence[int], **more: Any
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        from megatron.core import parallel_state

        ids, images = batch(lengths)
        if model is self._packing:
            del images["image_grid_thw"]
        model.zero_grad()
        log_probs = PATHS[path](model, ids, images, **more)["log_probs"].unbind()
        real = [row[:-1] if len(row) else row for row in log_probs]  # the last one predicts nothing
        generator = torch.Generator().manual_seed(2)
        sum((row * torch.randn(len(row), generator=generator)).sum() for row in real).backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
            if getattr(parameter, "sequence_parallel", False):
                torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
            gradients[name] = gradient
        return [row.detach() for row in real], gradients


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


SLICED = {"long rows": (27, 9, 14), "short rows": (3, 12, 2, 1), "an empty row": (27, 0, 9), "empty first": (0, 27)}


def slices(lengths: Sequence[int], **more: Any) -> Any:
    """This CP rank's ids and labels, whole again from all ranks: which rows are as they should be."""
    ids, _ = batch((27, *lengths))
    rows = ids.unbind()[1:]
    ids = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
    mine: Any
    try:
        mine = [_preprocess()(ids, need_roll=roll, **more)[:2] for roll in (False, True)]
        mine = ([packed[0] for packed, _ in mine], mine[0][1].cu_seqlens_q_padded.tolist())
    except (RuntimeError, IndexError) as error:
        mine = type(error).__name__
    everyone = all_ranks(mine)
    failed = [answer for answer in everyone if isinstance(answer, str)]
    if failed:
        return failed[0]
    by_cp_rank = dict(zip(all_ranks(cp_rank()), everyone, strict=True))
    (boundaries,) = {tuple(answer[1]) for answer in everyone}
    return [
        _whole(by_cp_rank, 0, boundaries, i)[: len(row)].equal(row)
        and _whole(by_cp_rank, 1, boundaries, i)[: max(len(row) - 1, 0)].equal(row[1:])
        for i, row in enumerate(rows)
    ]


def _whole(by_cp_rank: dict[int, Any], what: int, boundaries: tuple[int, ...], row: int) -> Tensor:
    cp = len(by_cp_rank)
    whole = torch.empty(boundaries[row + 1] - boundaries[row], dtype=torch.long)
    for rank, (packed, _) in by_cp_rank.items():
        local = packed[what][boundaries[row] // cp : boundaries[row + 1] // cp]
        whole[zigzag_positions(len(local), rank, cp)] = local
    return whole


def cut() -> dict[str, Any]:
    answers = {name: slices(lengths) for name, lengths in SLICED.items()}
    if _knows("use_fp8_padding"):
        answers["fp8"] = slices((27, 9), use_fp8_padding=True)
    if _knows("pad_to_length_bucket"):
        answers["bucket"] = slices((27, 5), pad_to_length_bucket=BUCKET)
    return answers


def cp_rank() -> int:
    from megatron.core import parallel_state

    rank: int = parallel_state.get_context_parallel_rank()
    return rank


def parallel_size() -> tuple[int, int]:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()


def all_ranks(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def main() -> None:
    with process_group():
        from megatron.core import parallel_state

        runs, mine = Runs(), {}
        for name, (tp, cp) in LAYOUTS.items():
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
            runs.models(tp, cp)
            if name == "tp1":
                runs.learn()
            mine[name] = {
                "runs": phases(runs.compare, PHASES if name == "tp2" else ("stock", "fixed")),
                "inputs": phases(inputs),
                "bshd": phases(bshd) if cp == 1 else None,
                "slices": phases(cut) if cp > 1 else None,
            }
        everyone = all_ranks(mine)
        if torch.distributed.get_rank() == 0:
            print(json.dumps(everyone))


if __name__ == "__main__":
    main()
