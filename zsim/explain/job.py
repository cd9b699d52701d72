"""A resolved job as plain data: every value that its simulation used, and the work of its step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.cost.flops import (
    TRACED_CONVENTION,
    active_numel,
    flops_convention,
    forward_flops_per_token,
    hardware_flops_per_token,
    model_flops_per_token,
    tower_flops_per_token,
)
from zsim.cost.rates.power import GpuActivity, kernel_activity
from zsim.plan.builder import COMPUTE
from zsim.plan.columns import op_columns, original_ops, unroll
from zsim.plan.node_types import gpu_of
from zsim.plan.ops import Kernels, Plan, Program
from zsim.report.framework import report_role
from zsim.report.report import Padding, StepWork
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.job import Job
from zsim.specs.model.expert_layer import has_experts
from zsim.specs.model.prediction import remove_prediction_layers
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.training import Checkpointing


def resolved_experiment(job: Job) -> dict[str, Any]:
    """The resolved job as plain data, with sources."""
    training = job.training
    model = job.model
    settings = report_role(job.kind).resolved_strategy(job, job.strategy)
    return {
        "model": {
            "name": model.name,
            "family": model.family,
            "parameters": model.numel,
            "layers": sum(block.is_wrapped for block in model.blocks),
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "source": _model_source(job),
        },
        "nodes": job.num_nodes,
        "gpus": job.world_size,
        "training": {name: _plain_value(getattr(training, name)) for name in training.__slots__},
        "strategy": {"kind": job.kind, **settings},
        **({} if job.parallelism.is_trivial else {"parallelism": resolved_parallelism(job)}),
        **_loop_settings(job),
        **_irregularities(job),
        **({"micro_batch_sizes": list(job.micro_batch_sizes)} if job.micro_batch_sizes else {}),
        "cluster": job.cluster.model_dump(by_alias=True, exclude=None if job.cluster.nodes else {"nodes"}),
    }


def _plain_value(value: Any) -> Any:
    """A setting that is an object (fp8's recipe) as its fields by name. Every other value is unchanged."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def model_size(job: Job) -> dict[str, int]:
    """Parameters of the whole model, whatever part of it a rank holds.

    Active ones are all but those of the experts that a token is not routed to. Trainable ones are stated if
    some are frozen. Modules for multi-token prediction are counted separately, simulated or not.
    """
    main_model = remove_prediction_layers(job.model)
    sizes = {
        "parameters": main_model.numel,
        "active_parameters": active_numel(main_model),
        "mtp_parameters": job.model.mtp_parameters,
    }
    trainable = job.model.trainable_numel
    return sizes if trainable == job.model.numel else {**sizes, "trainable_parameters": trainable}


def resolved_parallelism(job: Job) -> dict[str, Any]:
    """The degrees of all parallelisms, data parallelism's too, and how the framework runs them."""
    parallelism, experts = job.parallelism, job.parallelism.experts
    settings = {name: getattr(parallelism, name) for name in parallelism.__slots__ if name != "experts"}
    settings["style"] = parallelism.style.name
    if has_experts(job.model):
        settings |= {
            "expert": experts.ranks,
            "expert_tensor": experts.tensor,
            "dispatcher": experts.dispatcher,
            "capacity_factor": experts.capacity_factor,
            "expert_imbalance": max(experts.loads),
        }
    return {"data": job.data_parallel_size, **settings}


def _loop_settings(job: Job) -> dict[str, Any]:
    """Tables of the training loop and of the simulation where they differ from the defaults, and the
    sequences per GPU where they are set.
    """
    tables: dict[str, Any] = {
        name: table.model_dump()
        for name, table in (("trainer", job.experiment.trainer), ("simulation", job.simulation))
        if table != type(table)()
    }
    return tables if job.sequences is None else {**tables, "sequences_per_gpu": job.sequences}


def _irregularities(job: Job) -> dict[str, Any]:
    """Placement, faults and co-located jobs, where the job has them."""
    tables: dict[str, Any] = {}
    if not job.placement.is_plain:
        tables["placement"] = asdict(job.placement)
    faults = job.faults
    if faults != FaultsTable():
        tables["faults"] = faults.model_dump()
    if job.colocated_jobs:
        tables["jobs"] = {
            name: resolved_experiment(other_job) for name, other_job in job.colocated_jobs.items()
        }
    return tables


def _model_source(job: Job) -> str:
    """Source of the architecture, as the user named it."""
    model = job.experiment.model
    if isinstance(model, ModelSpec) and model.function:
        return f"torch module of {model.function}"
    if not isinstance(model, str):
        return "the experiment itself"
    return model if model.endswith(".json") or "/" in model else f"preset {model}"


_MUCH = 0.25  # of the model's FLOPs


def step_work(job: Job) -> StepWork:
    """Tokens of one replica's step, and FLOPs of one GPU's step.

    The FLOPs are those of the whole model, shared by all GPUs that train on a replica, whatever part of the
    model each of them holds.
    """
    training = job.training
    tokens: float = training.micro_batch_tokens * training.gradient_accumulation_steps
    if job.sequences is not None:
        tokens = round(job.sequences * training.sequence_length)
    lengths, padded = training.lengths, float(tokens)
    length = training.sequence_length
    if lengths is not None:
        steps = training.gradient_accumulation_steps
        tokens, padded = lengths.real_tokens * steps, lengths.mean_tokens * steps
        length = max(1, round(lengths.span))
    if job.micro_batch_sizes:
        rank_tokens = (
            np.array(job.micro_batch_sizes)[job.rank_types] * length * training.gradient_accumulation_steps
        )
        tokens = padded = float(rank_tokens.sum()) / job.world_size
    policies = [training.block_policy(number) for number in range(len(job.model.blocks))]
    hardware = hardware_flops_per_token(job.model, length, policies, training.recompute_modules)
    if training.reference is not None:
        hardware += forward_flops_per_token(job.model, length)
    in_tower = 0.0
    for tower in job.model.towers:
        flops, recomputed = tower_flops_per_token(tower, training)
        in_tower, hardware = in_tower + flops, hardware + recomputed
    dtype = training.precision
    peak_dtype = training.fp8.dtype.partition("-")[0] if dtype == "fp8" else dtype
    peak = mean_peak(job)
    model = model_flops_per_token(job.model, length) + in_tower
    masked = _masked_flops(job.model, length, policies) if training.attention == "flash" else (0.0, 0.0)
    gpus = job.parallelism.model_ranks
    return StepWork(
        tokens,
        tokens * model / gpus,
        padded * hardware / gpus,
        peak,
        flops_convention(job.model),
        peak_dtype=peak_dtype,
        gpus_per_replica=gpus,
        padding=None if lengths is None else Padding(tokens, padded, lengths.slowest_over_mean),
        masked_flops=(tokens * masked[0] / gpus, padded * masked[1] / gpus),
    )


def _masked_flops(model: ModelSpec, length: int, policies: Sequence[Checkpointing]) -> tuple[float, float]:
    """FLOPs per token of pairs that no fused kernel computes, since attention's mask leaves them out, though
    the convention counts all: forward and backward, and with recomputation."""
    if flops_convention(model) == TRACED_CONVENTION:
        return 0.0, 0.0
    without_recomputation = recomputed = 0.0
    for block, policy in zip(model.blocks, policies, strict=True):
        for module in block.modules:
            forward = module.op_spec.masked_fraction(length) * module.forward_flops(length)
            without_recomputation += 3 * forward
            recomputed += forward if policy in ("full", "selective") else 0.0
    return without_recomputation, without_recomputation + recomputed


def attention_note(work: StepWork) -> Iterator[str]:
    """A note on the FLOPs that MFU counts, where much of them is attention that a mask leaves out."""
    part = work.masked_flops[0] / work.model_flops if work.model_flops else 0.0
    if part >= _MUCH:
        yield (
            f"MFU and HFU count attention over all pairs ({work.convention}), as is usual; {part:.0%} of the "
            "model's FLOPs are pairs that the mask leaves out and no kernel computes"
        )


def mean_peak(job: Job) -> float | None:
    """The dense peak in the precision of training, as mean over all ranks' GPUs. None if one GPU has none."""
    peaks: list[float | None] = [getattr(gpu.peak, job.training.precision) for gpu in job.cluster.gpus]
    counts: list[int] = np.bincount(job.rank_types, minlength=len(peaks)).tolist()
    used_peaks = [(peak, count) for peak, count in zip(peaks, counts, strict=True) if count]
    if any(peak is None for peak, _ in used_peaks):
        return None
    if len(used_peaks) == 1:
        return used_peaks[0][0]
    return sum((peak or 0.0) * count for peak, count in used_peaks) / job.world_size


def kernel_activity_of(job: Job, plan: Plan) -> GpuActivity:
    """Seconds of a step's compute-stream kernels by limiting resource, as mean over all GPUs. Every distinct
    work is evaluated once.
    """
    program_seconds = [np.zeros((1, len(GpuActivity._fields)))]
    ranks = np.bincount(plan.program_of, minlength=len(plan.programs)) / plan.world_size
    for number, (program, fraction) in enumerate(zip(plan.programs, ranks.tolist(), strict=True)):
        program_seconds.append(_seconds_of_ops(program, gpu_of(job, plan, number)) * fraction)
    totals = np.cumsum(np.concatenate(program_seconds), axis=0)[-1]  # one after the other, in order
    return GpuActivity(*totals.tolist())


def program_activity(program: Program, gpu: Gpu) -> GpuActivity:
    """Seconds of a program's compute-stream kernels on a GPU, by limiting resource."""
    return GpuActivity(*_seconds_of_ops(program, gpu).sum(axis=0).tolist())


def _seconds_of_ops(program: Program, gpu: Gpu) -> Floats:
    """Per op with kernels on the compute stream, its `GpuActivity`."""
    payloads, indices = program.memoize(_compute_payloads)
    seconds_of_payload = [kernel_activity(work.kernels, gpu) for work in payloads]
    seconds: Floats = np.array([*seconds_of_payload, GpuActivity()])[indices]
    return seconds


def _compute_payloads(program: Program) -> tuple[list[Kernels], Ints]:
    """The distinct kernels of the compute stream, and the index of each op's kernels among them."""
    index_of_payload: dict[int, int] = {}
    payloads: list[Kernels] = []
    indices: list[int] = []
    columns = program.memoize(op_columns)
    for number in program.memoize(original_ops):
        index, work = -1, columns.work[number]
        if type(work) is Kernels and columns.stream[number] == COMPUTE:
            index = index_of_payload.setdefault(id(work), len(payloads))
            if index == len(payloads):
                payloads.append(work)
        indices.append(index)
    unrolled = unroll(program, indices)
    return payloads, unrolled[unrolled >= 0]
