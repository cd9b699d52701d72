"""The groups of parameters that DeepSpeed's optimizers keep separate: those that all data-parallel ranks
have, and routed experts, which fewer ranks have.

DeepSpeed 0.19.8 `moe/utils.py`, `split_params_into_different_moe_groups_for_optimizer`: experts are cut into
groups of at most 178,956,971 elements. Muon's matrices are a group before all others, which FusedAdam updates
(`runtime/engine.py` `_muon_param_groups`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zsim.errors import NotSimulatedError
from zsim.frameworks.deepspeed.muon_kernels import uses_muon
from zsim.plan.ops import Group
from zsim.plan.stage import Stage
from zsim.specs.model.spec import Parameter

_MAX_GROUP_NUMEL = 178_956_971


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """Parameters (name -> elements, in the order of registration) that the ranks of `group` share."""

    numels: Mapping[str, int]
    group: Group
    has_experts: bool = False
    has_matrices: bool = False  # Muon's

    @property
    def numel(self) -> int:
        return sum(self.numels.values())


def optimizer_groups(
    stage: Stage, group: Group, named: Iterable[tuple[str, Parameter]]
) -> list[OptimizerGroup]:
    """The groups of the trained ones among `named`, those of all ranks (`group`) first.

    Raises NotSimulatedError for Muon on routed experts that other ranks have, and where a stage of a
    pipeline has no matrices: its norms are one sum less, for which the others would wait without end.
    """
    dense: dict[str, int] = {}
    matrices: dict[str, int] = {}
    experts: list[dict[str, int]] = []
    is_muon = stage.training.optimizer == "muon"
    layers = stage.parallelism.layers_per_stage
    if is_muon and 0 in layers:
        raise NotSimulatedError(
            f"training.optimizer: 'muon' of DeepSpeed with stages of {', '.join(map(str, layers))} layers: a "
            "stage without layers has no matrices and takes one norm less than the others, which wait for it "
            f"(`get_grad_norm_direct`); expected parallelism.pipeline below {len(layers)}, or 'adamw'"
        )
    for name, parameter in named:
        if not parameter.trainable:
            continue
        if is_muon and parameter.rank_kind:
            raise NotSimulatedError(
                "training.optimizer: 'muon' of DeepSpeed is not simulated with experts that other ranks "
                "have; expected parallelism.expert = 1, or 'adamw'"
            )
        if is_muon and uses_muon(name, parameter.shape):
            matrices[name] = parameter.numel
        elif not parameter.rank_kind:
            dense[name] = parameter.numel
        elif experts and sum(experts[-1].values()) + parameter.numel <= _MAX_GROUP_NUMEL:
            experts[-1][name] = parameter.numel
        else:
            experts.append({name: parameter.numel})
    groups = [OptimizerGroup(matrices, group, has_matrices=True)] if matrices else []
    groups += [OptimizerGroup(dense, group)] if dense or not (experts or matrices) else []
    if experts:
        expert_group = stage.expert_group()
        groups += [OptimizerGroup(numels, expert_group, has_experts=True) for numels in experts]
    return groups
