"""Moments of a job that are not its steady step, and what they need: the first step, evaluation, saving,
resuming, loading weights.

A framework's own moments are in its folder, and those that all frameworks have are here. Moments that no
source says enough about are left out (docs/report.md names them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zsim.arrays import Ints
from zsim.cost.memory import stored_bytes
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.columns import memory_columns, op_columns
from zsim.plan.memory.capacity import framework_memory, resident_bytes
from zsim.plan.memory.tensors import fullest_program
from zsim.plan.ops import Plan, Program
from zsim.specs.experiment.job import Job

UPDATE_PHASE = "optimizer"
_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1}  # torch 2.13 optim/


@dataclass(frozen=True, slots=True)
class JobMoment:
    """A moment of a job and the most that it needs."""

    name: str
    gpu_bytes: int | None
    """Bytes of the fullest GPU. None where they are no more than between steps."""
    host_bytes: int | None
    """Bytes of the fullest node. None where they are no more than between steps."""
    cause: str
    source: str
    is_certain: bool
    """The settings of the job lead through the moment. Otherwise it comes only if the script does what
    `cause` says.
    """


@dataclass(frozen=True)
class BetweenSteps:
    """The bytes that the fullest rank and node of a job hold between steps."""

    job: Job
    plan: Plan

    @cached_property
    def program(self) -> Program:
        return fullest_program(self.plan)

    @cached_property
    def context_bytes(self) -> int:
        """The CUDA context and the buffers of communicators."""
        programs = enumerate(self.plan.programs)
        number = next(number for number, program in programs if program is self.program)
        return framework_memory(self.job, self.plan, number).bytes

    def gpu_bytes_of(self, *categories: str) -> int:
        """Resident bytes of these categories (default: all) on the GPU."""
        return sum(
            memory.bytes
            for memory in self.program.resident
            if memory.device == "gpu" and (not categories or memory.category in categories)
        )

    @cached_property
    def gpu_bytes(self) -> int:
        """All that the GPU holds, the context too."""
        return self.context_bytes + self.gpu_bytes_of()

    @cached_property
    def host_bytes(self) -> int:
        """All that ranks hold of a node's memory."""
        return resident_bytes(self.job, self.plan, "host")

    @cached_property
    def lazy_bytes(self) -> int:
        """States on the GPU that the first update makes."""
        return sum(sum(memory.lazy_tensors) for memory in self.program.resident if memory.device == "gpu")

    @property
    def local_ranks(self) -> int:
        """Ranks of a node."""
        return self.job.gpus_per_node

    @property
    def num_states(self) -> int | None:
        """Optimizer states of the size of a parameter that are saved. None for an optimizer whose states are
        not known.
        """
        return _STATES.get(self.job.training.optimizer)

    @cached_property
    def weight_bytes(self) -> int:
        """All parameters, each in the type that it is kept in."""
        return self._bytes_of(only_trained=False)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """The weights and states of a checkpoint: of adapters themselves alone (peft `save_pretrained`), and
        states of what is trained. Needs `num_states`.
        """
        assert self.num_states is not None
        has_adapters = self.job.experiment.training.lora is not None
        weights = self._bytes_of(only_trained=has_adapters)
        return weights + self.num_states * self._bytes_of(only_trained=True)

    def _bytes_of(self, *, only_trained: bool) -> int:
        dtype = self.job.training.stored_dtype
        return sum(
            stored_bytes(parameter, dtype)
            for _, parameter in self.job.model.named_parameters()
            if parameter.trainable or not only_trained
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of one parameter as the rank's model has it before a framework shards it."""
        return DTYPE_BYTES[self.job.training.stored_dtype]


LOADING, BUILDING = "loading weights", "building the optimizer"
FIRST_FORWARD, FIRST_UPDATE = "first forward and backward", "first update"
EVALUATION, SAVING, GATHERED_SAVE = "evaluation", "saving", "saving whole weights"
UNOFFLOADED_SAVE, RESUMING = "saving whole weights on the GPU", "resuming"
ORDER = (
    LOADING, RESUMING, BUILDING, FIRST_FORWARD, FIRST_UPDATE, EVALUATION, SAVING, GATHERED_SAVE,
    UNOFFLOADED_SAVE,
)  # fmt: skip


def first_step(between_steps: BetweenSteps) -> Iterator[JobMoment]:
    """The first step of an optimizer that makes its states in its first update (torch.optim's `_init_group`).
    Until then the GPU holds less. In the update it holds as much as in every later one.
    """
    if not between_steps.lazy_bytes:
        return
    peak, update_peak = between_steps.program.memoize(phase_peaks)
    source = "torch 2.13 optim/adamw.py `_init_group`"
    yield JobMoment(
        FIRST_FORWARD, between_steps.context_bytes + peak - between_steps.lazy_bytes, None,
        "the optimizer's states are made in the first update", source, True,
    )  # fmt: skip
    yield JobMoment(
        FIRST_UPDATE, between_steps.context_bytes + update_peak, None,
        "makes the optimizer's states tensor by tensor while the gradients are held", source, True,
    )  # fmt: skip


def phase_peaks(program: Program) -> tuple[int, int]:
    """(maximum GPU bytes of a rank in forward and backward, the same in the update), with the states held all
    the time.
    """
    levels, phases = _levels(program)
    is_update = phases == UPDATE_PHASE
    start = _resident(program)
    return max(start, int(levels[~is_update].max(initial=0))), max(
        start, int(levels[is_update].max(initial=0))
    )


def forward_peak(program: Program) -> int:
    """Maximum GPU bytes of a rank in forward without activations, as in a forward without gradients."""
    levels, phases = _levels(program, excluded_category="activations")
    return max(_resident(program), int(levels[phases == "forward"].max(initial=0)))


def _resident(program: Program) -> int:
    return sum(memory.bytes for memory in program.resident if memory.device == "gpu")


def _levels(program: Program, excluded_category: str = "") -> tuple[Ints, NDArray[np.str_]]:
    """GPU bytes of a rank after each change of them, and the phase of each. Changes of `excluded_category` do
    not count.
    """
    columns, phases = program.memoize(memory_columns), program.memoize(op_columns).phase
    counts = np.array([
        device == "gpu" and category != excluded_category
        for device, category in zip(columns.device, columns.category, strict=True)
    ], dtype=bool)  # fmt: skip
    ops = np.minimum(np.array(columns.op, dtype=np.int64), len(phases) - 1)[counts]
    changes = np.array(columns.bytes, dtype=np.int64)[counts]
    return _resident(program) + np.cumsum(changes), np.array(phases)[ops]


def loading(between_steps: BetweenSteps, cause: str, source: str, copies: int) -> JobMoment:
    """The moment at which `copies` ranks of a node read all weights into host memory, each in its model's
    type.
    """
    model_bytes = between_steps.job.model.numel * between_steps.stored_bytes
    return JobMoment(LOADING, None, copies * model_bytes, cause, source, False)
