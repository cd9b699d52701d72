"""The content of a save: the tensors by name, the files, and the bytes each rank copies, writes and reads.

A framework says which files it writes, and how its ranks recover.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.errors import InputError, NotSimulatedError
from zsim.operations.operation import Role
from zsim.plan.make import stages_of
from zsim.plan.pipeline.lowering import ranks_of
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.run.checkpoint import CheckpointTable
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import CONTEXT, DATA, EXPERT_DATA, PIPELINE, TENSOR
from zsim.specs.strategy.registry import role_of
from zsim.specs.strategy.table import StrategyConfig


class SavedFile(NamedTuple):
    """A file, or several of one size."""

    name: str
    rank: int
    parameters: int = 0
    optimizer_states: int = 0
    overhead: int = 0
    """Bytes that are no tensor's: pickles, archives' headers, padding of records."""
    copies: int = 1
    """The number of files of that size (`*` in the name)."""

    @property
    def tensors(self) -> int:
        """Bytes of tensors."""
        return self.parameters + self.optimizer_states

    @property
    def bytes(self) -> int:
        return self.tensors + self.overhead

    @property
    def is_metadata(self) -> bool:
        """Whether it is a planner's list of who wrote what."""
        return self.name.endswith(".metadata")


@dataclass(frozen=True)
class SavedFiles:
    """All files of one save, and what planning, writing and loading them involves."""

    format: str
    files: tuple[SavedFile, ...]
    staged: Ints
    """Bytes of states per rank, which an asynchronous save copies to the host first."""
    read: Ints
    """Bytes that each rank reads to load."""
    items: int = 0
    """Tensors and values that the planner on rank 0 gets from all ranks."""
    chunks: int = 0
    """Items that are left without copies."""
    gathered: tuple[int, ...] = ()
    """Bytes of every tensor that ranks gather before one of them writes."""
    read_once: bool = False
    """Rank 0 reads and broadcasts."""
    states: int = 0
    """Parameters whose states a rank finds and saves, the fullest rank's."""
    is_synced: bool = False
    """Files are forced to the store (fsync) before the commit."""
    read_items: int = 0
    """Items that the planner gets for a load (0: no planner)."""
    checked_items: int = 0
    """Items that every rank gets from all others and checks, in a save and in a load."""
    is_answered: bool = True
    """The planner sends plans back."""
    has_local_plan: bool = True
    """A copy on the node or in a peer's memory is planned and committed as a save to the store is. Without it
    a rank keeps what it would write, and gets the other states from its peers to load.
    """
    copied: Ints | None = None
    """Bytes per rank of files on the node's drives that are copied as they are, and copied back to load. None
    if there are none.
    """
    converted: tuple[SavedFile, ...] = ()
    """Files that one machine makes of the save before it is loaded. `read` is of these then."""
    conversion_workers: tuple[int, ...] = ()
    """The number of processes of each pass of that conversion."""
    is_copied_ahead: bool = False
    """A rank that training waits for copies tensors to the host while it writes earlier ones."""
    is_staged_by_item: bool = False
    """Every item is found and copied separately when an asynchronous save is staged."""
    is_committed_before_update: bool = False
    """An asynchronous save ends before the next update, which waits for it."""
    is_planned_at_once: bool = False
    """The training process plans and commits an asynchronous save before it goes on."""
    on_host: Ints | None = None
    """Bytes of `staged` that are states in host memory (offloaded ones). None if there are none."""

    @property
    def host_fractions(self) -> Floats:
        """The fraction of each rank's states that lives in host memory."""
        if self.on_host is None:
            return np.zeros(len(self.staged))
        return self.on_host / np.maximum(self.staged, 1)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def written_bytes(self) -> Ints:
        """Bytes per rank."""
        return self._sum_per_rank([file.bytes for file in self.files])

    def archived_bytes(self) -> Ints:
        """Bytes per rank that are made from tensors, not copied."""
        return self.written_bytes() if self.copied is None else self.written_bytes() - self.copied

    def metadata_bytes(self) -> Ints:
        """Bytes per rank of `.metadata`, which is no archive."""
        return self._sum_per_rank([file.bytes if file.is_metadata else 0 for file in self.files])

    def unarchived_bytes(self) -> Ints:
        """Bytes per rank that are read into tensors."""
        return self.read if self.copied is None else self.read - self.copied

    def num_files(self) -> Ints:
        """Files per rank."""
        return self._sum_per_rank([file.copies for file in self.files])

    def _sum_per_rank(self, amounts: list[int]) -> Ints:
        sums = np.zeros(len(self.staged), dtype=np.int64)
        np.add.at(sums, [file.rank for file in self.files], amounts)
        return sums


