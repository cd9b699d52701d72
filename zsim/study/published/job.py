"""From a published run to the jobs that predict it, or the reason why zsim cannot."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from zsim.cost.kernels.update import OptimizerImplementation
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.placement import evenly
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.frameworks import Fsdp1
from zsim.specs.strategy.megatron import Megatron
from zsim.study.published.cluster import cluster_preset, row_cluster, torch_1_release
from zsim.study.published.megatron import (
    as_engine_runs,
    fuses_norms,
    is_megatron,
)
from zsim.study.published.model import (
    composer_model,
    cross_entropy,
    holding_model,
    is_composer,
    model_config,
    with_attention,
)
from zsim.study.published.offload import is_stas00
from zsim.study.published.queues import device_max_connections
from zsim.study.published.strategy import is_autocast, is_early_zero3, strategy_table
from zsim.study.published.table import PublishedRun
from zsim.study.published.zeropp import is_zeropp, zeropp_model

_PARALLELISMS = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}

# What a strategy's text rules out, and why.
_NOT_SIMULATED = (
    (r"\bTP ?(?!1\b)\d+", "tensor parallelism"),
    (r"JAX|XLA|PaXML|MaxText", "XLA's scheduler, not PyTorch's"),
    (r"Megatron-FSDP", "Megatron's own FSDP"),
    (r"fairscale", "fairscale's FSDP"),
    (r"PTD-P|3D|\+ ?MP", "model parallelism"),
)
_PRECISIONS = {"nvfp4": "", "mxfp8": "", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


@dataclass(frozen=True)
class RowJob:
    """The job of a row. `sequences` per rank and step, where they are not whole micro-batches;
    `assumptions` are what the row leaves open."""

    job: Job
    sequences: float
    assumptions: tuple[str, ...]


def row_job(run: PublishedRun) -> RowJob:
    """What zsim simulates for a row.

    Raises NotSimulatedError with the reason for rows that need what zsim lacks or that leave open what no
    default settles.
    """
    _refuse_unsupported(run)
    gpus = run.count("n_gpus")
    micro_batch = run.count("micro_batch")
    if not gpus or not micro_batch:
        raise NotSimulatedError("the number of GPUs or the micro-batch is not published")
    assumptions: list[str] = []
    steps, sequences = _batch(run, micro_batch, gpus, assumptions)
    cluster = row_cluster(run)
    if gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node:
        raise NotSimulatedError(f"{gpus} GPUs do not fill nodes of {cluster.gpus_per_node} evenly")
    model = model_config(run)
    experiment = Experiment(
        origin=run.where,
        model=zeropp_model(run, model, assumptions) if is_zeropp(run) else model,
        cluster=cluster_preset(run),
        nodes=gpus,  # one GPU each, until the nodes are the row's own
        gpus=gpus,
        training={
            "sequence_length": run.count("seq_len"),
            "micro_batch_size": micro_batch,
            "gradient_accumulation_steps": steps,
            "precision": _precision(run, assumptions),
            "activation_checkpointing": _checkpointing(run),
            "attention": "math" if re.search(r"unfused|local impl", run.text("attn_kernel")) else None,
            "compile": _is_compiled(run),
            "liger": "Liger" in run.text("software") or fuses_norms(run),
            "cross_entropy": cross_entropy(run),
            "optimizer": _optimizer(run),
            "device_max_connections": device_max_connections(run),
        },
        strategy=strategy_table(run, gpus, cluster.gpus_per_node, assumptions),
    )
    try:
        job = resolve(experiment)
    except InputError as error:  # shapes that cannot be
        raise NotSimulatedError(str(error)) from None
    nodes = -(-gpus // cluster.gpus_per_node)
    architecture = _architecture(run, job.model)
    training = replace(
        job.training,
        checkpoint_every=2 if is_every_second_block(run) else 1,
        checkpoint_stops_early=stops_early(run),
        checkpoint_is_reentrant=is_reentrant(run),
        autocast=is_autocast(run),
        stored_dtype=_stored_dtype(run),
        optimizer_implementation=_optimizer_implementation(run),
        compile=_is_compiled(run),
    )
    placement = evenly(nodes, gpus // nodes)
    strategy = job.strategy
    if isinstance(strategy, DeepSpeedConfig):
        is_early = is_early_zero3(run)
        strategy = replace(strategy, gpus_per_node=gpus // nodes, fetches_one_by_one=is_early)
    if isinstance(strategy, Megatron):
        strategy = as_engine_runs(run, strategy)
    if isinstance(strategy, Fsdp1):
        strategy = replace(strategy, before_torch_2=torch_1_release(run) is not None)
    job = replace(
        job, model=architecture, training=training, cluster=cluster, strategy=strategy, placement=placement
    )
    _check_parameters(run, job)
    return RowJob(job, sequences, tuple(assumptions))


def _architecture(run: PublishedRun, model: ModelSpec) -> ModelSpec:
    """The model as the row's software runs it."""
    if is_composer(run):
        return composer_model(run, model)
    model = holding_model(run, model)
    return with_attention(model, host_waits=True) if reads_positions(run) else model


def reads_positions(run: PublishedRun) -> bool:
    """Whether transformers' FlashAttention asks the GPU in every layer whether its one sequence is several
    packed ones (`_is_packed_sequence` in modeling_flash_attention_utils.py, transformers 5: only where the
    micro-batch is 1). SDPA, the default, does not; the script of ml-engineering's runs chooses
    FlashAttention."""
    return is_stas00(run) and run.count("micro_batch") == 1


