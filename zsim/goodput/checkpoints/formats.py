"""The formats of a job's checkpoints, by framework."""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.deepspeed.checkpoint_files import deepspeed_files
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.frameworks.megatron.checkpoint_files import megatron_files
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.reference.checkpoint_files import reference_files
from zsim.frameworks.reference.settings import ReferenceConfig
from zsim.frameworks.torch.distributed_checkpoint import DcpLayout, dcp_files, full_file
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.goodput.checkpoints.tensors import STATES, ModelStates, collect_model_states
from zsim.specs.experiment.job import Job

# The first is the framework's own.
FORMATS: dict[type, tuple[str, ...]] = {
    DdpConfig: ("full", "dcp"),
    Fsdp1Config: ("dcp", "full"),
    Fsdp2Config: ("dcp", "full"),
    DeepSpeedConfig: ("deepspeed", "universal"),
    MegatronConfig: ("megatron",),
    ReferenceConfig: ("reference",),
}

_STATE_MEASURED = (
    "expected run.checkpoint.bytes, blocking and load as measured, or run.checkpoint.mode 'none'"
)


def format_of(job: Job, requested: str | None = None) -> str:
    """The requested format, or the framework's default. Raises InputError for one that the framework cannot
    write.
    """
    formats = FORMATS[type(job.strategy)]
    if requested is None:
        return formats[0]
    if requested not in formats:
        raise InputError(
            f"run.checkpoint.format: found '{requested}', which strategy '{job.kind}' does not write; "
            "expected "
            f"{' or '.join(repr(name) for name in formats)}"
        )
    return requested


def saved_files(
    job: Job,
    format: str | None = None,
    *,
    threads: int = 1,
    single_file_per_rank: bool = True,
    saves_16bit_model: bool = False,
) -> SavedFiles:
    """The files of a save of the job. Raises InputError for a format or options that the framework lacks,
    NotSimulatedError for files that are not known."""
    if job.training.optimizer not in STATES and job.kind != "reference":
        raise NotSimulatedError(
            f"run.checkpoint: what is saved of '{job.training.optimizer}' is not known, only of "
            f"{', '.join(STATES)}; {_STATE_MEASURED}"
        )
    kind, model_states, strategy = format_of(job, format), collect_model_states(job), job.strategy
    if threads > 1 and kind != "dcp":
        raise InputError(
            f"run.checkpoint.threads: found {threads} with format '{kind}', whose ranks write with one "
            "thread each; expected 1, or format 'dcp'"
        )
    if isinstance(strategy, DeepSpeedConfig):
        if job.parallelism.experts.library.has_expert_groups:
            raise NotSimulatedError(
                "run.checkpoint: the files of experts in DeepSpeed's layers (a file per expert) are not "
                f"known; {_STATE_MEASURED}"
            )
        return deepspeed_files(
            model_states, strategy, saves_16bit_model=saves_16bit_model, is_universal=kind == "universal"
        )
    if isinstance(strategy, MegatronConfig):
        if strategy.has_whole_tensor_owners:
            raise NotSimulatedError(
                f"run.checkpoint: the files of engine 'internevo' are not known; {_STATE_MEASURED}"
            )
        if strategy.fsdp is not None:
            raise NotSimulatedError(
                "run.checkpoint: the files of Megatron-FSDP (--ckpt-format fsdp_dtensor) are not known; "
                f"{_STATE_MEASURED}"
            )
        return megatron_files(model_states, strategy)
    if isinstance(strategy, ReferenceConfig):
        return reference_files(model_states, job.model)
    layout = dcp_layout(job, model_states, threads=threads, single_file_per_rank=single_file_per_rank)
    return full_file(model_states, layout) if kind == "full" else dcp_files(model_states, layout)


def dcp_layout(
    job: Job, model_states: ModelStates, *, threads: int = 1, single_file_per_rank: bool = True
) -> DcpLayout:
    """The layout of torch's frameworks: FSDP1's and FSDP2's DTensors, DDP's full tensors."""
    strategy, ranks = job.strategy, model_states.data_ranks
    if isinstance(strategy, Fsdp2Config):
        replicas, size = strategy.replicate, 4
    elif isinstance(strategy, Fsdp1Config):
        replicas = ranks if strategy.sharding_strategy == "NO_SHARD" else strategy.replicate
        size = DTYPE_BYTES[job.training.stored_dtype]
    else:
        replicas, size = ranks, DTYPE_BYTES[job.training.stored_dtype]
    is_on_host = isinstance(strategy, Fsdp1Config | Fsdp2Config) and strategy.cpu_offload
    return DcpLayout(
        ranks // replicas, replicas, size, threads, single_file_per_rank,
        model_states.expert_data_ranks // replicas, is_on_host,
    )  # fmt: skip
