"""Dynamic context parallelism, as verl 0.9 asks Megatron for it, on released versions of megatron-core.

verl 0.9 uses names that exist on the ``dev`` branch of Megatron-LM only, from d2e7ec5b on. Releases have the same thing
under its older name, hybrid context parallelism. :func:`arrange` gives it the new name and adds what came with it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def arrange() -> None:
    """Does nothing where megatron-core has dynamic context parallelism of its own."""
    from megatron.core import parallel_state

    if hasattr(parallel_state, "get_dynamic_data_context_parallel_groups"):
        return
    _arrange_groups(parallel_state)
    _arrange_scheduler()
    _arrange_config()
    _arrange_attention()


def _arrange_groups(parallel_state: Any) -> None:
    initialize, hybrid_group = (
        parallel_state.initialize_model_parallel,
        parallel_state.get_hybrid_data_context_parallel_groups,
    )
    alone: dict[int, Any] = {}  # releases make no groups of one rank

    def initialize_model_parallel(*args: Any, dynamic_context_parallel: bool = False, **kwargs: Any) -> None:
        initialize(*args, hybrid_context_parallel=dynamic_context_parallel, **kwargs)
        alone.clear()
        if dynamic_context_parallel:
            alone[1] = torch.distributed.new_subgroups(group_size=1)[0]

    def get_dynamic_data_context_parallel_groups(check_initialized: bool = True, group_size: int | None = None) -> Any:
        return alone[1] if group_size == 1 else hybrid_group(check_initialized, group_size)

    parallel_state.initialize_model_parallel = initialize_model_parallel
    parallel_state.get_dynamic_data_context_parallel_groups = get_dynamic_data_context_parallel_groups


def _arrange_scheduler() -> None:
    from megatron.core.datasets import data_schedule
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Ranks:
        """As much of a process group as the scheduler of the releases looks at."""

        def __init__(self, size: int) -> None:
            self.size = lambda: size

    class DefaultDynamicCPScheduler(BalancedCPScheduler):
        def __init__(
            self, max_seqlen_per_dp_cp_rank: int, cp_size: int, dp_size: int, microbatch_group_size_per_vp_stage: None
        ) -> None:
            super().__init__(max_seqlen_per_dp_cp_rank, Ranks(dp_size * cp_size))

        def get_groups_and_subsamples(self, sample_id_seqlens: Any, config: Any = None) -> Any:
            return super().get_groups_and_subsamples(sample_id_seqlens, config)[1]

    data_schedule.DefaultDynamicCPScheduler = DefaultDynamicCPScheduler


def _arrange_config() -> None:
    from mbridge.core.bridge import Bridge

    set_extra_args = Bridge.set_extra_args

    def under_the_older_name(self: Any, **kwargs: Any) -> None:
        if "dynamic_context_parallel" in kwargs:
            kwargs["hybrid_context_parallel"] = kwargs.pop("dynamic_context_parallel")
        set_extra_args(self, **kwargs)

    Bridge.set_extra_args = under_the_older_name


def _arrange_attention() -> None:
    """Rotary positions are those of the micro-batch's own CP group, as on the ``dev`` branch."""
    from megatron.core.transformer.attention import Attention

    forward = Attention.forward

    @functools.wraps(forward)
    def with_the_group_of_the_micro_batch(self: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        groups, static = self.pg_collection, self.pg_collection.cp
        groups.cp = getattr(packed_seq_params, "cp_group", None) or static
        try:
            return forward(self, *args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            groups.cp = static

    Attention.forward = with_the_group_of_the_micro_batch