# -- Files that torch.save writes: the archive of one tensor to the byte, those of dictionaries about ------


# Of an archive of one tensor: what comes before the tensor's record, whose offset is a multiple of 64.
_TENSOR_OFFSET, _ALIGNMENT = 704, 64
_HEADER, _DESCRIPTOR, _DIRECTORY_ENTRY = 30, 16, 46
_ENDS = 56 + 20 + 22  # zip64 end record, its locator, end record
_EXTRA = 4  # of the padding's own header
_NAMES = ("data.pkl", ".format_version", ".storage_alignment", "byteorder", "data/0", "version",
          ".data/serialization_id")  # fmt: skip
_PREFIX = len("archive/")
_VERSION_BYTES, _SERIALIZATION_ID_BYTES = 2, 40
VALUE_BYTES = 1261  # an archive of a number, a truth value or None: the same records without a tensor's
# Pickle (name, storage, shape), the record's header, padding to 64 bytes and directory entry of a tensor; of
# one that shares its storage with others; and the rest of a file: recorded (traces/checkpoints/files.json),
# for names of some 40 letters.
_PER_TENSOR, _PER_VIEW, _PER_FILE = 300, 284, 1100


def archive_bytes(tensor_bytes: int) -> int:
    """Bytes of a torch.save archive of one tensor of `tensor_bytes`, below 4 GiB.

    A zip file without compression in which every record starts at a multiple of 64 bytes: torch 2.13
    caffe2/serialize/inline_container.cc (`PyTorchStreamWriter::writeRecord`, `getPadding`), whose pickle of
    any tensor fits before byte 256. Larger tensors take some 30 bytes more.
    """
    end = _TENSOR_OFFSET + (tensor_bytes + _DESCRIPTOR if tensor_bytes else 0)
    for name, size in (("version", _VERSION_BYTES), (".data/serialization_id", _SERIALIZATION_ID_BYTES)):
        start = end + _HEADER + _PREFIX + len(name) + _EXTRA
        end = -(-start // _ALIGNMENT) * _ALIGNMENT + size + _DESCRIPTOR
    return end + sum(_DIRECTORY_ENTRY + _PREFIX + len(name) for name in _NAMES) + _ENDS


class PickledFile:
    """Bytes of parameters and optimizer states in a file of `rank`. Its overhead is an estimate, on top of
    `base`.
    """

    def __init__(self, name: str, rank: int, base: int = _PER_FILE) -> None:
        self.name, self.rank = name, rank
        self.parameters = self.states = 0
        self._overhead = base

    def add_parameter(self, size: int, tensors: int = 1) -> None:
        """Add one buffer of `size` bytes that so many tensors are views of."""
        self.parameters += size
        self._overhead += _PER_TENSOR if tensors == 1 else _PER_VIEW * tensors

    def add_states(self, sizes: Iterable[int]) -> None:
        """Add tensors of the optimizer's."""
        for size in sizes:
            self.states += size
            self._overhead += _PER_TENSOR

    @property
    def tensors(self) -> int:
        return self.parameters + self.states

    def build(self) -> SavedFile:
        return SavedFile(self.name, self.rank, self.parameters, self.states, self._overhead)


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


STATE_MEASURED = "expected run.checkpoint.bytes, blocking and load as measured, or run.checkpoint.mode 'none'"
"""What a run says instead of files that are not known."""

Config = TypeVar("Config", bound=StrategyConfig)


class FrameworkCheckpoint(Generic[Config]):
    """The saves of a framework, and the recovery of its ranks.

    `CHECKPOINT` in the module `checkpoint` of the framework's folder. The answers here are those of a
    framework without anything special.
    """

    formats: tuple[str, ...] = ()
    """The formats that it writes, its usual one first."""
    saves_16bit_models = False
    """Whether it can gather the parameters into one more file."""
    has_local_replicas = False
    """Whether replicas that train separately (`[run.local]`) are simulated."""
    has_fixed_states = False
    """Whether it saves the same states with every optimizer."""

    def files(self, job: Job, config: Config, states: ModelStates, table: CheckpointTable) -> SavedFiles:
        """The files of a save in the `table.format` that it has. Raises NotSimulatedError for those that are
        not known.
        """
        raise NotImplementedError

    def looks_for_cycles(self, config: Config) -> bool:
        """Whether Python looks for cycles of objects while the training process plans a save."""
        return True

    def check_elastic_load(self, config: Config, format: str | None) -> None:
        """Raise InputError where other ranks than those that saved cannot load."""

    def num_replicas(self, job: Job, config: Config) -> int:
        """Groups of ranks that hold all states each, of which one may be away while the others train."""
        return 1

    def num_shards(self, job: Job, config: Config, states: ModelStates) -> int:
        """Ranks over which every tensor is cut, of a framework with `has_local_replicas`."""
        raise NotImplementedError


def framework_checkpoint(kind: str) -> FrameworkCheckpoint[Any]:
    """The saves of the framework of a kind."""
    return cast(FrameworkCheckpoint[Any], role_of(kind, "checkpoint", "CHECKPOINT"))


# -- The files of a job's checkpoints, in the formats of its framework -------------------------------------


def format_of(job: Job, requested: str | None = None) -> str:
    """The requested format, or the framework's default. Raises InputError for one that the framework cannot
    write.
    """
    formats = framework_checkpoint(job.kind).formats
    if requested is None:
        return formats[0]
    if requested not in formats:
        raise InputError(
            f"run.checkpoint.format: found '{requested}', which strategy '{job.kind}' does not write; "
            f"expected {' or '.join(repr(name) for name in formats)}"
        )
    return requested


def saved_files(job: Job, table: CheckpointTable | None = None) -> SavedFiles:
    """The files of a save of the job, by default as `[run.checkpoint]` is without keys.

    Raises InputError for a format or a key that the framework lacks, NotSimulatedError for files that are not
    known.
    """
    framework = framework_checkpoint(job.kind)
    if job.training.optimizer not in STATES and not framework.has_fixed_states:
        raise NotSimulatedError(
            f"run.checkpoint: what is saved of '{job.training.optimizer}' is not known, only of "
            f"{', '.join(STATES)}; {STATE_MEASURED}"
        )
    table = table or CheckpointTable()
    kind = format_of(job, table.format)
    if table.threads > 1 and kind != "dcp":
        raise InputError(
            f"run.checkpoint.threads: found {table.threads} with format '{kind}', whose ranks write with one "
            "thread each; expected 1, or format 'dcp'"
        )
    if not table.single_file_per_rank and kind != "dcp":
        raise InputError(
            f"run.checkpoint.single_file_per_rank: found false with format '{kind}'; expected true, or "
            "format 'dcp', which alone can write a file per tensor"
        )
    if table.saves_16bit_model and not framework.saves_16bit_models:
        raise InputError(
            f"run.checkpoint.saves_16bit_model: found true with strategy '{job.kind}', which gathers none "
            "beside its files; expected false"
        )
    table = table.model_copy(update={"format": kind})
    return framework.files(job, job.strategy, collect_model_states(job), table)
