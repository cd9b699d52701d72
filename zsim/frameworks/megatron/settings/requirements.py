"""Demands of Megatron's settings on each other and on the release.

Read in Megatron-Core 0.16.1: training/arguments.py `validate_args`, core/optimizer/optimizer_config.py,
core/distributed/fsdp and core/transformer/transformer_config.py. `SINCE` is by the commits that
`zsim.frameworks.megatron.settings.config` names.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.errors import InputError
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.strategy.requirement import SettingRequirement

_REFUSED = "which Megatron refuses"
_FSDP_ALONE = "and it belongs to Megatron-FSDP"
_OTHER_ENGINE = "and it belongs to engine 'megatron'"
_FSDP_GAP = "beside which zsim does not simulate it"

SINCE: Mapping[str, str] = {
    "distributed_optimizer": "3.0",
    "overlap_grad_reduce": "0.4.0",
    "overlap_param_gather": "0.4.0",
    "average_in_collective": "0.4.0",
    "optimizer_instances": "0.10.0",
    "precision_aware_optimizer": "0.11.0",
    "fsdp_sharding": "0.13.0",
}
"""The first release that has a setting. Releases of Core, "0.4.0" and later, follow those of Megatron-LM."""

REQUIREMENTS = (
    SettingRequirement(
        "overlap_param_gather", "overlap_grad_reduce", "without which Megatron overlaps no gathers"
    ),
    *(
        SettingRequirement(key, "engine", _OTHER_ENGINE, expected=("megatron",))
        for key in ("cuda_graph", "cuda_graph_modules", "version", "fsdp_sharding")
    ),
    SettingRequirement("cuda_graph_modules", "cuda_graph", "one graph of the whole step", expected=(False,)),
    SettingRequirement(
        "engine", "distributed_optimizer", "which has no other optimizer", values=("internevo",)
    ),
    SettingRequirement("bucket_size", "overlap_grad_reduce", "where all gradients are one bucket"),
    SettingRequirement("optimizer_instances", "distributed_optimizer", "of which they are instances"),
    *(
        SettingRequirement(key, "fsdp_sharding", _FSDP_ALONE, expected=())
        for key in (
            "fsdp_unit_size",
            "fsdp_double_buffer",
            "fsdp_gather_group",
            "keep_fp8_transpose_cache",
            "fsdp_outer_sharding",
            "gradient_reduce_div_fusion",
        )
    ),
    SettingRequirement(
        "fsdp_sharding", "distributed_optimizer", "whose step copies Megatron-FSDP's main weights back"
    ),
    SettingRequirement(
        "precision_aware_optimizer",
        "fsdp_sharding",
        "under which no gradient reaches it (`decoupled_grad` is never set)",
        expected=(None,),
    ),
    SettingRequirement(
        "fsdp_sharding",
        "overlap_grad_reduce",
        "with which Megatron-FSDP reduces nothing (`all_reduce_gradients` skips every buffer)",
        values=("no_shard",),
    ),
    SettingRequirement("cuda_graph", "fsdp_sharding", _FSDP_GAP, expected=(None,), is_simulated=False),
    *(
        SettingRequirement(key, "precision_aware_optimizer", _REFUSED)
        for key in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    SettingRequirement(
        "precision_aware_optimizer", "distributed_optimizer", "beside which alone Megatron has it"
    ),
    SettingRequirement(
        "main_grads_dtype", "grad_reduce_dtype", _REFUSED, expected=("bf16",), values=("bf16",)
    ),
    SettingRequirement("fp8_param_gather", "distributed_optimizer", "which alone gathers parameters"),
    SettingRequirement("delay_wgrad_compute", "overlap_expert_parallel", _REFUSED),
    SettingRequirement("overlap_shared_experts", "overlap_expert_parallel", _REFUSED, expected=(False,)),
    SettingRequirement(
        "overlap_expert_parallel", "fsdp_sharding", _FSDP_GAP, expected=(None,), is_simulated=False
    ),
)


def check_release(table: MegatronTable, order: tuple[bool, tuple[int, int]]) -> None:
    """Raises InputError for the first setting that the release lacks, whose `order` is whether it is one of
    Core, and its number.
    """
    for key, version in SINCE.items():
        is_set = getattr(table, key) != MegatronTable.model_fields[key].default
        if is_set and order < release_order(version):
            raise InputError(
                f"strategy.{key}: Megatron {table.version} does not have it; expected a strategy.version "
                f"from '{version}' on"
            )


def release_order(version: str) -> tuple[bool, tuple[int, int]]:
    """The place of a release among all: those of Megatron-LM, then those of Core."""
    major, minor = (int(number) for number in version.split(".")[:2])
    return major == 0, (major, minor)
