"""Under calculate_per_token_loss, the MoE aux and z losses keep their size when TP or CP grows.

What goes wrong: with ``calculate_per_token_loss`` on, ``finalize_model_grads`` divides every gradient by the tokens of
the whole batch. To survive this, each router multiplies its aux and z loss by the tokens that it sees itself, and
these are only ``1 / tp_cp_group.size()`` of the micro-batch: sequence parallelism and context parallelism share its
tokens out. megatron-core up to 0.18.2 leaves this factor out, so the router's gradient is too small by TP x CP. TP
alone is enough. Nothing fails; the experts are balanced less than was asked for.

What the wrappers do: put the factor into the loss and into the coefficient by which megatron-core divides it for its
log, so that the gradient changes and the logged loss does not. The same for aux_loss, seq_aux_loss, global_aux_loss
and the z loss, as megatron-core 0.19.0 does. Only while token counts are reported: where verl reports none and
per-token-loss is off, nothing divides, and the factor would make it worse.

When it can go: with megatron-core 0.19.0.
Sources: https://github.com/NVIDIA/Megatron-LM/pull/5047, https://github.com/NVIDIA/Megatron-LM/issues/1652
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from verl_fixes.arguments import Call
from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict, mentions
from verl_fixes.token_counts import are_reported

_ATTACH = ("self", "activation", "aux_loss_coeff", "aux_loss")


def _missing_factor(router: Any) -> int:
    """How many ranks share the tokens of a micro-batch; 1 where nothing is missing, or nothing divides by tokens."""
    return int(router.tp_cp_group.size()) if router.calculate_per_token_loss and are_reported() else 1


def scale_load_balancing_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``attach_and_log_load_balancing_loss``, through which all three kinds of aux loss reach the gradient.

    Where the router was given a padding mask, its count is a tensor, and of the whole group already: megatron-core's
    all-reduce of the tokens per expert works in place, before the router's own tokens are taken from it.
    """
    import torch

    call = Call(original, _ATTACH, args, kwargs)
    factor = _missing_factor(call["self"])
    if factor == 1 or isinstance(call.get("valid_token_count"), torch.Tensor):
        return call()
    return call(aux_loss=call["aux_loss"] * factor, aux_loss_coeff=call["aux_loss_coeff"] * factor)


def scale_z_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``apply_z_loss``, which takes its coefficient from the router's config."""
    call = Call(original, ("self",), args, kwargs)
    config = call["self"].config
    coefficient = config.moe_z_loss_coeff
    if not coefficient:
        return call()
    config.moe_z_loss_coeff = coefficient * _missing_factor(call["self"])
    try:
        return call()
    finally:
        config.moe_z_loss_coeff = coefficient


def _verdict(function: Function, source: Source) -> Verdict:
    """The loss is attached by ``….apply(activation, loss)``, once for each setting of the flag.

    With the flag on it is multiplied, by the router's own tokens or by those of the group. Megatron-LM's dev branch
    counts the group's tokens itself, and adds up the z loss instead of averaging it.
    """
    attached = [
        node.args[-1]
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "apply"
    ]
    if len(attached) != 2 or not mentions(function, "calculate_per_token_loss"):
        return Verdict.DRIFTED
    multipliers = [part for loss in attached for part in _multipliers(function, loss)]
    if any(mentions(part, "tp_cp_group") for part in multipliers):
        return Verdict.FIXED
    if mentions(function, "aux_loss_scale_num_tokens") or mentions(function, "z_loss_sum"):
        return Verdict.FIXED
    own = any(mentions(part, word) for part in multipliers for word in ("shape", "valid_token_count", "padding_mask"))
    others = any(mentions(part, word) for part in multipliers for word in ("size", "reduce_group"))
    return Verdict.BUGGY if own and not others and not mentions(function, "all_reduce") else Verdict.DRIFTED


def _multipliers(function: Function, loss: ast.expr) -> list[ast.expr]:
    """What ``loss * a * b`` is multiplied by, with the values that the function assigns to names in it."""
    parts: list[ast.expr] = []
    while isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Mult):
        parts.append(loss.right)
        loss = loss.left
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    assigned = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
    ]
    return parts + assigned


def _target(method: str, wrapper: Callable[..., Any], known: dict[str, Verdict]) -> Target:
    return Target(
        module="megatron.core.transformer.moe.router",
        qualname=f"TopKRouter.{method}",
        wrapper=wrapper,
        overrides=False,
        question=_verdict,
        known=known,
    )


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
        "calculate_per_token_loss is on and token counts are reported, by per-token-loss or by verl 0.9 itself; not "
        "into aux losses of routers that are given a padding mask, where it is there already. The logged losses stay "
        "as they are."
    ),
    removable="With megatron-core 0.19.0.",
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/5047",),
    fixed_in="megatron-core 0.19.0",
    targets=(
        _target(
            "attach_and_log_load_balancing_loss",
            scale_load_balancing_loss,
            {
                "f9dee186eea2efe7": Verdict.BUGGY,  # 0.14.0 to 0.15.3
                "5fa12c235096aa36": Verdict.BUGGY,  # 0.16.1
                "bffb206c3c44bd5f": Verdict.BUGGY,  # 0.17.1
                "578142b926bb2588": Verdict.BUGGY,  # 0.18.2
                "b269ca5b316a6f33": Verdict.FIXED,  # 0.19.2
            },
        ),
        _target(
            "apply_z_loss",
            scale_z_loss,
            {
                "fb5a982f83815012": Verdict.BUGGY,  # 0.14.0 to 0.15.3
                "abbd4141a913ce79": Verdict.BUGGY,  # 0.16.1
                "189996fe18cb1832": Verdict.BUGGY,  # 0.17.1
                "744761eebad2ed95": Verdict.BUGGY,  # 0.18.2
                "c0897edf41e06569": Verdict.FIXED,  # 0.19.2
            },
        ),
    ),
)
