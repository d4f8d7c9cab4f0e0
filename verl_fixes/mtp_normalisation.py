"""Multi-token prediction under calculate_per_token_loss: its loss stays a mean over the response tokens.

With the flag on, Megatron adds the MTP loss as a sum over response tokens to a gradient that is divided by all tokens
that the router sees. Without a correction it weighs too little by response tokens / routed tokens. verl 0.9 corrects
it, but only where megatron-core has ``process_mtp_loss`` (0.17.0 on) and sequences are packed (THD). At CP>1, both
verl 0.9 and ``process_mtp_loss`` also multiply by tokens before / after the shift of each rank alone; that stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl_fixes.token_counts import counted_tokens


@contextmanager
def mtp_loss_normalised(engine: Any, data: Any) -> Iterator[None]:
    """While it lasts, ``mtp_loss_scaling_factor`` is multiplied by routed tokens / response tokens of the mini-batch.

    Both are counted over data parallel ranks, with one all-reduce, which all ranks take part in or none. The factor
    reaches the gradient only, not the logged loss.
    """
    if not _trains_mtp(engine) or _upstream_normalises(engine):
        yield
        return

    import torch
    from verl.models.mcore import mtp_patch
    from verl.utils.device import get_device_id

    mask = data["loss_mask"]
    routed, response = counted_tokens(engine, data), (mask.values() if mask.is_nested else mask).sum()
    counts = torch.stack([routed.to(response.device), response]).to(get_device_id(), torch.int64)
    torch.distributed.all_reduce(counts, group=engine.get_data_parallel_group())
    all_routed, all_response = counts.tolist()

    models = [mtp_patch._get_patching_model(chunk) or chunk for chunk in engine.module]  # whose MTP layers verl trains
    configs = {id(model.config): model.config for model in models}
    before = {key: config.mtp_loss_scaling_factor for key, config in configs.items()}
    entered = [key for key in configs if key not in _users_factor]
    try:
        for key, config in configs.items():
            factor = _users_factor.setdefault(key, before[key])
            config.mtp_loss_scaling_factor = factor * all_routed / max(all_response, 1)
        yield
    finally:
        for key, config in configs.items():
            config.mtp_loss_scaling_factor = before[key]
        for key in entered:
            del _users_factor[key]


_users_factor: dict[int, float] = {}
"""By ``id`` of a config, its own factor while ours is in force: an override that calls ``super()`` enters twice."""


def _trains_mtp(engine: Any) -> bool:
    mtp = getattr(engine.model_config, "mtp", None)
    layers = getattr(engine.tf_config, "mtp_num_layers", None)
    return bool(layers and getattr(mtp, "enable", False) and getattr(mtp, "enable_train", False))


def _upstream_normalises(engine: Any) -> bool:
    """verl 0.9 passes the factor on the packed sequence's parameters, and only ``process_mtp_loss`` is given it."""
    from megatron.core.transformer import multi_token_prediction
    from verl.models.mcore import model_forward

    forward = getattr(model_forward, "gptmodel_forward_model_engine", None)
    passes_it = forward and "mtp_loss_normalization_factor" in inspect.signature(forward).parameters
    uses_it = hasattr(multi_token_prediction, "process_mtp_loss")
    return bool(passes_it and uses_it and engine.engine_config.use_remove_padding)
