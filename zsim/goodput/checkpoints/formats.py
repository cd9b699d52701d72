"""The formats of a job's checkpoints, by framework."""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError, NotSimulatedError
from zsim.goodput.checkpoints.dcp import DcpLayout, dcp_files
from zsim.goodput.checkpoints.deepspeed import deepspeed_files
from zsim.goodput.checkpoints.full import full_file
from zsim.goodput.checkpoints.megatron import megatron_files
from zsim.goodput.checkpoints.reference import reference_files
from zsim.goodput.checkpoints.saved import Saved
from zsim.goodput.checkpoints.tensors import STATES, HeldStates, held_states
from zsim.specs.experiment.job import Job
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.frameworks import Ddp, Fsdp1, Fsdp2, Reference
from zsim.specs.strategy.megatron import Megatron

# The first is the framework's own.
OFFERED: dict[type, tuple[str, ...]] = {
    Ddp: ("full", "dcp"),
    Fsdp1: ("dcp", "full"),
    Fsdp2: ("dcp", "full"),
    DeepSpeedConfig: ("deepspeed", "universal"),
    Megatron: ("megatron",),
    Reference: ("reference",),
}

_AS_MEASURED = "expected run.checkpoint.bytes, blocking and load as measured, or run.checkpoint.mode 'none'"


def format_of(job: Job, asked: str | None = None) -> str:
    """The requested format, or the framework's default. Raises InputError for one that the framework cannot
    write.
    """
    offered = OFFERED[type(job.strategy)]
    if asked is None:
        return offered[0]
    if asked not in offered:
        raise InputError(
            f"run.checkpoint.format: found '{asked}', which strategy '{job.kind}' does not write; expected "
            f"{' or '.join(repr(one) for one in offered)}"
        )
    return asked


def saved_files(
    job: Job,
    format: str | None = None,
    *,
    threads: int = 1,
    single_file_per_rank: bool = True,
    saves_16bit_model: bool = False,
) -> Saved:
    """The files of a save of the job. Raises InputError for a format or options that the framework lacks,
    NotSimulatedError for files that are not known."""
    if job.training.optimizer not in STATES and job.kind != "reference":
        raise NotSimulatedError(
            f"run.checkpoint: what is saved of '{job.training.optimizer}' is not known, only of "
            f"{', '.join(STATES)}; {_AS_MEASURED}"
        )
    kind, held, strategy = format_of(job, format), held_states(job), job.strategy
    if threads > 1 and kind != "dcp":
        raise InputError(
            f"run.checkpoint.threads: found {threads} with format '{kind}', whose ranks write with one "
            "thread each; expected 1, or format 'dcp'"
        )
    if isinstance(strategy, DeepSpeedConfig):
        if job.parallelism.experts.is_deepspeed:
            raise NotSimulatedError(
                "run.checkpoint: the files of experts in DeepSpeed's layers (a file per expert) are not "
                f"known; {_AS_MEASURED}"
            )
        return deepspeed_files(
            held, strategy, saves_16bit_model=saves_16bit_model, is_universal=kind == "universal"
        )
    if isinstance(strategy, Megatron):
        if strategy.has_owners:
            raise NotSimulatedError(
                f"run.checkpoint: the files of engine 'internevo' are not known; {_AS_MEASURED}"
            )
        if strategy.fsdp is not None:
            raise NotSimulatedError(
                "run.checkpoint: the files of Megatron-FSDP (--ckpt-format fsdp_dtensor) are not known; "
                f"{_AS_MEASURED}"
            )
        return megatron_files(held, strategy)
    if isinstance(strategy, Reference):
        return reference_files(held, job.model)
    layout = dcp_layout(job, held, threads=threads, single_file_per_rank=single_file_per_rank)
    return full_file(held, layout) if kind == "full" else dcp_files(held, layout)


def dcp_layout(
    job: Job, held: HeldStates, *, threads: int = 1, single_file_per_rank: bool = True
) -> DcpLayout:
    """The layout of torch's frameworks: FSDP1's and FSDP2's DTensors, DDP's full tensors."""
    strategy, ranks = job.strategy, held.data_ranks
    if isinstance(strategy, Fsdp2):
        replicas, size = strategy.replicate, 4
    elif isinstance(strategy, Fsdp1):
        replicas = ranks if strategy.sharding_strategy == "NO_SHARD" else strategy.replicate
        size = DTYPE_BYTES[job.training.stored_dtype]
    else:
        replicas, size = ranks, DTYPE_BYTES[job.training.stored_dtype]
    is_on_host = isinstance(strategy, Fsdp1 | Fsdp2) and strategy.cpu_offload
    return DcpLayout(
        ranks // replicas, replicas, size, threads, single_file_per_rank, held.expert_data_ranks // replicas,
        is_on_host,
    )  # fmt: skip
