"""Under calculate_per_token_loss, the MoE aux and z losses keep their size when TP or CP grows.

What goes wrong: with ``calculate_per_token_loss`` on, ``finalize_model_grads`` divides every gradient by the tokens of
the whole batch. To survive this, each router multiplies its aux and z loss by the tokens that it sees itself, and
these are only ``1 / tp_cp_group.size()`` of the micro-batch: sequence parallelism and context parallelism share its
tokens out. megatron-core up to 0.18.2 leaves this factor out, so the router's gradient is too small by TP x CP. TP
alone is enough. Nothing fails; the experts are balanced less than was asked for.

What the wrappers do: put the factor into the loss and into the coefficient by which megatron-core divides it for its
log, so that the gradient changes and the logged loss does not. The same for aux_loss, seq_aux_loss, global_aux_loss
and the z loss, as megatron-core 0.19.0 does.

When it can go: with megatron-core 0.19.0.
Sources: https://github.com/NVIDIA/Megatron-LM/issues/5047, https://github.com/NVIDIA/Megatron-LM/issues/1652
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from verl_fixes.arguments import Call
from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict, mentions

_ATTACH = ("self", "activation", "aux_loss_coeff", "aux_loss")
_COUNT = "valid_token_count"


def _missing_factor(router: Any) -> int:
    """How many ranks share the tokens of a micro-batch; 1 where nothing is missing."""
    return int(router.tp_cp_group.size()) if router.calculate_per_token_loss else 1


def scale_load_balancing_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``attach_and_log_load_balancing_loss``, through which all three kinds of aux loss reach the gradient.

    Where the router was given a padding mask, its count is a tensor, and of the whole group already: megatron-core's
    all-reduce of the tokens per expert works in place, before the router's own tokens are taken from it.
    """
    call = Call(original, _ATTACH, args, kwargs)
    factor = _missing_factor(call["self"])
    if factor == 1 or not isinstance(kwargs.get(_COUNT, 0), int):
        return call()
    return call(aux_loss=call["aux_loss"] * factor, aux_loss_coeff=call["aux_loss_coeff"] * factor)


def scale_z_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``apply_z_loss``, which takes its coefficient from the router's config."""
    router = args[0] if args else kwargs["self"]
    factor, config = _missing_factor(router), router.config
    coefficient = config.moe_z_loss_coeff
    if factor == 1 or not coefficient:
        return original(*args, **kwargs)
    config.moe_z_loss_coeff = coefficient * factor
    try:
        return original(*args, **kwargs)
    finally:
        config.moe_z_loss_coeff = coefficient


def _verdict(function: Function, source: Source) -> Verdict:
    """The loss is attached by ``….apply(activation, loss)``, once for each setting of the flag.

    Megatron-LM's dev branch counts the tokens of the group itself, or adds up the z loss instead of averaging it.
    """
    attached = [
        node.args[-1]
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "apply"
    ]
    if len(attached) != 2 or not mentions(function, "calculate_per_token_loss"):
        return Verdict.DRIFTED
    if any(mentions(loss, "tp_cp_group") or mentions(loss, "aux_loss_scale_num_tokens") for loss in attached):
        return Verdict.FIXED
    if mentions(function, "z_loss_sum"):
        return Verdict.FIXED
    scaled = [loss for loss in attached if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Mult)]
    return Verdict.BUGGY if len(scaled) == 1 else Verdict.DRIFTED


_ROUTER = "megatron.core.transformer.moe.router"

PATCH = Patch(
    name="moe-aux-scale",
    title="MoE aux and z losses keep their size under TP and CP",
    hurts=(
        "With calculate_per_token_loss on, megatron-core up to 0.18.2 leaves the gradient of the MoE aux and z losses "
        "too small by the factor TP x CP. Tensor parallelism alone is enough. Nothing fails; experts are balanced "
        "less than was asked for."
    ),
    does=(
        "Puts the factor tp_cp_group.size() into aux_loss, seq_aux_loss, global_aux_loss and the z loss, while "
        "calculate_per_token_loss is on; not into aux losses of routers that are given a padding mask, where it is "
        "there already. The losses in the log stay as they are."
    ),
    removable="With megatron-core 0.19.0.",
    upstream=("https://github.com/NVIDIA/Megatron-LM/issues/5047",),
    fixed_in="megatron-core 0.19.0",
    targets=(
        Target(
            module=_ROUTER,
            qualname="TopKRouter.attach_and_log_load_balancing_loss",
            wrapper=scale_load_balancing_loss,
            question=_verdict,
            known={
                "f9dee186eea2efe7": Verdict.BUGGY,  # 0.14.0 to 0.15.3
                "5fa12c235096aa36": Verdict.BUGGY,  # 0.16.1
                "bffb206c3c44bd5f": Verdict.BUGGY,  # 0.17.1
                "578142b926bb2588": Verdict.BUGGY,  # 0.18.2
                "b269ca5b316a6f33": Verdict.FIXED,  # 0.19.2
            },
        ),
        Target(
            module=_ROUTER,
            qualname="TopKRouter.apply_z_loss",
            wrapper=scale_z_loss,
            question=_verdict,
            known={
                "fb5a982f83815012": Verdict.BUGGY,  # 0.14.0 to 0.15.3
                "abbd4141a913ce79": Verdict.BUGGY,  # 0.16.1
                "189996fe18cb1832": Verdict.BUGGY,  # 0.17.1
                "744761eebad2ed95": Verdict.BUGGY,  # 0.18.2
                "c0897edf41e06569": Verdict.FIXED,  # 0.19.2
            },
        ),
    ),
)
