"""Tiny vision models for CPU, around a language model of megatron-core, as verl's engines call them.

:class:`PackingModel` treats its rows as the Qwen-VL models of Megatron-Bridge do: one row is taken for the packed
sequence, several rows are packed by their mask. :func:`mbridge_model` is mbridge's own Qwen2.5-VL without its tower.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

VOCABULARY, HIDDEN, PIXELS = 64, 32, 5
PAD, IMAGE = 0, 3


def transformer_config(tp: int = 1, cp: int = 1, **more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 2 * HIDDEN,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "sequence_parallel": tp > 1,
        "mrope_section": [2, 1, 1],
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**settings | more)


def _layers(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from verl_fixes.demo.cpu_attention import CpuRMSNorm

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    spec.layer_norm = CpuRMSNorm
    return spec


class Tower(torch.nn.Module):
    """A vision tower: one embedding for each image token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.project = torch.nn.Linear(PIXELS, HIDDEN, bias=False)

    def forward(self, vision_data: Tensor, grid_thw: Tensor | None = None) -> Tensor:
        return self.project(vision_data)


class PackingModel(torch.nn.Module):
    """Embeds the rows, puts image embeddings in, packs, cuts for CP, scatters over TP, runs the language model.

    ``labels``: the model returns their log-probs, as with fused kernels.
    """

    def __init__(self, config: Any) -> None:
        from megatron.core.models.gpt.gpt_model import GPTModel

        super().__init__()
        self.config, self.pre_process, self.post_process = config, True, True
        self.vision_model = Tower()
        self.language_model = GPTModel(
            config=config,
            transformer_layer_spec=_layers(config),
            vocab_size=VOCABULARY,
            max_sequence_length=8192,
            position_embedding_type="rope",
            parallel_output=False,
            scatter_embedding_sequence_parallel=False,
        )

    def forward(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        packed_seq_params: Any = None,
        pixel_values: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Any:
        from megatron.core import tensor_parallel

        embeddings = self.language_model.embedding(input_ids=input_ids, position_ids=None).transpose(0, 1).clone()
        embeddings[input_ids == IMAGE] = self.vision_model(pixel_values)
        if len(input_ids) > 1:
            embeddings = self._pack(embeddings, attention_mask)
        embeddings = self._cut(embeddings.squeeze(0), packed_seq_params, len(input_ids)).unsqueeze(1)
        if self.config.sequence_parallel:
            embeddings = tensor_parallel.scatter_to_sequence_parallel_region(embeddings)
        logits = self.language_model(
            input_ids=None,
            position_ids=None,
            attention_mask=None,
            decoder_input=embeddings,
            packed_seq_params=packed_seq_params,
        )
        return logits if labels is None else self._fused(logits / temperature, labels)

    def _pack(self, rows: Tensor, mask: Tensor) -> Tensor:
        """What the mask covers of each row, padded for TP and CP, one after the other: ``[1, tokens, hidden]``."""
        multiple = self._multiple()
        packed = [row[covered] for row, covered in zip(rows, mask, strict=True)]
        padded = [torch.nn.functional.pad(row, (0, 0, 0, -len(row) % multiple)) for row in packed]
        return torch.cat(padded).unsqueeze(0)

    def _multiple(self) -> int:
        tp, cp = self.config.tensor_model_parallel_size, self.config.context_parallel_size
        return int(tp * cp * (2 if cp > 1 else 1))

    def _cut(self, packed: Tensor, packed_seq_params: Any, rows: int) -> Tensor:
        """This CP rank's two chunks of every sequence."""
        from megatron.core import parallel_state

        cp, rank = self.config.context_parallel_size, parallel_state.get_context_parallel_rank()
        if cp == 1:
            return packed
        lengths = packed_seq_params.cu_seqlens_q_padded.diff().tolist() if rows > 1 else [len(packed)]
        chunks = [row.view(2 * cp, len(row) // (2 * cp), HIDDEN) for row in packed.split(lengths)]
        return torch.cat([row[[rank, 2 * cp - 1 - rank]].flatten(0, 1) for row in chunks])

    @staticmethod
    def _fused(logits: Tensor, labels: Tensor) -> Any:
        from verl.utils.model import CausalLMOutputForPPO

        log_probs = token_log_probs(logits, labels)["log_probs"]
        return CausalLMOutputForPPO(log_probs=log_probs, entropy=-log_probs)


def mbridge_model(config: Any) -> Any:
    """mbridge's Qwen2.5-VL, which takes one row at a time.

    :class:`Tower` stands for its vision model, and Megatron's own attention for the one of mbridge 0.15.1, which does
    not know an argument that megatron-core 0.16 calls it with.
    """
    from mbridge.models.qwen2_5_vl import model as qwen
    from megatron.core.transformer.attention import SelfAttention

    nothing = mock.MagicMock()
    stand_ins = {"Qwen2_5VisionModel": Tower, "Qwen2_5VLSelfAttention": SelfAttention}
    with mock.patch.multiple(qwen, **stand_ins):
        built = qwen.Qwen2_5VLModel(
            language_transformer_config=config,
            language_transformer_layer_spec=_layers(config),
            language_vocab_size=VOCABULARY,
            language_max_sequence_length=8192,
            vision_transformer_config=nothing,
            vision_transformer_layer_spec=nothing,
            vision_projection_config=mock.MagicMock(ffn_hidden_size=1),
            vision_projection_layer_spec=nothing,
            parallel_output=False,
            image_token_id=IMAGE,
            video_token_id=IMAGE + 1,
        )
    built.vision_model.config = config
    return built


def token_log_probs(logits: Tensor, label: Tensor, **_: Any) -> dict[str, Tensor]:
    """The logits processor of an engine, small: log-probs of the labels, both ``[1, tokens, ...]``."""
    return {"log_probs": logits.float().log_softmax(-1).gather(-1, label.unsqueeze(-1)).squeeze(-1)}
