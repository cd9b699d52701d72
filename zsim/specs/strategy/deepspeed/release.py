"""What changed from one DeepSpeed release to the next: keys that came and went, defaults that moved.

Read in the released sources 0.10.3 to 0.19.8. Where the release between two that were read is not known, the
later key is accepted from the earlier of the two on, because its default changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zsim.errors import InputError

Version = tuple[int, int, int]

OLDEST = "0.10.3"
NEWEST = "0.19.8"

# Last patch release of every minor release (PyPI); the first of 0.10 that zsim knows is OLDEST.
_LAST_PATCH = {10: 3, 11: 2, 12: 6, 13: 5, 14: 5, 15: 4, 16: 9, 17: 6, 18: 9, 19: 8}

# `zero_optimization` and its offload blocks: first release with the key.
ZERO_KEYS_SINCE: dict[str, Version] = {
    "use_multi_rank_bucket_allreduce": (0, 12, 4),
    "offload_optimizer.ratio": (0, 12, 4),
    "use_all_reduce_for_fetch_params": (0, 14, 1),
    "module_granularity_threshold": (0, 16, 0),
    "zeropp_loco_param": (0, 16, 1),
    "log_trace_cache_warnings": (0, 16, 1),
    "zenflow": (0, 17, 3),
    "enable_sanity_checks": (0, 17, 6),
    "leaf_module": (0, 18, 0),
    "offload_optimizer.super_offload": (0, 18, 0),
    "offload_optimizer.cpuadam_cores_perc": (0, 18, 0),
    "allgather_sequential": (0, 18, 5),
    "save_muon_momentum_buffer_in_memory": (0, 18, 6),
    "compute_grad_norm": (0, 19, 7),
    "parameter_alignment": (0, 19, 7),
}

# First release that refuses the key.
ZERO_KEYS_UNTIL: dict[str, Version] = {
    "mics_shard_size": (0, 19, 7),
    "mics_hierarchical_params_gather": (0, 19, 7),
    "zeropp_loco_param": (0, 19, 8),
}
TOP_KEYS_UNTIL: dict[str, Version] = {
    "nebula": (0, 19, 7),
    "compression_training": (0, 19, 7),
    "quantize_training": (0, 19, 7),
    "sparse_attention": (0, 19, 7),
    "amp": (0, 19, 8),
    "sparse_gradients": (0, 19, 8),
    "eigenvalue": (0, 19, 8),
    "elasticity": (0, 19, 8),
    "graph_harvesting": (0, 19, 8),
    "curriculum_learning": (0, 19, 8),
    "progressive_layer_drop": (0, 19, 8),
}


@dataclass(frozen=True, slots=True)
class Release:
    """One DeepSpeed release, asked by its differences."""

    number: Version

    def __str__(self) -> str:
        return ".".join(str(part) for part in self.number)

    def knows_zero_key(self, bare: str) -> bool:
        """Whether `zero_optimization` has this key (bare name) in this release."""
        until = ZERO_KEYS_UNTIL.get(bare)
        return self.number >= ZERO_KEYS_SINCE.get(bare, (0, 0, 0)) and (until is None or self.number < until)

    @property
    def default_gradient_clipping(self) -> float:
        """1.0 since 0.19.3 (#8068), none before."""
        return 1.0 if self.number >= (0, 19, 3) else 0.0

    @property
    def default_pin_memory(self) -> bool:
        """True since 0.19.5 (#8207)."""
        return self.number >= (0, 19, 5)

    @property
    def default_bf16_check_grad_overflow(self) -> bool:
        """True since 0.19.3 (#8035); the key exists since 0.17.1."""
        return self.number >= (0, 19, 3)

    @property
    def default_multi_rank_bucket_allreduce(self) -> bool:
        """Before the key existed (0.12.4, #4695): one `reduce` per slice of one owner."""
        return self.number >= (0, 12, 4)

    @property
    def reduces_slice_by_slice(self) -> bool:
        """Before 0.12.4 (#4695) stages 1 and 2 reduced every slice of a bucket by itself, asynchronously."""
        return self.number < (0, 12, 4)

    @property
    def gathers_step_in_buckets(self) -> bool:
        """Before 0.12.4 (#4705) stages 1 and 2 gathered in pieces of `allgather_bucket_size`."""
        return self.number < (0, 12, 4)

    @property
    def flattens_on_gpu(self) -> bool:
        """Since 0.18.7 stages 1 and 2 put the flat parameters together on the GPU, where there is room for
        both; before, on the CPU, and with the GPU's cache emptied."""
        return self.number >= (0, 18, 7)

    @property
    def clones_shards_on_gpu(self) -> bool:
        """Since 0.18.3 also offloaded masters are cast from a clone that is made on the GPU."""
        return self.number >= (0, 18, 3)

    @property
    def makes_states_in_first_step(self) -> bool:
        """Before 0.13.2 stages 1 and 2 made the optimizer's states before the first step."""
        return self.number >= (0, 13, 2)

    @property
    def checks_overflow_of_every_dtype(self) -> bool:
        """Before #4512, ZeRO looked for overflow in bf16 and fp32 gradients too."""
        return self.number < (0, 12, 0)

    @property
    def has_bf16_overflow_key(self) -> bool:
        return self.number >= (0, 17, 1)

    @property
    def requires_positive_reduce_bucket(self) -> bool:
        """`reduce_bucket_size` > 0 since 0.19.6, >= 0 before."""
        return self.number >= (0, 19, 6)

    @property
    def shards_bf16_without_zero(self) -> bool:
        """Before 0.17.6 (#7515), bf16 at stage 0 ended in BF16_Optimizer, which shards like stage 1."""
        return self.number < (0, 17, 6)

    @property
    def mistakes_bf16_wrapper(self) -> bool:
        """0.17.6 to 0.18.4 took FP16_Optimizer where BF16_Optimizer was meant (#7788)."""
        return (0, 17, 6) <= self.number < (0, 18, 5)

    @property
    def has_one_bit_optimizers(self) -> bool:
        return self.number < (0, 19, 7)

    @property
    def refreshes_secondary_shards(self) -> bool:
        """Since 0.13.2 hpZ's secondary shards are dropped after a step and written anew by the next forward.
        Before, they kept what initialisation wrote: backward ran on stale weights (`_post_step` has the call
        commented out), and every forward gathered over all GPUs."""
        return self.number >= (0, 13, 2)

    @property
    def waits_for_secondary_shards(self) -> bool:
        """Since 0.13.5 the host waits for the copy of every secondary shard."""
        return self.number >= (0, 13, 5)

    @property
    def scatters_indivisible_gradients(self) -> bool:
        """Since 0.13.2 (#5056) qgZ reduce-scatters what two hops cannot divide; before, it failed."""
        return self.number >= (0, 13, 2)

    @property
    def casts_before_quantizing(self) -> bool:
        """Since 0.19.6 qwZ casts weights to fp16 first; before, its kernels took bf16 for fp16 as it was."""
        return self.number >= (0, 19, 6)

    @property
    def misreduces_mics(self) -> bool:
        """0.19.3 to 0.19.6 scatter MiCS's gradients over all GPUs, not over the group that holds the shards
        (`_get_param_partition_group`)."""
        return (0, 19, 3) <= self.number < (0, 19, 7)

    @property
    def aio_threads_key(self) -> str:
        return "intra_op_parallelism" if self.number >= (0, 16, 1) else "thread_count"


def parse_release(text: str, where: str) -> Release:
    """`"0.19.8"` -> Release; `where` begins the message of the InputError for anything that is not one."""
    match = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)(?:\+\S+)?", str(text).strip())
    if match is None:
        raise InputError(f"{where}: '{text}' is not a DeepSpeed release; expected {OLDEST} to {NEWEST}")
    major, minor, patch = (int(part) for part in match.groups())
    known = major == 0 and patch <= _LAST_PATCH.get(minor, -1) and (minor, patch) >= (10, 3)
    if not known:
        raise InputError(f"{where}: DeepSpeed {text} is not known to zsim; expected {OLDEST} to {NEWEST}")
    return Release((major, minor, patch))
