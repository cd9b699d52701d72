"""Differences between DeepSpeed's releases: one table of behaviours, each with its source.

Read in the released sources 0.8.2 to 0.19.8. If a key was added between two of the releases that were read,
it is accepted from the earlier of both on, because its default changes nothing. The releases of a key of the
file are stated with the key, in `schema`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from zsim.errors import InputError

Version = tuple[int, int, int]

OLDEST = "0.8.2"
NEWEST = "0.19.8"

# Last patch release of every minor release (PyPI); the first of 0.8 that zsim knows is OLDEST.
_LAST_PATCH = {8: 3, 9: 5, 10: 3, 11: 2, 12: 6, 13: 5, 14: 5, 15: 4, 16: 9, 17: 6, 18: 9, 19: 8}

_STAGE12, _STAGE3 = "zero/stage_1_and_2.py", "zero/stage3.py"  # below deepspeed/runtime, as all of these
_INIT, _ENGINE = "zero/partition_parameters.py", "engine.py"


@dataclass(frozen=True, slots=True)
class ReleaseChange:
    """`value` in the releases from `since` on and before `until`, `otherwise` in all others."""

    source: str
    since: Version = (0, 0, 0)
    until: Version = (1, 0, 0)
    value: Any = True
    otherwise: Any = False

    def value_in(self, number: Version) -> Any:
        return self.value if self.since <= number < self.until else self.otherwise


@dataclass(frozen=True, slots=True)
class Release:
    """The behaviours in which one DeepSpeed release may differ from others."""

    number: Version
    default_gradient_clipping: Annotated[
        float, ReleaseChange("#8068, constants.py", since=(0, 19, 3), value=1.0, otherwise=0.0)
    ]
    default_pin_memory: Annotated[bool, ReleaseChange("#8207, zero/offload_config.py", since=(0, 19, 5))]
    default_bf16_check_grad_overflow: Annotated[
        bool, ReleaseChange("#8035, precision_config.py", since=(0, 19, 3))
    ]
    reduces_in_fp16: Annotated[bool, ReleaseChange(f"#2970, {_ENGINE}", until=(0, 9, 0))]
    """ZeRO reduces gradients of any dtype in fp16 by default."""
    reduces_bf16_in_fp32: Annotated[bool, ReleaseChange(_ENGINE, since=(0, 9, 0), until=(0, 9, 2))]
    """Gradients in bf16 are reduced in fp32 by default."""
    copies_fp16_in_cpu_adam: Annotated[bool, ReleaseChange(f"#3097, {_STAGE12}", until=(0, 9, 0))]
    """DeepSpeedCPUAdam copies fp16 parameters to the GPU while it updates at stages 1 and 2."""
    accumulates_in_another_dtype: Annotated[bool, ReleaseChange(f"#2847, {_ENGINE}", since=(0, 10, 1))]
    """ZeRO knows a `grad_accum_dtype` that is not the weights' type."""
    has_bf16_overflow_key: Annotated[bool, ReleaseChange("#6976, precision_config.py", since=(0, 17, 1))]
    module_hooks: Annotated[
        str,
        ReleaseChange(
            "#7916, zero/parameter_offload.py", until=(0, 19, 1), value="_before_0_19_1", otherwise=""
        ),
    ]
    """The end of the names of the events that stage 3's hooks of a module cost the host. They were timed with
    0.9.3 to 0.18.9, whose code 0.19.0 still has, and with 0.19.8.
    """
    requires_positive_reduce_bucket: Annotated[bool, ReleaseChange("zero/config.py", since=(0, 19, 6))]
    has_one_bit_optimizers: Annotated[bool, ReleaseChange("config.py", until=(0, 19, 7))]
    aio_threads_key: Annotated[
        str,
        ReleaseChange(
            "#7056, swap_tensor/constants.py",
            since=(0, 16, 4),
            value="intra_op_parallelism",
            otherwise="thread_count",
        ),
    ]
    default_multi_rank_bucket_allreduce: Annotated[
        bool, ReleaseChange(f"#4695, {_STAGE12}", since=(0, 12, 4))
    ]
    reduces_slice_by_slice: Annotated[bool, ReleaseChange(f"#4695, {_STAGE12}", until=(0, 12, 4))]
    """Stages 1 and 2 reduce every slice of a bucket separately, asynchronously."""
    gathers_step_in_buckets: Annotated[bool, ReleaseChange(f"#4705, {_STAGE12}", until=(0, 12, 4))]
    """The step of stages 1 and 2 gathers in pieces of `allgather_bucket_size`."""
    flattens_on_gpu: Annotated[bool, ReleaseChange(f"#7828, {_STAGE12}", since=(0, 18, 7))]
    """Stages 1 and 2 build the flat parameters on the GPU if there is room for both copies. Otherwise they
    build them on the CPU, with the GPU's cache emptied.
    """
    clones_shards_on_gpu: Annotated[bool, ReleaseChange(f"#7700, {_STAGE12}", since=(0, 18, 3))]
    """Offloaded masters, too, are cast from a clone on the GPU."""
    makes_states_in_first_step: Annotated[bool, ReleaseChange(f"#5104, {_STAGE12}", since=(0, 13, 2))]
    """Optimizer states are made in the first step. Otherwise they are made before it."""
    sums_fp32_on_gpu: Annotated[bool, ReleaseChange(_STAGE12, since=(0, 19, 8))]
    """The fp32 sums of 16-bit gradients stay on the GPU with offload."""
    checks_overflow_of_every_dtype: Annotated[bool, ReleaseChange(f"#4512, {_STAGE12}", until=(0, 12, 0))]
    """ZeRO looks for overflow in bf16 and fp32 gradients too."""
    reads_each_sum: Annotated[bool, ReleaseChange(f"#5115, {_STAGE12}", until=(0, 13, 3))]
    """Stages 1 and 2 let the host wait for a sum of every gradient, by which they look for infinities."""
    looks_at_extremes: Annotated[bool, ReleaseChange("utils.py `has_inf_or_nan`", since=(0, 19, 6))]
    """Infinities are looked for in the greatest and least element of a gradient."""
    keeps_overflow_local: Annotated[
        bool, ReleaseChange(f"#6976, #7580, {_STAGE12}", since=(0, 17, 1), until=(0, 18, 0))
    ]
    """Stage 1 does not reduce its overflow flag over the ranks that shard."""
    shards_bf16_without_zero: Annotated[bool, ReleaseChange(f"#7515, {_ENGINE}", until=(0, 17, 6))]
    """bf16 at stage 0 ends in BF16_Optimizer, which shards like stage 1."""
    mistakes_bf16_wrapper: Annotated[
        bool, ReleaseChange("#7515, #7788, base_optimizer.py", since=(0, 17, 6), until=(0, 18, 5))
    ]
    """FP16_Optimizer is taken where BF16_Optimizer is meant."""
    refreshes_secondary_shards: Annotated[bool, ReleaseChange(f"#4906, {_STAGE3}", since=(0, 13, 2))]
    """hpZ's secondary shards are dropped after a step and rewritten by the next forward. Otherwise they keep
    their initial content: backward runs on stale weights (`_post_step` has the call commented out), and every
    forward gathers over all GPUs.
    """
    waits_for_secondary_shards: Annotated[bool, ReleaseChange(f"#5216, {_INIT}", since=(0, 13, 5))]
    """The host waits for the copy of every secondary shard."""
    has_partial_offload: Annotated[bool, ReleaseChange(f"#4636, {_STAGE3}", since=(0, 12, 3))]
    """Stage 3 knows a ratio of sub-groups to offload."""
    clears_secondary_shards: Annotated[bool, ReleaseChange(f"#8210, {_INIT}", since=(0, 19, 5))]
    """hpZ's secondary shards are set to zero first."""
    scatters_indivisible_gradients: Annotated[
        bool, ReleaseChange("#5056, comm/coalesced_collectives.py", since=(0, 13, 2))
    ]
    """qgZ reduce-scatters what two hops cannot divide. Otherwise it fails."""
    casts_before_quantizing: Annotated[bool, ReleaseChange(f"#8215, {_INIT}", since=(0, 19, 6))]
    """qwZ casts weights to fp16 first. Otherwise its kernels read the bits of bf16 as fp16."""
    misreduces_mics: Annotated[bool, ReleaseChange(f"#8060, {_STAGE3}", since=(0, 19, 3), until=(0, 19, 7))]
    """MiCS's gradients are scattered over all GPUs, not over the group that holds the shards
    (`_get_param_partition_group`).
    """
    has_bf16_masters: Annotated[bool, ReleaseChange("#7700, precision_config.py", since=(0, 18, 3))]
    """Masters may be bf16, and those of fp16 may be fp16 at stages 1 and 3, not at stage 2 alone."""
    has_bf16_cpu_states: Annotated[bool, ReleaseChange(f"#8010, {_ENGINE}", since=(0, 19, 1))]
    """`bf16_optimizer_states` makes DeepSpeedCPUAdam's moments bf16. Otherwise
    `optimizer.params.fp32_optimizer_states` decides alone.
    """
    has_leaf_classes: Annotated[bool, ReleaseChange("#7604, zero/leaf_module_config.py", since=(0, 18, 0))]
    cuts_heads_in_two: Annotated[bool, ReleaseChange(f"#8185, {_ENGINE}", since=(0, 18, 9), until=(0, 19, 6))]
    """AutoTP follows transformers' plan without knowing of heads, or of a grain."""
    gives_last_rank_the_rest: Annotated[
        bool, ReleaseChange("#8185, module_inject/tp_shard.py", since=(0, 19, 6))
    ]
    """The last rank has the features that AutoTP's grain does not divide. Otherwise they are lost."""
    copies_checkpoints_on_a_stream: Annotated[
        bool, ReleaseChange("#8255, activation_checkpointing/offload_activations.py", since=(0, 19, 6))
    ]
    """`cpu_checkpointing` copies through pinned memory on a separate stream and keeps the newest input on the
    GPU. Otherwise both copies block and are not pinned.
    """

    @classmethod
    def from_number(cls, number: Version) -> Release:
        return cls(number, **{name: change.value_in(number) for name, change in CHANGES.items()})

    def __str__(self) -> str:
        return ".".join(str(part) for part in self.number)


CHANGES: dict[str, ReleaseChange] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Release, include_extras=True).items()
    if name != "number"
}


def parse_release(text: str, where: str) -> Release:
    """`"0.19.8"` -> Release, and `"0.19"` that of its last patch.

    Raises InputError, whose message begins with `where`, for anything that is not a known release.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+)(?:\+\S+)?)?", str(text).strip())
    if match is None:
        raise InputError(f"{where}: '{text}' is not a DeepSpeed release; expected {OLDEST} to {NEWEST}")
    major, minor = int(match[1]), int(match[2])
    patch = int(match[3]) if match[3] else _LAST_PATCH.get(minor, 0)
    is_supported = major == 0 and patch <= _LAST_PATCH.get(minor, -1) and (minor, patch) >= (8, 2)
    if not is_supported:
        raise InputError(f"{where}: DeepSpeed {text} is not known to zsim; expected {OLDEST} to {NEWEST}")
    return Release.from_number((major, minor, patch))
