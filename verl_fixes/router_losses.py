"""Which MoE router losses a transformer config really adds to the gradient, and where they cannot be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_fixes.errors import UnsupportedSettingError

_AUX_LOSS_TYPES = frozenset({"aux_loss", "seq_aux_loss", "global_aux_loss"})


def active_router_losses(config: Any) -> list[str]:
    """The MoE router losses that a transformer config really adds to the gradient, as ``setting=value``.

    ``moe_router_load_balancing_type`` and ``moe_aux_loss_coeff`` may be single values or lists.
    """
    if not getattr(config, "num_moe_experts", None):
        return []
    types = _as_list(getattr(config, "moe_router_load_balancing_type", None))
    coefficients = _as_list(getattr(config, "moe_aux_loss_coeff", None)) or [0.0]
    if len(coefficients) == 1:
        coefficients = list(coefficients) * len(types)
    active = [
        f"moe_router_load_balancing_type={kind} with moe_aux_loss_coeff={coefficient}"
        for kind, coefficient in zip(types, coefficients, strict=False)
        if kind in _AUX_LOSS_TYPES and coefficient
    ]
    if z_loss := getattr(config, "moe_z_loss_coeff", None):
        active.append(f"moe_z_loss_coeff={z_loss}")
    return active


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [] if value is None else [value]


def reject_unsupported(use_remove_padding: bool, config: Any) -> None:
    """Stop before anything runs when the router's token count is not the one that gradients are divided by.

    Raises:
        UnsupportedSettingError: BSHD batches while a router loss is active. Dense models, and router losses whose
            coefficient is 0, pass.
    """
    if use_remove_padding:
        return
    if active := active_router_losses(config):
        raise UnsupportedSettingError(
            "per-token-loss: calculate_per_token_loss=True with use_remove_padding=False (BSHD) while a router loss "
            f"is active ({', '.join(active)}). In BSHD the router counts the padding as well, and its loss would be "
            "too large by that ratio. Way out: set use_remove_padding=True, or switch the router loss off "
            "(moe_aux_loss_coeff=0, moe_z_loss_coeff=null), or calculate_per_token_loss=False (needs CP=1 with "
            "Megatron-Bridge). VERL_FIXES_PER_TOKEN_LOSS=0 runs stock verl, without this check and without the fix."
        )
