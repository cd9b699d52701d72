"""The sharding strategies of torch's frameworks and of the reference engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Where the reference engine keeps optimizer states (with reduced gradients) and stage 3's parameter shards.
MemoryTier = Literal["device", "host", "nvme"]


@dataclass(frozen=True, slots=True)
class DdpConfig:
    """torch DistributedDataParallel. Caps are in bytes."""

    bucket_cap_bytes: int = 25 * 2**20
    first_bucket_cap_bytes: int = 2**20
    gradient_as_bucket_view: bool = False
    no_sync: bool = True


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """ZeRO's reference engine (`validation/zero`), whose ZeroConfig explains the other fields."""

    stage: int
    param_dtype: str
    reduce_dtype: str
    bucket_bytes: int = 0
    prefetch: int = 1
    max_reductions_in_flight: int = 2
    keep_gathered: bool = True
    emulates_reduce_scatter: bool = False
    """The reduce-scatter is an all-to-all and a local sum, as on gloo."""
    optimizer_place: MemoryTier = "device"
    """The memory that holds optimizer states and reduced gradients."""
    parameter_place: MemoryTier = "device"
    """The memory that holds stage 3's parameter shards."""


@dataclass(frozen=True, slots=True)
class Fsdp2Config:
    """torch `fully_shard`."""

    reshard_after_forward: bool | int | None
    """None is the default of the wrapping: True, but False for the root."""
    replicate: int
    """Replicas of the sharded group. More than 1 is HSDP."""
    wrapping: str
    param_dtype: str
    """The type that is gathered. With "fp8" the weights of fp8 products are gathered in fp8 and all other
    parameters in bf16, and the maximum of each weight is all-reduced before it is gathered.
    """
    reduce_dtype: str
    no_sync: bool
    """Gradients are reduced only after the last micro-batch."""
    reduce_scatter_max_input_buffers: int = 1
    cpu_offload: bool = False
    gpus_per_node: int = 8
    """GPUs that DTensor takes for a node when it weighs collectives."""
    job_gpus_per_node: int = 8
    """GPUs of the job that are on one node."""
    precomputes_scales: bool = False
    """The maxima of all fp8 weights are all-reduced in one collective after the update."""


@dataclass(frozen=True, slots=True)
class Fsdp1Config:
    """torch FullyShardedDataParallel."""

    sharding_strategy: str
    replicate: int
    """Replicas of the sharded group. More than 1 for the hybrid strategies."""
    wrapping: str
    """The wrapping policy. It may be `size:N`, with N in elements."""
    backward_prefetch: str
    forward_prefetch: bool
    limit_all_gathers: bool
    param_dtype: str
    reduce_dtype: str
    no_sync: bool
    cpu_offload: bool = False
    before_torch_2: bool = False
    """As torch 1.12 and 1.13, which pad every sharded flat gradient even if not needed, set its shard to
    zero, split flat parameters on the compute stream, and copy shards even to the type that they already
    have.
    """
    use_orig_params: bool = True
    """A flat parameter may have frozen parts."""
