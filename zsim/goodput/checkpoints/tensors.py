"""The tensors of a job's ranks between steps, by the names under which they are saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from zsim.arrays import Ints
from zsim.operations.operation import Role
from zsim.plan.make import stages_of
from zsim.plan.pipeline.lowering import ranks_of
from zsim.specs.experiment.job import Job
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.mesh import CONTEXT, DATA, EXPERT_DATA, PIPELINE, TENSOR

# torch 2.13 optim/adamw.py, adam.py, sgd.py: states per parameter, and keys of a parameter group.
STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "sgd_momentum": ("momentum_buffer",),
}
GROUP_KEYS = {"adamw": 12, "adam": 12, "sgd": 10, "sgd_momentum": 10}
STEP_BYTES = 4  # of Adam's step counter, a tensor of its own per parameter


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A parameter as a rank of a tensor-parallel group has it."""

    name: str
    shape: tuple[int, ...]
    is_tensor_parallel: bool = False
    """Each rank has another part of it. Otherwise all have the same."""
    is_trainable: bool = True
    tied_to: str | None = None
    """The parameter of which it is another name."""
    is_expert_parallel: bool = False
    """It belongs to expert-parallel experts, of which a rank has those along the first dimension."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Length of the first dimension, along which FSDP cuts it."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True)
class ModelStates:
    """All states that are saved."""

    optimizer: str
    tensors: tuple[tuple[StateTensor, ...], ...]
    """`tensors[p]` are the parameters of pipeline rank p, in the order of `state_dict()`."""
    ranks: tuple[tuple[Ints, ...], ...]
    """`ranks[p][t]` are the data-parallel ranks that hold them as rank t of the tensor-parallel group."""
    expert_ranks: tuple[tuple[Ints, ...], ...] = ()
    """`expert_ranks[p][e]` are the ranks that hold shard e of the routed experts, where experts are
    expert-parallel.
    """

    @property
    def data_ranks(self) -> int:
        return len(self.ranks[0][0])

    @property
    def tensor_ranks(self) -> int:
        return len(self.ranks[0])

    @property
    def expert_shards(self) -> int:
        """Ranks that each have other routed experts, or another part of them. 1 where none are
        expert-parallel.
        """
        return len(self.expert_ranks[0]) if self.expert_ranks else 1

    @property
    def expert_data_ranks(self) -> int:
        """Ranks that hold the same routed experts."""
        return len(self.expert_ranks[0][0]) if self.expert_ranks else self.data_ranks

    def model_shards_of(self, tensor: StateTensor) -> int:
        """Ranks that each hold another part of the full tensor, before data parallelism shards it."""
        if tensor.is_expert_parallel:
            return self.expert_shards
        return self.tensor_ranks if tensor.is_tensor_parallel else 1

    @property
    def world_size(self) -> int:
        return len(self.ranks) * self.tensor_ranks * self.data_ranks

    @property
    def num_states(self) -> int:
        """States of the optimizer per parameter."""
        return len(STATES[self.optimizer])

    @property
    def has_steps(self) -> bool:
        return self.optimizer.startswith("adam")

    @property
    def num_parameters(self) -> int:
        """Parameters of the pipeline rank that has most of them."""
        return max(sum(1 for _ in untied_tensors(stage)) for stage in self.tensors)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each pipeline rank, tied ones once."""
        return tuple(sum(tensor.numel for tensor in untied_tensors(stage)) for stage in self.tensors)


def untied_tensors(tensors: tuple[StateTensor, ...]) -> Iterator[StateTensor]:
    """The tensors without second names of tied ones."""
    return (tensor for tensor in tensors if tensor.tied_to is None)


def trainable_tensors(tensors: tuple[StateTensor, ...]) -> Iterator[StateTensor]:
    """The tensors that have optimizer states."""
    return (tensor for tensor in untied_tensors(tensors) if tensor.is_trainable)


def collect_model_states(job: Job) -> ModelStates:
    """The states of a job. Raises what `stages_of` raises."""
    parallelism, mesh = job.parallelism, job.mesh
    models = stages_of(job.model, parallelism)
    experts = replace(parallelism.experts, tensor=1)
    unsharded_parallelism = replace(
        parallelism, tensor=1, sequence_parallel=False, async_tensor=False, experts=experts
    )
    full_parameters = dict(
        named_parameter
        for model in stages_of(job.model, unsharded_parallelism)
        for named_parameter in model.named_parameters()
    )
    micro_batches = job.training.gradient_accumulation_steps // parallelism.passes
    pipeline_ranks = ranks_of(parallelism, micro_batches)
    tensors: list[tuple[StateTensor, ...]] = [() for _ in range(parallelism.pipeline)]
    for model, pipeline_rank in zip(models, pipeline_ranks, strict=True):
        stage_tensors = []
        for name, parameter in model.named_parameters():
            is_tensor_parallel = parallelism.tensor > 1 and (
                name not in full_parameters or full_parameters[name].shape != parameter.shape
            )
            is_expert_parallel = parameter.rank_kind == EXPERT_DATA
            stage_tensors.append(
                StateTensor(
                    name,
                    parameter.shape,
                    is_tensor_parallel and not is_expert_parallel,
                    parameter.trainable,
                    is_expert_parallel=is_expert_parallel,
                )
            )
        tensors[pipeline_rank] += (*stage_tensors, *_tied_head(model, stage_tensors))
    data_groups = mesh.groups(DATA, CONTEXT)
    pipeline, tensor = (
        mesh.coordinate(PIPELINE)[data_groups[:, 0]],
        mesh.coordinate(TENSOR)[data_groups[:, 0]],
    )
    ranks = tuple(
        tuple(data_groups[(pipeline == p) & (tensor == t)][0] for t in range(parallelism.tensor))
        for p in range(parallelism.pipeline)
    )
    return ModelStates(job.training.optimizer, tuple(tensors), ranks, _expert_ranks(job))


def _expert_ranks(job: Job) -> tuple[tuple[Ints, ...], ...]:
    """`ModelStates.expert_ranks`."""
    if job.parallelism.experts.ranks == 1:
        return ()
    mesh = job.parallelism.expert_mesh(job.world_size)
    groups, stage = mesh.groups(EXPERT_DATA), mesh.coordinate(PIPELINE)
    return tuple(
        tuple(groups[stage[groups[:, 0]] == pipeline_rank])
        for pipeline_rank in range(job.parallelism.pipeline)
    )


def _tied_head(model: ModelSpec, tensors: list[StateTensor]) -> Iterator[StateTensor]:
    """The LM head that is the embedding by another name, where both are in this part of the model."""
    if not model.is_tied or not model.before:
        return
    for module in model.after:
        if module.role is Role.PRODUCT and not module.parameters:
            yield replace(tensors[0], name=f"{module.name}.weight", tied_to=tensors[0].name)
