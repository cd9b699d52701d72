"""Megatron-Core's own Muon: the options of each release, and the owners of the states.

Read from NVIDIA/Megatron-LM, core/optimizer/muon.py and layer_wise_optimizer.py of 0.16.1 and 0.17.1,
emerging_optimizers.py and layer_wise_optimizer.py of 0.18.2 and 0.19.0, training/arguments.py of each.

# [Note: three ways]
With `muon` every rank has all states. With `dist_muon`, the layer-wise optimizer of 0.16 and 0.17, whole
tensors, Adam's included, belong to data-parallel ranks, in turn by size. Gradients are all-reduced, and the
owners' weights gathered. From 0.18 on (`--optimizer muon --use-distributed-optimizer`) matrices are laid out
in buckets so that none is cut between ranks. All else is the distributed optimizer's: gradients are
reduce-scattered and weights gathered, as without Muon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.strategy.training import TrainingConfig

Owners = Literal["all", "in turn", "laid out"]
TensorMode = Literal["blockwise", "duplicated", "distributed"]
_FIRST, _OVERLAPS, _LAYS_OUT = (0, 16), (0, 17), (0, 18)
_QUINTIC = 5  # sets of coefficients; Emerging-Optimizers 0.1 takes multiples of them
MUON_KEYS = (
    "layer_wise_optimizer", "muon_tp_mode", "muon_split_qkv", "muon_num_ns_steps", "muon_fp32_matmul_prec",
    "muon_nesterov", "muon_scalar_optimizer",
)  # fmt: skip
_WHERE = "training.optimizer: 'muon'"


@dataclass(frozen=True, slots=True)
class MuonOrthogonalization:
    """The orthogonalization of a matrix."""

    mode: TensorMode = "blockwise"
    """The way in which tensor-parallel ranks treat a matrix that is cut."""
    steps: int = 5
    """Rounds of Newton-Schulz."""
    dtype: str = "bf16"
    """The type of the products, "bf16" or "tf32"."""
    nesterov: bool = False


@dataclass(frozen=True, slots=True)
class MegatronMuon:
    """Megatron-Core's own Muon, resolved."""

    owners: Owners
    """The ranks that have the states. See [Note: three ways]."""
    orthogonalization: MuonOrthogonalization
    splits_qkv: bool
    """Fused queries, keys and values are three matrices."""
    scalar_optimizer: str
    """The optimizer of what is no matrix, "adam" or "lion"."""


def resolve_megatron_muon(
    table: MegatronTable, release: tuple[int, int], training: TrainingConfig
) -> MegatronMuon:
    """Muon as the table asks for it.

    Raises InputError for what the release refuses, and NotSimulatedError for what zsim lacks.
    """
    _check_muon(table, release)
    if training.precision == "fp16":
        raise InputError(f"{_WHERE}: Megatron-Core refuses it with fp16; expected training.precision 'bf16'")
    is_layer_wise = table.layer_wise_optimizer or table.distributed_optimizer
    owners: Owners = "laid out" if release >= _LAYS_OUT else "in turn"
    dtype = "bf16" if table.muon_fp32_matmul_prec == "medium" else "tf32"
    orthogonalization = MuonOrthogonalization(
        table.muon_tp_mode, table.muon_num_ns_steps, dtype, table.muon_nesterov
    )
    return MegatronMuon(
        owners if is_layer_wise else "all",
        orthogonalization,
        table.muon_split_qkv,
        table.muon_scalar_optimizer,
    )


def refuse_muon_keys(table: MegatronTable) -> None:
    """Raises InputError for keys of Muon without it."""
    for key in MUON_KEYS:
        if getattr(table, key) != MegatronTable.model_fields[key].default:
            raise InputError(f"strategy.{key}: belongs to training.optimizer 'muon', which is not asked for")


def _check_muon(table: MegatronTable, release: tuple[int, int]) -> None:
    version = table.version
    if release[0] != 0 or release < _FIRST:
        raise InputError(
            f"{_WHERE}: Megatron-Core has 'muon' from 0.16 on; found strategy.version '{version}'; expected "
            "a newer one, or one of adamw, adam, sgd, sgd_momentum"
        )
    if table.distributed_optimizer and release < _LAYS_OUT:
        raise InputError(
            f"{_WHERE}: Megatron-Core {version} refuses 'muon' with the distributed optimizer ('muon with "
            "dist optimizer is not supported'); expected strategy.layer_wise_optimizer = true, its "
            "dist_muon, or a release from 0.18 on"
        )
    is_plain = not (table.layer_wise_optimizer or table.distributed_optimizer)
    refuses_overlap = release < _OVERLAPS or (release < _LAYS_OUT and is_plain)
    for key in ("overlap_grad_reduce", "overlap_param_gather"):
        if getattr(table, key) and refuses_overlap:
            alternative = "" if release < _OVERLAPS else ", strategy.layer_wise_optimizer = true"
            raise InputError(
                f"strategy.{key}: Megatron-Core {version} refuses it with 'muon'; expected "
                f"false{alternative}, or a newer strategy.version"
            )
    if table.fsdp_sharding is not None:
        raise InputError(
            f"{_WHERE}: Megatron refuses it with Megatron-FSDP; expected strategy.fsdp_sharding left out"
        )
    if table.muon_scalar_optimizer == "lion" and release < _OVERLAPS:
        raise InputError(
            f"strategy.muon_scalar_optimizer: found 'lion', which Megatron-Core has from 0.17 on; found "
            f"strategy.version '{version}'"
        )
    if table.muon_num_ns_steps % _QUINTIC and release < _OVERLAPS:
        raise InputError(
            f"strategy.muon_num_ns_steps: found {table.muon_num_ns_steps}; Emerging-Optimizers 0.1, which "
            f"Megatron-Core {version} runs, takes multiples of its {_QUINTIC} coefficients"
        )
    if table.optimizer_instances > 1:
        raise InputError(
            "strategy.optimizer_instances: the layer-wise optimizer has no instances; expected 1 with 'muon'"
        )
    if table.precision_aware_optimizer or table.fp8_param_gather:
        key = "precision_aware_optimizer" if table.precision_aware_optimizer else "fp8_param_gather"
        raise NotSimulatedError(f"strategy.{key}: not simulated beside 'muon'; expected false")
