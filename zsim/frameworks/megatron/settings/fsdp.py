"""Megatron-FSDP (`--use-megatron-fsdp`), resolved.

Read in Megatron-Core 0.16.1 (training/arguments.py, training/training.py `get_model`,
core/distributed/fsdp/mcore_fsdp_adapter.py and fsdp/src/megatron_fsdp/megatron_fsdp.py). Core 0.13 has it as
`--use-custom-fsdp`, 0.14 by this name.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.errors import InputError
from zsim.frameworks.megatron.settings.table import FsdpSharding, MegatronTable

_FIRST, _HYBRID_EXPERTS = (0, 13), (0, 17)
_UNSHARDED_PARAMETERS: tuple[FsdpSharding, ...] = ("no_shard", "optim")


@dataclass(frozen=True, slots=True)
class MegatronFsdp:
    """Megatron-FSDP, resolved."""

    sharding: FsdpSharding
    """The states that are sharded besides the optimizer's: also gradients ("optim_grads"), also parameters
    ("optim_grads_params").
    """
    outer_sharding: str
    """The sharding over the instances: of the optimizer states ("optim"), or none."""
    overlaps_gradients: bool
    """Reductions run during backward, as they do in any case once gradients are sharded."""
    overlaps_parameters: bool
    """Gathers run during forward and backward, as they do in any case once parameters are sharded."""
    bucket_size: int | None
    """Elements of a bucket of parameters that no layer has. None for one bucket."""
    unit_size: int | None
    """Elements of gradients that may be in flight, twice those of parameters gathered ahead. None for the
    layers' size.
    """
    has_double_buffer: bool
    has_gather_group: bool
    """Gathers have a communicator of their own."""
    scales_in_nccl: bool
    """NCCL scales fp32 gradients as it sums them."""
    keeps_transposes: bool

    @property
    def shards_states(self) -> bool:
        return self.sharding != "no_shard"

    @property
    def shards_gradients(self) -> bool:
        return self.sharding in ("optim_grads", "optim_grads_params")

    @property
    def shards_parameters(self) -> bool:
        return self.sharding == "optim_grads_params"


def resolve_megatron_fsdp(table: MegatronTable, ranks: int) -> MegatronFsdp | None:
    """The table's Megatron-FSDP for `ranks` data-parallel ranks of an instance, or None without it.

    Raises InputError for what Megatron refuses, and for what its code would never reduce.
    """
    if table.fsdp_sharding is None:
        return None
    _check_fsdp(table)
    keeps_parameters_full = table.fsdp_sharding in _UNSHARDED_PARAMETERS
    bucket = table.bucket_size or max(40_000_000, 1_000_000 * ranks)
    return MegatronFsdp(
        table.fsdp_sharding,
        table.fsdp_outer_sharding,
        overlaps_gradients=table.overlap_grad_reduce or not keeps_parameters_full,
        overlaps_parameters=table.overlap_param_gather or table.fsdp_sharding == "optim_grads_params",
        bucket_size=bucket if table.overlap_grad_reduce else None,
        unit_size=table.fsdp_unit_size,
        has_double_buffer=table.fsdp_double_buffer and table.fsdp_sharding == "optim_grads_params",
        has_gather_group=table.fsdp_gather_group,
        scales_in_nccl=table.gradient_reduce_div_fusion,
        keeps_transposes=table.keep_fp8_transpose_cache,
    )


def check_fsdp_layout(
    table: MegatronTable, release: tuple[int, int], pipeline: int, expert: int, connections: int
) -> None:
    """Raises InputError for layouts in which the code of Megatron-FSDP cannot run or would not reduce.

    These are pipeline or expert parallelism with it, and one hardware queue.
    """
    if table.fsdp_sharding is None:
        return
    if connections == 1:
        raise InputError(
            "training.device_max_connections: found 1, which Megatron refuses with Megatron-FSDP, whose "
            "streams would not overlap; expected 8, the default"
        )
    is_late = table.fsdp_sharding in _UNSHARDED_PARAMETERS or table.optimizer_instances > 1
    if pipeline > 1 and is_late and table.overlap_grad_reduce and table.align_grad_reduce:
        raise InputError(
            f"strategy.fsdp_sharding: found '{table.fsdp_sharding}' in {table.optimizer_instances} instances "
            f"with {pipeline} pipeline ranks, of which the later ones never see a last micro-batch and would "
            "not reduce; expected 'optim_grads' or 'optim_grads_params' in one instance, or "
            "align_grad_reduce = false"
        )
    if expert > 1 and table.optimizer_instances > 1 and release < _HYBRID_EXPERTS:
        raise InputError(
            f"strategy.optimizer_instances: found {table.optimizer_instances} with experts on {expert} "
            f"ranks, for which Megatron-FSDP of Core {table.version} has no group; expected 1, or version "
            "'0.17.0'"
        )


def _check_fsdp(table: MegatronTable) -> None:
    if table.optimizer_instances > 1 and not table.overlap_grad_reduce:
        raise InputError(
            f"strategy.optimizer_instances: found {table.optimizer_instances} without overlap_grad_reduce, "
            "with which Megatron-FSDP never sums over the instances; expected overlap_grad_reduce = true"
        )
    is_outer = table.fsdp_outer_sharding == "optim"
    if is_outer and (table.fsdp_sharding != "optim_grads_params" or table.optimizer_instances == 1):
        raise InputError(
            "strategy.fsdp_outer_sharding: found 'optim', which Megatron-FSDP has in several instances that "
            "shard parameters; expected fsdp_sharding = 'optim_grads_params' and optimizer_instances above 1"
        )
