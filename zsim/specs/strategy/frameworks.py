"""The sharding strategies of torch's frameworks and of the reference engine."""

from __future__ import annotations

from typing import Literal

from zsim.dataclass import dataclass

# Where the reference engine keeps optimizer states (with reduced gradients) and stage 3's parameter shards.
Place = Literal["device", "host", "nvme"]


@dataclass(frozen=True, slots=True)
class Ddp:
    """torch DistributedDataParallel; caps in bytes."""

    bucket_cap_bytes: int = 25 * 2**20
    first_bucket_cap_bytes: int = 2**20
    gradient_as_bucket_view: bool = False
    no_sync: bool = True


@dataclass(frozen=True, slots=True)
class Reference:
    """ZeRO's reference engine (`validation/zero`); its ZeroConfig explains the fields. `sums_itself`: its
    reduce-scatter is an all-to-all and a local sum, as on gloo."""

    stage: int
    param_dtype: str
    reduce_dtype: str
    bucket_bytes: int = 0
    prefetch: int = 1
    max_reductions_in_flight: int = 2
    keep_gathered: bool = True
    sums_itself: bool = False
    optimizer_place: Place = "device"
    parameter_place: Place = "device"


@dataclass(frozen=True, slots=True)
class Fsdp2:
    """torch `fully_shard`. `replicate` > 1 is HSDP; `reshard_after_forward` None is the default of the
    wrapping (True, root False). `no_sync`: reduce only after the last micro-batch. `gpus_per_node`: what
    DTensor takes for a node when it weighs collectives; `gpus_of_node`: how many GPUs of the job there are on
    one. `param_dtype` "fp8": the
    weights of fp8 products are gathered in fp8, all other parameters in bf16; the maximum of each weight is
    all-reduced before, or (`precomputes_scales`) all maxima together behind the update."""

    reshard_after_forward: bool | int | None
    replicate: int
    wrapping: str
    param_dtype: str
    reduce_dtype: str
    no_sync: bool
    reduce_scatter_max_input_buffers: int = 1
    cpu_offload: bool = False
    gpus_per_node: int = 8
    gpus_of_node: int = 8
    precomputes_scales: bool = False


@dataclass(frozen=True, slots=True)
class Fsdp1:
    """torch FullyShardedDataParallel. `replicate` > 1 for the hybrid strategies; `wrapping` may be `size:N`,
    N in elements. `before_torch_2`: as torch 1.12 and 1.13, which pad every sharded flat gradient even if not
    needed, set its shard to zero, split flat parameters on the compute stream, and copy shards even to the
    type that they already have. `use_orig_params`: a flat parameter may have frozen parts."""

    sharding_strategy: str
    replicate: int
    wrapping: str
    backward_prefetch: str
    forward_prefetch: bool
    limit_all_gathers: bool
    param_dtype: str
    reduce_dtype: str
    no_sync: bool
    cpu_offload: bool = False
    before_torch_2: bool = False
    use_orig_params: bool = True
