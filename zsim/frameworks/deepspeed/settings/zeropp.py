"""ZeRO++ and MiCS in a DeepSpeed JSON: combinations that DeepSpeed refuses, its defects, keys without effect.

Read in the released sources 0.10.3 to 0.19.8 (runtime/zero/partition_parameters.py, mics.py, mics_utils.py,
stage3.py, utils/groups.py, csrc/quantization). MiCS is there from 0.9.2 on and ZeRO++ from 0.10.0 on
(runtime/zero/config.py), where both are taken to do what they do in 0.10.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig, Dtype, ZeroConfig
from zsim.frameworks.deepspeed.settings.reader import Reading
from zsim.frameworks.deepspeed.settings.release import Release
from zsim.frameworks.deepspeed.settings.zero_schema import ZERO_KEYS


def check_zero_plus_plus(reading: Reading, zero: ZeroConfig, world_size: int, gpus_per_node: int) -> None:
    """Checks group sizes against the GPUs, and keys that exclude each other.

    Raises InputError where DeepSpeed asserts.
    """
    if zero.stage != 3:
        return
    where = f"{reading.where}: zero_optimization"
    for key, size in (
        ("zero_hpz_partition_size", min(zero.zero_hpz_partition_size, world_size)),
        ("mics_shard_size", zero.mics_shard_size),
    ):
        if size > 1 and world_size % size:
            raise InputError(f"{where}.{key}: found {size}, expected a divisor of the {world_size} GPUs")
    offload = zero.offload_param
    if zero.zero_hpz_partition_size > 1 and offload is not None and offload.device == "nvme":
        raise InputError(
            f"{where}.zero_hpz_partition_size: secondary shards cannot be on NVMe; expected "
            "offload_param.device 'none' or 'cpu', found 'nvme'"
        )
    if zero.is_mics:
        _check_mics(where, zero, world_size, gpus_per_node)
    elif reading.zero.zero_quantized_gradients and not zero.reduce_scatter:
        raise InputError(f"{where}.zero_quantized_gradients: needs reduce_scatter, which is false")


def _check_mics(where: str, zero: ZeroConfig, world_size: int, gpus_per_node: int) -> None:
    size = zero.mics_shard_size
    if zero.mics_hierarchical_params_gather:
        span = size // gpus_per_node
        if span <= 1:
            raise InputError(
                f"{where}.mics_hierarchical_params_gather: mics_shard_size {size} does not span two nodes of "
                f"{gpus_per_node} GPUs; expected false, or larger groups"
            )
        if size % span:
            raise InputError(
                f"{where}.mics_hierarchical_params_gather: mics_shard_size {size} spans {span} nodes; "
                f"expected a multiple of {span}"
            )
    if zero.offload_param is not None and not zero.mics_hierarchical_params_gather:
        raise InputError(
            f"{where}.mics_shard_size: MiCS gathers shards where they lie, which NCCL cannot in host memory "
            "(_flat_all_gather_with_coalescing_manager); expected no offload_param, or "
            "mics_hierarchical_params_gather, which copies them to the GPU first"
        )
    if zero.offload_optimizer is not None and world_size > size:
        raise InputError(
            f"{where}.mics_shard_size: MiCS adds up gradients of {world_size // size} replicas in GPU memory "
            "only ('Local sharding has no support for CPU offloading'); expected no offload_optimizer, or "
            "one group of all GPUs"
        )


def check_even_nodes(config: DeepSpeedConfig, gpus: Sequence[int]) -> None:
    """Raises InputError if nodes have different numbers of GPUs with qgZ or MiCS's hierarchical gathers,
    whose groups are built from one node's `device_count()`."""
    zero, where = config.zero, f"{config.name}: zero_optimization"
    if zero.stage != 3 or len(set(gpus)) == 1:
        return
    for key, is_on in (
        ("zero_quantized_gradients", zero.zero_quantized_gradients),
        ("mics_hierarchical_params_gather", zero.is_mics and zero.mics_hierarchical_params_gather),
    ):
        if is_on:
            raise InputError(
                f"{where}.{key}: builds its groups node by node; expected equally many GPUs on every node, "
                f"found {min(gpus)} to {max(gpus)}"
            )


def reason_without_effect(bare: str, zero: ZeroConfig, num_nodes: int) -> str | None:
    """Why a key of ZeRO++ or MiCS has no effect at stage 3, or None if it has one."""
    if zero.is_mics and ZERO_KEYS[bare].is_ignored_by_mics:
        return "no effect with mics_shard_size"
    if zero.is_mics and bare == "zero_hpz_partition_size" and zero.zero_hpz_partition_size > 1:
        return "with mics_shard_size the secondary shards are written and never read"
    if bare == "mics_hierarchical_params_gather" and not zero.is_mics:
        return "no effect without mics_shard_size"
    if bare == "zero_quantized_nontrainable_weights":
        return "no effect: every parameter is trained"
    if bare == "zero_quantized_gradients" and zero.zero_quantized_gradients and num_nodes == 1:
        return "no effect on one node"
    if bare == "zeropp_loco_param" and not zero.zero_quantized_gradients:
        return "no effect without zero_quantized_gradients"
    return None


def zero_plus_plus_notes(
    reading: Reading, zero: ZeroConfig, communication_dtype: Dtype, param_dtype: Dtype, release: Release
) -> list[str]:
    """Notes on DeepSpeed's defects with these keys. zsim simulates as if they did not matter."""
    if zero.stage != 3:
        return []
    where = f"{reading.where}: zero_optimization"
    notes = []
    if zero.zero_hpz_partition_size > 1 and not zero.is_mics and not release.refreshes_secondary_shards:
        notes.append(
            f"{where}.zero_hpz_partition_size: DeepSpeed {release} never refreshes the secondary shards, so "
            "that backward runs on the first weights (mended in 0.13.2)"
        )
    if zero.zero_quantized_weights and param_dtype == "bf16" and not release.casts_before_quantizing:
        notes.append(
            f"{where}.zero_quantized_weights: DeepSpeed {release} quantises the bits of bf16 weights as if "
            "they were fp16, which corrupts them (mended in 0.19.6)"
        )
    if zero.zero_quantized_gradients and communication_dtype != "fp16":
        notes.append(
            f"{where}.zero_quantized_gradients: DeepSpeed's kernels read {communication_dtype} gradients as "
            "if they were fp16, which corrupts them; communication_data_type 'fp16' mends it"
        )
    if zero.is_mics and release.misreduces_mics:
        notes.append(
            f"{where}.mics_shard_size: DeepSpeed {release} scatters gradients over all GPUs by mistake, not "
            "over the group that shards; simulated as in 0.19.2, which does not"
        )
    return notes
