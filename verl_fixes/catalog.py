"""Every patch, in the order in which they are applied. A new patch is one line here."""

from __future__ import annotations

from collections.abc import Sequence

from verl_fixes.errors import CatalogError
from verl_fixes.patch import Patch
from verl_fixes.patches import (
    dapo_reward_filter,
    detach_outputs,
    dynamic_batch_sync,
    hf_text_config,
    moe_aux_scale,
    per_token_loss,
    r2_replay,
    ray_propagation,
    resume_warmup,
    run_provenance,
    scalar_metrics,
    val_accuracy,
    val_none_safe,
    vlm_thd_align,
)

CATALOG: tuple[Patch, ...] = (
    scalar_metrics.PATCH,
    per_token_loss.PATCH,
    moe_aux_scale.PATCH,
    detach_outputs.PATCH,
    dynamic_batch_sync.PATCH,
    vlm_thd_align.PATCH,
    r2_replay.PATCH,
    hf_text_config.PATCH,
    val_none_safe.PATCH,
    val_accuracy.PATCH,
    resume_warmup.PATCH,
    dapo_reward_filter.PATCH,
    ray_propagation.PATCH,
    run_provenance.PATCH,
)


def check(catalog: Sequence[Patch]) -> None:
    """Refuse a catalog in which two patches have one name, or claim one target without saying that they may.

    Raises:
        CatalogError: names both patches and what they share.
    """
    claimed: dict[str, list[Patch]] = {}
    seen: set[str] = set()
    for patch in catalog:
        if patch.name in seen:
            raise CatalogError(f"two patches are called {patch.name!r}; give one of them another name")
        seen.add(patch.name)
        for target in patch.targets:
            for other in claimed.get(str(target), []):
                if other is patch or other.name not in patch.stacks_on:
                    raise CatalogError(
                        f"{patch.name} and {other.name} both claim {target}. Merge them, or, if {patch.name} is "
                        f"right to wrap what {other.name} has wrapped, add {other.name!r} to its stacks_on."
                    )
            claimed.setdefault(str(target), []).append(patch)
