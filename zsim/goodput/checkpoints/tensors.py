"""The tensors of a job's ranks between steps, by the names under which they are saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import prod

from zsim.arrays import Ints
from zsim.dataclass import dataclass
from zsim.plan.make import stages_of
from zsim.plan.pipeline.lowering import ranks_of
from zsim.specs.experiment.job import Job
from zsim.specs.model.spec import Linear, ModelSpec
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
class HeldTensor:
    """A parameter as a rank of a tensor-parallel group has it."""

    name: str
    shape: tuple[int, ...]
    is_cut: bool = False
    """Each rank has another part of it. Otherwise all have the same."""
    is_trainable: bool = True
    tied_to: str | None = None
    """The parameter of which it is another name."""
    is_spread: bool = False
    """It belongs to expert-parallel experts, of which a rank has those along the first dimension."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Length of the first dimension, along which FSDP cuts it."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True)
class HeldStates:
    """All states that are saved."""

    optimizer: str
    tensors: tuple[tuple[HeldTensor, ...], ...]
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
    def expert_places(self) -> int:
        """Ranks that each have other routed experts, or another part of them. 1 where none are
        expert-parallel.
        """
        return len(self.expert_ranks[0]) if self.expert_ranks else 1

    @property
    def expert_data_ranks(self) -> int:
        """Ranks that hold the same routed experts."""
        return len(self.expert_ranks[0][0]) if self.expert_ranks else self.data_ranks

    def places_of(self, tensor: HeldTensor) -> int:
        """Ranks that each hold another part of the full tensor, before data parallelism shards it."""
        if tensor.is_spread:
            return self.expert_places
        return self.tensor_ranks if tensor.is_cut else 1

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
        return max(sum(1 for _ in own(stage)) for stage in self.tensors)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each pipeline rank, tied ones once."""
        return tuple(sum(one.numel for one in own(stage)) for stage in self.tensors)


def own(tensors: tuple[HeldTensor, ...]) -> Iterator[HeldTensor]:
    """The tensors without second names of tied ones."""
    return (tensor for tensor in tensors if tensor.tied_to is None)


def trained(tensors: tuple[HeldTensor, ...]) -> Iterator[HeldTensor]:
    """The tensors that have optimizer states."""
    return (tensor for tensor in own(tensors) if tensor.is_trainable)


def held_states(job: Job) -> HeldStates:
    """The states of a job. Raises what `stages_of` raises."""
    parallelism, mesh = job.parallelism, job.mesh
    models = stages_of(job.model, parallelism)
    experts = replace(parallelism.experts, tensor=1)
    alone = replace(parallelism, tensor=1, sequence_parallel=False, async_tensor=False, experts=experts)
    whole = dict(one for model in stages_of(job.model, alone) for one in model.named_parameters())
    micro_batches = job.training.gradient_accumulation_steps // parallelism.passes
    places = ranks_of(
        parallelism.schedule, parallelism.pipeline, parallelism.virtual_stages, micro_batches,
        parallelism.schedule_text,
    )  # fmt: skip
    tensors: list[tuple[HeldTensor, ...]] = [() for _ in range(parallelism.pipeline)]
    for model, place in zip(models, places, strict=True):
        found = []
        for name, parameter in model.named_parameters():
            is_cut = parallelism.tensor > 1 and (name not in whole or whole[name].shape != parameter.shape)
            is_spread = parameter.belongs_to == EXPERT_DATA
            found.append(
                HeldTensor(
                    name, parameter.shape, is_cut and not is_spread, parameter.trainable, is_spread=is_spread
                )
            )
        tensors[place] += (*found, *_tied(model, found))
    rows = mesh.groups(DATA, CONTEXT)
    pipeline, tensor = mesh.coordinate(PIPELINE)[rows[:, 0]], mesh.coordinate(TENSOR)[rows[:, 0]]
    ranks = tuple(
        tuple(rows[(pipeline == p) & (tensor == t)][0] for t in range(parallelism.tensor))
        for p in range(parallelism.pipeline)
    )
    return HeldStates(job.training.optimizer, tuple(tensors), ranks, _expert_ranks(job))


def _expert_ranks(job: Job) -> tuple[tuple[Ints, ...], ...]:
    """`ModelStates.expert_ranks`."""
    if job.parallelism.experts.ranks == 1:
        return ()
    mesh = job.parallelism.expert_mesh(job.world_size)
    rows, stage = mesh.groups(EXPERT_DATA), mesh.coordinate(PIPELINE)
    return tuple(tuple(rows[stage[rows[:, 0]] == place]) for place in range(job.parallelism.pipeline))


def _tied(model: ModelSpec, found: list[HeldTensor]) -> Iterator[HeldTensor]:
    """The LM head that is the embedding by another name, where both are in this part of the model."""
    if not model.is_tied or not model.before:
        return
    for module in model.after:
        if isinstance(module.work, Linear) and not module.parameters:
            yield replace(found[0], name=f"{module.name}.weight", tied_to=found[0].name)