def _refuse_unsupported(run: PublishedRun) -> None:
    if run.role == "trend":
        raise NotSimulatedError("role 'trend': batch size, shape or units are not published")
    for column, name in _PARALLELISMS.items():
        degree = run.count(column)
        if degree and degree > 1:
            raise NotSimulatedError(f"{name} parallelism ({column} = {degree}) is not simulated")
    strategy = run.text("strategy")
    for pattern, what in _NOT_SIMULATED:
        if re.search(pattern, strategy):
            raise NotSimulatedError(f"{what} is not simulated (strategy '{strategy}')")
    compiler = run.text("compile")
    if "thunder" in compiler:
        raise NotSimulatedError(f"compiler '{compiler}' is not torch.compile")


def _batch(run: PublishedRun, micro_batch: int, gpus: int, assumptions: list[str]) -> tuple[int, float]:
    """(micro-batches per step, sequences per rank and step)."""
    steps = run.count("grad_accum")
    total = run.count("global_batch")
    if not steps:
        steps = max(1, round(total / (gpus * micro_batch))) if total else 1
        assumptions.append(f"grad_accum {steps}")
    if not total:
        return steps, float(micro_batch * steps)
    sequences = total / gpus
    if not (steps - 1) * micro_batch < sequences <= steps * micro_batch:
        raise NotSimulatedError(
            f"global_batch {total} does not come from {gpus} GPUs with {steps} micro-batches of {micro_batch}"
        )
    return steps, sequences


def _precision(run: PublishedRun, assumptions: list[str]) -> str | None:
    text = run.text("precision").lower()
    if not text:
        assumptions.append("precision")
        return None
    for word, precision in _PRECISIONS.items():
        if word in text:
            if not precision:
                break
            return precision
    raise NotSimulatedError(f"precision '{run.text('precision')}' is not simulated")


def _checkpointing(run: PublishedRun) -> str:
    text = run.text("act_ckpt")
    if text.startswith("none"):
        return "none"
    if is_every_second_block(run) or (text.startswith("full") and not re.search(r"every (?!1\b)", text)):
        return "full"
    if "near full" in text:  # as the row's FLOPs of hardware and model say
        return "full"
    if "op-SAC" in text or text.startswith("selective-op") or _is_per_op(run):
        return "selective-op"
    if not text or text.startswith("unstated"):
        raise NotSimulatedError("activation checkpointing is not published")
    raise NotSimulatedError(f"activation checkpointing '{text}' is not simulated")


def is_every_second_block(run: PublishedRun) -> bool:
    """torchtitan's selective checkpointing of layers, at its default of every second; fms-fsdp's of half."""
    pattern = r"selective-layer( \(2\)| \(every 2nd block\))?$|selective \(fraction ~1/2"
    return not _is_per_op(run) and bool(re.match(pattern, run.text("act_ckpt")))


def _is_per_op(run: PublishedRun) -> bool:
    """torchtitan's pull request 135 says "SAC" and speaks of its policy of what not to recompute: by
    operator. The table's "every second layer" is its own reading (`assumed_fields`)."""
    return run.source == "torchtitan-pr135" and run.text("act_ckpt").startswith("selective")


def stops_early(run: PublishedRun) -> bool:
    """Whether recomputation stops as soon as it can, as torch's non-reentrant checkpoint does from 2.1
    (October 2023) on, where that is the torch that ran. composer and torchtitan use it; Megatron, DeepSpeed
    and transformers before 5 use the other."""
    return not is_reentrant(run) and run.text("date") >= "2023-10" and torch_1_release(run) is None


def is_reentrant(run: PublishedRun) -> bool:
    """Whether the checkpoints are torch's reentrant ones, or of that kind. composer's were (0.11 to 0.13),
    until MosaicML's YAML files set `activation_checkpointing_reentrant: false` in April 2023."""
    frameworks = ("torchtitan", "kempnerforge", "fms-fsdp")
    if is_composer(run):
        return run.text("date") < "2023-04"
    return not (is_stas00(run) or run.source.startswith(frameworks))


def _stored_dtype(run: PublishedRun) -> str:
    """What weights and optimizer states are kept in; transformers and litgpt can train in bf16 throughout."""
    text = f"{run.text('precision')}, {run.text('optimizer')}"
    return "bf16" if re.search(r"pure bf16|bf16-true|bf16 states", text) else "fp32"


def _is_compiled(run: PublishedRun) -> bool:
    """torch.compile, or a library of fused kernels (Megatron has its own), which costs the same kernels."""
    # DeepSpeedExamples' copy of the first Megatron-LM ("Megatron-LM GPT-2"; DLPerf's by its page) has none.
    own = r"foak|[Mm]egatron(?!-LM GPT-2|-LM \(2020\))"
    has_fused_kernels = re.search(own, run.text("software")) is not None
    return (
        has_fused_kernels
        or is_megatron(run)
        or run.text("compile").lower() in ("yes", "true", "per-block", "torch.compile")
    )


def _optimizer(run: PublishedRun) -> str:
    text = run.text("optimizer").lower()
    return "sgd" if text == "sgd" else "adamw"


def _optimizer_implementation(run: PublishedRun) -> OptimizerImplementation:
    """transformers' default is torch's foreach; composer's DecoupledAdamW goes tensor by tensor."""
    text = run.text("optimizer")
    return "foreach" if "(HF)" in text else "for_loop" if "Decoupled" in text else "fused"


def _check_parameters(run: PublishedRun, job: Job) -> None:
    """The shape must give the parameters that the source counted."""
    published = run.number("n_params")
    if not published:
        return
    tolerance = 0.01 if run.text("n_params_kind").startswith("exact") else 0.15
    if abs(job.model.numel / published - 1) > tolerance:
        raise NotSimulatedError(
            f"the shape has {job.model.numel:,} parameters, but the row says {published:,.0f}"
        )
