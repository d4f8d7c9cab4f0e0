"""Runs verl's stock Megatron engines on CPU: real modules, schedules, DDP and optimizer, gloo between processes.

A Megatron bug is reproduced in ten lines, saved as ``bug.py`` and started with ``run("bug.py", world_size=2)``::

    from verl_fixes.demo import megatron_on_cpu as cpu

    with cpu.process_group():
        engine = cpu.build_engine(cpu.Model(z_loss_coeff=1e-3), cpu.Layout(cp=2), calculate_per_token_loss=True)
        batch = cpu.make_batch(dp_rank=engine.get_data_parallel_rank(), dp_size=engine.get_data_parallel_size())
        print(cpu.train_step(engine, batch, cpu.ppo_loss()).grad_norm)

or from a shell, with one JSON line as the answer::

    python -m verl_fixes.demo.megatron_on_cpu --cp 2 --per-token-loss --z 1e-3

What is real: verl's engine and loss functions, mbridge's model building, and megatron-core's layers, MoE router and
dispatcher, pipeline schedules, DDP, ``finalize_model_grads`` and optimizer. What is arranged, in :func:`arrange`:
"cuda" means the CPU, Transformer Engine's modules are the ones of :mod:`verl_fixes.demo.cpu_attention`, everything
computes in fp32, and weights come from a seed and not from a checkpoint.

Works with verl 0.7.0 to 0.9.1 and megatron-core 0.15.3 to 0.19.2. This module imports neither verl nor Megatron before
it has to, and it never changes what verl computes: whether verl-fixes is active is the caller's decision.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from verl_fixes.demo.gloo_processes import process_group, run
from verl_fixes.demo.megatron_arrangement import arrange

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]

VOCABULARY = 128

# The standard batch: prompt and response tokens of 8 sequences of about 23. Totals per pair of rows, all tokens: 45,
# 44, 46, 48; response tokens: 33, 29, 35, 32. Neither divides evenly by 2, 4 or 8 everywhere, so that a lost remainder
# shows, and most sequences are padded when TP or CP pack them.
STANDARD = ((5, 18), (7, 15), (6, 17), (9, 12), (7, 19), (4, 16), (10, 11), (6, 21))


@dataclass(frozen=True)
class Layout:
    """How the processes split the work. The data-parallel size is ``world_size / (tp * pp * cp)``.

    ``tp`` above 1 brings sequence parallelism with it, as mbridge does. ``chunks_per_stage`` above 1 interleaves the
    pipeline (VPP): the model needs a layer for each chunk, and micro-batches a multiple of ``pp``.

    Attributes:
        max_seqlen_per_dp_cp_rank: with it context parallelism is dynamic, since verl 0.9.0: every process gets the
            whole batch, and longer sequences than this are shared among 2, 4, ... of all DP x CP processes.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    distributed_optimizer: bool = True
    chunks_per_stage: int = 1
    max_seqlen_per_dp_cp_rank: int | None = None

    def dynamic_cp(self) -> dict[str, Any]:
        """The settings of verl's engine config for it, as keyword arguments: older releases do not know them."""
        if self.max_seqlen_per_dp_cp_rank is None:
            return {}
        return {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": self.max_seqlen_per_dp_cp_rank}


@dataclass(frozen=True)
class Model:
    """A tiny Qwen3-MoE, or with ``moe=False`` a dense Qwen3, with randomly drawn weights.

    Attributes:
        value_head: a critic. Stock 0.7.0 knows dense ones only, 0.7.1 fails in its forward step, and 0.9.0 fails to
            build one with mbridge; 0.8.0 and 0.9.1 work.
        use_remove_padding: False selects the padded (BSHD) data format.
        recompute: full activation recomputation in every layer.
        mtp_layers: multi-token prediction layers, trained with the policy. Since verl 0.8.0; 0.7.1 calls a method that
            megatron-core 0.16.1 does not have.
        mtp_loss_scaling_factor: what their loss is multiplied by.
        mtp_detach_encoder: keep their loss away from the embedding and the decoder.
        transformer_overrides: more of ``override_transformer_config``; wins over everything above.
    """

    moe: bool = True
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    load_balancing_type: str | list[str] = "aux_loss"
    layers: int = 2
    hidden_size: int = 32
    heads: int = 4
    query_groups: int = 2
    experts: int = 4
    experts_per_token: int = 2
    value_head: bool = False
    use_remove_padding: bool = True
    recompute: bool = False
    mtp_layers: int = 0
    mtp_loss_scaling_factor: float = 0.1
    mtp_detach_encoder: bool = False
    transformer_overrides: dict[str, Any] = field(default_factory=dict)

    def hf_config(self) -> Any:
        """The Hugging Face config that verl and mbridge read the architecture from."""
        from transformers import Qwen3Config, Qwen3MoeConfig

        shape: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.query_groups,
            "head_dim": self.hidden_size // self.heads,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        }
        if self.mtp_layers:
            shape["num_nextn_predict_layers"] = self.mtp_layers
        if not self.moe:
            # 0.7 recognises a value model by the name of its architecture
            kind = "ForTokenClassification" if self.value_head else "ForCausalLM"
            return Qwen3Config(architectures=["Qwen3" + kind], **shape)
        return Qwen3MoeConfig(
            architectures=["Qwen3MoeForCausalLM"],
            num_experts=self.experts,
            num_experts_per_tok=self.experts_per_token,
            moe_intermediate_size=self.hidden_size,
            norm_topk_prob=True,
            **shape,
        )

    def transformer_config(self, calculate_per_token_loss: bool) -> dict[str, Any]:
        """What a user would write under ``override_transformer_config``."""
        overrides: dict[str, Any] = {
            "calculate_per_token_loss": calculate_per_token_loss,
            # fused kernels that need CUDA or a compiler
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "persist_layer_norm": False,
        }
        if self.moe:
            overrides |= {
                "moe_grouped_gemm": False,
                "moe_router_load_balancing_type": self.load_balancing_type,
                "moe_aux_loss_coeff": self.aux_loss_coeff,
                "moe_z_loss_coeff": self.z_loss_coeff or None,
            }
        if self.recompute:
            overrides |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        if self.mtp_layers:
            overrides["mtp_num_layers"] = self.mtp_layers  # mbridge sets it for other architectures only
        return overrides | self.transformer_overrides

    def mtp_config(self) -> dict[str, Any]:
        """The ``mtp`` setting of verl's model config, as its keyword arguments."""
        if not self.mtp_layers:
            return {}
        from verl.workers.config import model

        if not hasattr(model, "MtpConfig"):
            raise ValueError("this release of verl knows no multi-token prediction")
        mtp = model.MtpConfig(
            enable=True,
            enable_train=True,
            detach_encoder=self.mtp_detach_encoder,
            mtp_loss_scaling_factor=self.mtp_loss_scaling_factor,
        )
        return {"mtp": mtp}


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, seen from this rank.

    Attributes:
        grad_norm: the norm that ``optimizer_step`` returned, before clipping.
        gradients: name (see :func:`named_parameters`) to fp32 gradient, shaped like this rank's part of the parameter,
            as the optimizer found it: after ``finalize_model_grads`` and before clipping.
        output: what ``train_batch`` returned (``model_output``, ``loss``, ``metrics``; empty on some ranks).
    """

    grad_norm: float
    gradients: dict[str, Tensor]
    output: dict[str, Any]


def build_engine(
    model: Model, layout: Layout, *, calculate_per_token_loss: bool, seed: int = 0, **engine_settings: Any
) -> Any:
    """The release's own Megatron engine, after its own ``initialize()``. Needs :func:`process_group`.

    The weights depend on ``seed`` alone: every layout cuts them from the same full tensors. ``engine_settings`` go to
    verl's ``McoreEngineConfig``.
    """
    arrange()
    from mbridge.core.bridge import Bridge
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron import transformer_impl

    engine_config = McoreEngineConfig(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.chunks_per_stage if layout.chunks_per_stage > 1 else None,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.tp > 1,
        use_distributed_optimizer=layout.distributed_optimizer,
        use_remove_padding=model.use_remove_padding,
        use_dynamic_bsz=False,
        use_mbridge=True,
        vanilla_mbridge=True,
        override_transformer_config=model.transformer_config(calculate_per_token_loss),
        **layout.dynamic_cp(),
        **engine_settings,
    )
    object.__setattr__(engine_config, "dtype", "float32")  # its own check allows bf16 and fp16 only
    optimizer_config = McoreOptimizerConfig(
        lr=1e-3,
        clip_grad=1.0,
        lr_warmup_steps=0,
        total_training_steps=10,
        override_optimizer_config={"bf16": False, "params_dtype": torch.float32},
    )
    Bridge.load_weights = lambda self, models, path: draw_weights(models, seed)
    kind = "ValueHead" if model.value_head else "LMHead"
    engine_class = getattr(transformer_impl, f"MegatronEngineWith{kind}")

    with tempfile.TemporaryDirectory(prefix="megatron_on_cpu_") as folder:
        model.hf_config().save_pretrained(folder)
        model_config = HFModelConfig(
            path=folder,
            load_tokenizer=False,
            tokenizer=SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0, chat_template=None),
            use_remove_padding=model.use_remove_padding,
            **model.mtp_config(),
        )
        if hasattr(model_config, "model_type"):  # since 0.8.0
            model_config.model_type = "value_model" if model.value_head else "language_model"
        engine = engine_class(model_config, engine_config, optimizer_config, CheckpointConfig())
        engine.initialize()
    if engine.is_value_model != model.value_head:
        raise ValueError("this release of verl knows value heads of dense models only")
    return engine


def draw_weights(chunks: Sequence[torch.nn.Module], seed: int) -> None:
    """Fill every parameter with this rank's part of a full tensor that is drawn from the seed and the name alone."""
    for name, parameter in named_parameters(chunks):
        cut = Cut.of(name, parameter)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        full = torch.randn(cut.full_shape(parameter), generator=generator) * 0.02
        if "norm" in name:
            full += 1.0
        parameter.data.copy_(cut.local(full))


def named_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of this rank's model chunks, under names that number the layers over all pipeline stages."""
    from verl.utils.megatron_utils import unwrap_model

    for chunk in unwrap_model(list(chunks)):
        number = {str(local): str(layer.layer_number - 1) for local, layer in enumerate(chunk.decoder.layers)}
        for name, parameter in chunk.named_parameters():
            head, layers, tail = name.partition("decoder.layers.")
            if layers:
                local, dot, tail = tail.partition(".")
                tail = number[local] + dot + tail
            yield head + layers + tail, parameter


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism cuts a parameter: ``size`` parts along ``dim``, of which this rank has number ``rank``.

    A gated first layer of an MLP is ``blocks=2`` matrices, gate and up, stacked along ``dim`` and each cut for itself.
    """

    dim: int
    rank: int
    size: int
    blocks: int = 1

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter) -> Cut:
        from megatron.core import parallel_state

        if not getattr(parameter, "tensor_model_parallel", False):
            return cls(dim=0, rank=0, size=1)
        if ".experts." in name:
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
        blocks = 2 if "linear_fc1" in name else 1
        return cls(parameter.partition_dim, group.rank(), group.size(), blocks)

    def full_shape(self, local: Tensor) -> list[int]:
        shape = list(local.shape)
        shape[self.dim] *= self.size
        return shape

    def local(self, full: Tensor) -> Tensor:
        parts = [block.chunk(self.size, self.dim)[self.rank] for block in full.chunk(self.blocks, self.dim)]
        return torch.cat(parts, self.dim)

    def join(self, locals_: Sequence[Tensor]) -> Tensor:
        """The full tensor from the parts of all ranks, in rank order."""
        by_rank = [local.chunk(self.blocks, self.dim) for local in locals_]
        return torch.cat([parts[block] for block in range(self.blocks) for parts in by_rank], self.dim)


def make_batch(
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    micro_batches: int = 4,
    repeat: int = 1,
    lengths: Sequence[Sequence[int]] = STANDARD,
    advantage: float = 0.005,
    attention_mask: Literal["dense", "nested"] | None = "dense",
    sft: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """This DP rank's rows of the standard batch or another, as the release's engine wants them without padding.

    Args:
        dp_rank, dp_size: which contiguous share of the rows to return.
        micro_batches: how many micro-batches *this rank's* rows are split into.
        repeat: how many times the rows' lengths are used, with other contents each time.
        lengths: prompt and response tokens of each row.
        advantage: standard deviation of the advantages. Small, so that the router's losses weigh in the gradient
            norm; with 0 there is no policy gradient at all.
        attention_mask: ``"dense"`` is the layout of verl's trainer, with a padded ``[rows, 31]`` mask and padded
            response tensors ``[rows, 21]``; ``"nested"`` and ``None`` have jagged response tensors ``[rows, j]`` and a
            jagged or no mask. The loss functions of verl 0.7.0 take the dense layout only, those of 0.7.1 no ``None``.
        sft: ``loss_mask`` covers whole sequences and is jagged, as :func:`sft_loss` wants it.
        settings: more non-tensor settings, for example ``calculate_entropy=True``.

    Returns:
        TensorDict with jagged ``input_ids`` and ``position_ids`` ``[rows, j]`` of about 23 tokens a row; ``responses``,
        ``response_mask``, ``old_log_probs``, ``advantages``, ``values`` and ``returns`` over the response.
    """
    arrange()
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode
    from verl.workers.utils.padding import left_right_2_no_padding

    padded = padded_rows(
        dp_rank=dp_rank, dp_size=dp_size, repeat=repeat, lengths=lengths, advantage=advantage, seed=seed
    )
    mask, prompt_width = padded["attention_mask"].bool(), padded["prompts"].shape[1]
    prompt_mask, response_mask = mask[:, :prompt_width], mask[:, prompt_width:]
    local_rows = len(mask)
    batch = TensorDict(padded, batch_size=[local_rows])
    batch = left_right_2_no_padding(batch)

    if sft:
        batch["loss_mask"] = _jagged((mask & ~(torch.arange(mask.shape[1]) < prompt_width)).long(), mask)
    if attention_mask != "dense":
        batch["prompts"] = _jagged(batch["prompts"], prompt_mask)
        for name in ("responses", "response_mask", "old_log_probs", "advantages", "values", "returns"):
            batch[name] = _jagged(batch[name], response_mask)
        if not sft:
            batch["loss_mask"] = batch["response_mask"]
        full_mask = batch.pop("attention_mask")
        del batch["max_seq_len"], batch["max_response_len"]  # widths of the dense layout
        if attention_mask == "nested":
            batch["attention_mask"] = _jagged(full_mask, mask)

    tu.assign_non_tensor(
        batch,
        **{
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": local_rows // micro_batches,
            "global_batch_size": len(lengths) * repeat,
            "temperature": 1.0,
            "pad_mode": DatasetPadMode.NO_PADDING,
            "use_remove_padding": True,
            "use_fused_kernels": False,
            "calculate_entropy": False,
            **settings,
        },
    )
    return batch


def padded_rows(
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    repeat: int = 1,
    lengths: Sequence[Sequence[int]] = STANDARD,
    advantage: float = 0.005,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The rows of :func:`make_batch` as verl's trainer has them: prompts padded on the left, responses on the right."""
    prompt_lengths, response_lengths = torch.tensor([*lengths] * repeat).T
    rows, prompt_width, response_width = len(prompt_lengths), int(prompt_lengths.max()), int(response_lengths.max())
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(rows, response_width, generator=generator)

    prompt_mask = torch.arange(prompt_width).flip(0) < prompt_lengths[:, None]  # padded on the left
    response_mask = torch.arange(response_width) < response_lengths[:, None]  # padded on the right
    mask = torch.cat([prompt_mask, response_mask], dim=1)
    input_ids = torch.randint(3, VOCABULARY, mask.shape, generator=generator) * mask
    padded = {
        "prompts": input_ids[:, :prompt_width],
        "responses": input_ids[:, prompt_width:],
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": response_mask.long(),
        # near what random weights give: log(1 / vocabulary)
        "old_log_probs": (noise() * 0.05 - torch.tensor(float(VOCABULARY)).log()) * response_mask,
        "advantages": noise() * advantage * response_mask,
        "values": noise() * 0.1 * response_mask,
        "returns": noise() * response_mask,
    }
    share = slice(dp_rank * rows // dp_size, (dp_rank + 1) * rows // dp_size)
    return {name: tensor[share] for name, tensor in padded.items()}


def _jagged(padded: Tensor, mask: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(
        [row[kept] for row, kept in zip(padded, mask, strict=True)], layout=torch.jagged
    )


def ppo_loss(loss_agg_mode: str = "token-mean", **config: Any) -> Loss:
    """The release's PPO loss, as the engine workers bind it. ``config`` goes to its ``ActorConfig``."""
    return functools.partial(_losses().ppo_loss, config=_actor_config(loss_agg_mode, **config))


def sft_loss() -> Loss:
    """The release's SFT loss; goes with ``make_batch(sft=True)``."""
    return functools.partial(_losses().sft_loss, config=None)


def value_loss(loss_agg_mode: str = "token-mean", **config: Any) -> Loss:
    """The release's critic loss, for an engine of ``Model(value_head=True)``."""
    losses = _losses()
    from verl.base_config import BaseConfig
    from verl.workers.config import CriticConfig

    if "model_config" in CriticConfig.__dataclass_fields__:  # 0.7 would load one for its own sake
        config = {"model_config": BaseConfig()} | config
    critic = CriticConfig(strategy="megatron", ppo_micro_batch_size_per_gpu=1, loss_agg_mode=loss_agg_mode, **config)
    return functools.partial(losses.value_loss, config=critic)


def _losses() -> Any:
    arrange()
    from verl.workers.utils import losses

    return losses


def _actor_config(loss_agg_mode: str, **config: Any) -> Any:
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="megatron", ppo_micro_batch_size_per_gpu=1, rollout_n=1, loss_agg_mode=loss_agg_mode, **config
    )


def train_step(engine: Any, batch: Any, loss: Loss) -> StepResult:
    """One real ``train_batch``; the gradients are copied between ``finalize_model_grads`` and clipping."""
    with watched_optimizer(engine) as seen, engine.train_mode():
        output = engine.train_batch(batch, loss_function=loss)
    return StepResult(float(seen["grad_norm"]), seen["gradients"], output)


@contextlib.contextmanager
def watched_optimizer(engine: Any) -> Iterator[dict[str, Any]]:
    """Notes ``gradients`` and ``grad_norm`` of the last step that the engine's optimizer takes meanwhile."""
    seen: dict[str, Any] = {}
    step = engine.optimizer.step

    def watched_step() -> Any:
        seen["gradients"] = _final_gradients(engine)
        result = step()
        seen["grad_norm"] = result[1]
        return result

    engine.optimizer.step = watched_step
    try:
        yield seen
    finally:
        del engine.optimizer.step


def _final_gradients(engine: Any) -> dict[str, Tensor]:
    """Copies of ``main_grad``, complete also where the distributed optimizer left each DP rank only its share."""
    by_parameter: dict[torch.nn.Parameter, Tensor] = {}
    for chunk in engine.module:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            full = buffer.grad_data.clone()
            if chunk.ddp_config.use_distributed_optimizer:
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    part = full[bucket.offset : bucket.offset + bucket.grad_data.numel()]
                    mine = part.chunk(group.size())[group.rank()].clone()
                    torch.distributed.all_gather_into_tensor(part, mine, group=group)
            for parameter, (start, end, _) in buffer.param_index_map.items():
                by_parameter[parameter] = (
                    full[start:end].view(parameter.shape).float().clone()
                )  # pickled without the rest
    return {name: by_parameter[parameter] for name, parameter in named_parameters(engine.module)}


def gather_gradients(engine: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors of the whole model, from the :class:`StepResult` gradients of all TP and PP ranks; sorted by name.

    Equal on every rank, and comparable between layouts. Call it on all ranks.
    """
    from megatron.core import parallel_state

    mine = {name: (Cut.of(name, parameter), gradients[name]) for name, parameter in named_parameters(engine.module)}
    group = parallel_state.get_model_parallel_group()
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, mine, group=group)

    full = {}
    for name in sorted({name for one in everyone for name in one}):
        # the first of each rank: with MTP the last pipeline stage has the embedding, and its gradient, once more
        parts = {one[name][0].rank: one[name] for one in reversed(everyone) if name in one}
        cut = parts[0][0]
        full[name] = cut.join([parts[rank][1] for rank in range(cut.size)])
    return full


def flatten(gradients: dict[str, Tensor]) -> Tensor:
    """One vector from named gradients, in the order of the names."""
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


THIS_MODULE = "verl_fixes.demo.megatron_on_cpu"


def measure(arguments: Sequence[str], **run_options: Any) -> dict[str, Any]:
    """What the command line prints, as a dict. ``run_options`` go to :func:`run`."""
    options = _parser().parse_args(arguments)
    world_size = options.tp * options.pp * options.cp * options.dp
    run_options = {"fixes": options.fixes, "timeout": options.timeout} | run_options
    printed = run(THIS_MODULE, world_size, arguments, **run_options)
    report: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return report


def main() -> None:
    """One training step in the layout that the options describe; one JSON line on stdout."""
    if "RANK" in os.environ:
        _one_process(_parser().parse_args())
    else:
        print(json.dumps(measure(sys.argv[1:])))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {THIS_MODULE}", description=main.__doc__)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size (with sequence parallelism)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--cp", type=int, default=1, help="context parallel size")
    parser.add_argument("--dp", type=int, default=1, help="data parallel size")
    parser.add_argument("--plain-optimizer", action="store_true", help="use_distributed_optimizer=False")
    parser.add_argument("--per-token-loss", action="store_true", help="calculate_per_token_loss=True")
    parser.add_argument("--aux", type=float, default=0.0, help="coefficient of the MoE load-balancing loss")
    parser.add_argument("--z", type=float, default=0.0, help="coefficient of the MoE router's z loss")
    parser.add_argument("--load-balancing-type", default="aux_loss", help="moe_router_load_balancing_type")
    parser.add_argument("--dense", action="store_true", help="a dense model instead of a mixture of experts")
    parser.add_argument("--bshd", action="store_true", help="use_remove_padding=False")
    parser.add_argument("--recompute", action="store_true", help="full activation recomputation")
    parser.add_argument("--mtp", type=int, default=0, metavar="LAYERS", help="multi-token prediction layers")
    parser.add_argument("--mtp-loss-scaling-factor", type=float, default=0.1)
    parser.add_argument("--mtp-detach-encoder", action="store_true")
    parser.add_argument("--loss", choices=("ppo", "sft", "value"), default="ppo")
    parser.add_argument("--loss-agg-mode", default="token-mean")
    parser.add_argument("--attention-mask", choices=("dense", "nested", "none"), default="dense")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches on each DP rank")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--fixes", action="store_true", help="with verl-fixes instead of stock verl")
    parser.add_argument("--save-gradients", metavar="FILE", help="write the full gradients with torch.save")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for all processes together")
    return parser


def _one_process(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    if options.fixes:
        import verl_fixes  # noqa: F401
    model = Model(
        moe=not options.dense,
        aux_loss_coeff=options.aux,
        z_loss_coeff=options.z,
        load_balancing_type=options.load_balancing_type,
        value_head=options.loss == "value",
        use_remove_padding=not options.bshd,
        recompute=options.recompute,
        mtp_layers=options.mtp,
        mtp_loss_scaling_factor=options.mtp_loss_scaling_factor,
        mtp_detach_encoder=options.mtp_detach_encoder,
    )
    layout = Layout(options.tp, options.pp, options.cp, distributed_optimizer=not options.plain_optimizer)
    with process_group() as rank:
        engine = build_engine(model, layout, calculate_per_token_loss=options.per_token_loss, seed=options.seed)
        batch = make_batch(
            dp_rank=engine.get_data_parallel_rank(),
            dp_size=engine.get_data_parallel_size(),
            micro_batches=options.micro_batches,
            attention_mask=None if options.attention_mask == "none" else options.attention_mask,
            sft=options.loss == "sft",
            use_remove_padding=model.use_remove_padding,
        )
        if options.loss == "sft":
            loss = sft_loss()
        else:
            loss = {"ppo": ppo_loss, "value": value_loss}[options.loss](options.loss_agg_mode)
        result = train_step(engine, batch, loss)
        gradients = gather_gradients(engine, result.gradients)
        if rank == 0 and options.save_gradients:
            torch.save(gradients, options.save_gradients)
    if rank == 0:
        import verl

        report = {
            "verl": verl.__version__,
            "fixes": options.fixes,
            "calculate_per_token_loss": engine.tf_config.calculate_per_token_loss,
            "layout": {"tp": options.tp, "pp": options.pp, "cp": options.cp, "dp": options.dp},
            "grad_norm": result.grad_norm,
            "norm_of_gathered_gradients": flatten(gradients).norm().item(),
            "seconds": round(time.perf_counter() - started, 1),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
