"""A job's parallelism as torchtitan 0.2's keys of `[parallelism]`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.programs.torchtitan.keys import KEYS, ROTATE_METHODS, UNROTATED
from zsim.specs.experiment.job import Job
from zsim.specs.strategy.parallelism import SINGLE_STAGE, ParallelismConfig

MODULE_NAMES = "module_fqns_per_model_part"
ASYNC, ROTATE = "enable_async_tensor_parallel", "context_parallel_rotate_method"
_DEFAULT_ENDS, _DEFAULT_STAGES = (1, 1), 2


def why_not_degrees(job: Job) -> str | None:
    """The reason why torchtitan's keys cannot express this job's parallelism, or None if they can."""
    parallelism, strategy = job.parallelism, job.strategy
    assert isinstance(strategy, Fsdp2Config)
    if job.data_parallel_size % strategy.replicate:
        return f"it replicates batches: {strategy.replicate} replicas do not divide {job.data_parallel_size}"
    if parallelism.tensor > 1 and not parallelism.sequence_parallel:
        return "its tensor parallelism always has sequence parallelism"
    if parallelism.gather_per_product:
        return "its products of one input gather it together"
    if parallelism.context > 1 and parallelism.context_method not in ROTATE_METHODS.values():
        return UNROTATED
    if parallelism.order != ParallelismConfig().order:
        return "its mesh has one order, tp-cp-dp-pp"
    if parallelism.pipeline == 1 and parallelism.passes > 1:
        return "it has passes only around a pipeline"
    return None


def local_batch_size(job: Job) -> int:
    """Sequences of a rank in one pass: all micro-batches of a pipeline."""
    training, parallelism = job.training, job.parallelism
    if parallelism.pipeline == 1:
        return training.micro_batch_size
    return training.micro_batch_size * training.gradient_accumulation_steps // parallelism.passes


def degrees_of(job: Job) -> dict[str, Any]:
    """The keys that the job's degrees above 1 need."""
    parallelism = job.parallelism
    keys: dict[str, Any] = {}
    if parallelism.tensor > 1:
        keys["tensor_parallel_degree"] = parallelism.tensor
        if parallelism.async_tensor:
            keys[ASYNC] = True
        if not parallelism.loss_parallel:
            keys["disable_loss_parallel"] = True
    if parallelism.pipeline > 1:
        keys |= {"pipeline_parallel_degree": parallelism.pipeline, **_pipeline(job)}
    if parallelism.context > 1:
        keys["context_parallel_degree"] = parallelism.context
        keys[ROTATE] = KEYS[f"parallelism.{ROTATE}"].write(job)
    experts = parallelism.experts
    if experts.ranks > 1:
        keys["expert_parallel_degree"] = experts.ranks
        keys["expert_tensor_parallel_degree"] = experts.tensor
        keys["expert_parallel_comm_backend"] = KEYS["parallelism.expert_parallel_comm_backend"].value_of(
            experts.dispatcher
        )
    return keys


def _pipeline(job: Job) -> dict[str, Any]:
    """The schedule, its micro-batches and the split. The split is given by the layers that the ends lack,
    where that is enough.
    """
    parallelism, table = job.parallelism, job.experiment.parallelism
    keys: dict[str, Any] = {
        "pipeline_parallel_schedule": KEYS["parallelism.pipeline_parallel_schedule"].write(job),
        "pipeline_parallel_microbatch_size": job.training.micro_batch_size,
    }
    if parallelism.schedule_csv:
        keys["pipeline_parallel_schedule"] = (
            "PipelineScheduleSingle" if parallelism.virtual_stages == 1 else "PipelineScheduleMulti"
        )
        keys["pipeline_parallel_schedule_csv"] = parallelism.schedule_csv
    is_default = parallelism.virtual_stages == (
        1 if parallelism.schedule in SINGLE_STAGE and not parallelism.schedule_csv else _DEFAULT_STAGES
    )
    if table.layers_per_stage is not None or not is_default:
        return keys | {MODULE_NAMES: _module_names(parallelism.layers_per_stage)}
    missing_layers = (table.first_stage_less_layers, table.last_stage_less_layers)
    names = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
    for name, missing, default in zip(names, missing_layers, _DEFAULT_ENDS, strict=True):
        keys[name] = default if missing is None else missing
    return keys


def _module_names(layers_per_stage: tuple[int, ...]) -> list[list[str]]:
    """torchtitan's names of the modules of every stage. The embedding is first, norm and head are last."""
    starts = accumulate(layers_per_stage, initial=0)
    stages = [
        [f"layers.{number}" for number in range(start, start + layers)]
        for start, layers in zip(starts, layers_per_stage, strict=False)
    ]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages
