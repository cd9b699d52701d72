"""From a published run to the jobs that predict it, or the reason why zsim cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zsim.cost.update_work import OptimizerImplementation
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment import Experiment
from zsim.specs.importers.deepspeed import DeepSpeedConfig
from zsim.specs.job import Job, resolve
from zsim.specs.megatron import Megatron
from zsim.specs.model import ModelSpec
from zsim.specs.placement import evenly
from zsim.specs.strategy import Fsdp1
from zsim.study.published_cluster import cluster_preset, row_cluster, torch_1_release
from zsim.study.published_megatron import (
    as_engine_runs,
    fuses_norms,
    is_megatron,
    is_megatron_like,
    megatron_table,
)
from zsim.study.published_model import (
    composer_model,
    cross_entropy,
    holding_model,
    is_composer,
    is_early_composer,
    model_config,
    with_attention,
)
from zsim.study.published_offload import is_offloaded, is_stas00, offload_blocks
from zsim.study.published_queues import device_max_connections
from zsim.study.published_table import PublishedRun
from zsim.study.published_zeropp import is_zeropp, zeropp_config, zeropp_model

_PARALLELISMS = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}

# What a strategy's text rules out, and why.
_NOT_SIMULATED = (
    (r"\bTP ?(?!1\b)\d+", "tensor parallelism"),
    (r"JAX|XLA|PaXML|MaxText", "XLA's scheduler, not PyTorch's"),
    (r"Megatron-FSDP", "Megatron's own FSDP"),
    (r"fairscale", "fairscale's FSDP"),
    (r"PTD-P|3D|\+ ?MP", "model parallelism"),
)
_DEEPSPEED = r"ZeRO-[0123]|HF Trainer \+ DeepSpeed|Megatron TP1 \+ DeepSpeed|TP1 PP1 DP\d+ \+ ZeRO"
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
        strategy=_strategy(run, gpus, cluster.gpus_per_node, assumptions),
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


def is_autocast(run: PublishedRun) -> bool:
    """composer's mixed precision DEFAULT in its releases for torch 1.12 and 1.13: FSDP keeps parameters in
    fp32 and leaves the low type to autocast, gradients are reduced in it (`prepare_fsdp_module`). This
    overrides the row's `reduce_dtype`; the date at which it changed is inferred, not read from a release."""
    return is_composer(run) and "DEFAULT" in run.text("strategy") and run.text("date") < "2023-03"


def limits_all_gathers(run: PublishedRun) -> bool:
    """MosaicML's scripts set `limit_all_gathers` from April 2023 on (mosaicml/examples@520a6709,
    examples/llm/throughput/submit_benchmarks.py); the ones before (@b83dacd4, llm/throughput/
    run_all_configs.py; @2ac2b44a, examples/llm/throughput) leave it at composer's and torch's False."""
    return not is_early_composer(run)


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


def _strategy(run: PublishedRun, gpus: int, gpus_per_node: int, assumptions: list[str]) -> dict[str, Any]:
    """The strategy's table, from its text and the columns beside it."""
    text, stage = run.text("strategy"), run.count("zero_stage")
    if is_zeropp(run):
        config = zeropp_config(run, gpus_per_node)
        return {"kind": "deepspeed", "version": _deepspeed_version(run), "config": config}
    if is_megatron_like(run):
        return megatron_table(run, gpus, assumptions)
    if re.match(r"single", text):
        return _single(run, assumptions)
    if re.match(r"FSDP2", text) and not is_offloaded(run):
        return _fsdp2(run)
    offloads = run.text("offload").startswith("params")
    is_fsdp1 = re.match(r"FSDP|HSDP|FULL_SHARD|SHARD_GRAD_OP|HYBRID_SHARD", text)
    if is_fsdp1 and (offloads or not is_offloaded(run)):
        return _fsdp1(run, gpus) | ({"cpu_offload": True} if offloads else {})
    if re.match(_DEEPSPEED, text) and stage is not None:
        return _deepspeed(run, stage, assumptions)
    if is_offloaded(run):
        raise NotSimulatedError(f"offload is not simulated (strategy '{text}')")
    if re.match(r"DDP", text):
        return {"kind": "ddp"}
    raise NotSimulatedError(f"strategy '{text}' is not simulated")


def _single(run: PublishedRun, assumptions: list[str]) -> dict[str, Any]:
    """fp16 has fp16 weights with fp32 masters in every recipe of these tables (Megatron, Apex)."""
    if "fp16" in run.text("precision"):
        return {"kind": "deepspeed", "stage": 0, "version": _deepspeed_version(run)}
    return {"kind": "ddp"}


def _reduce_dtype(run: PublishedRun) -> str:
    text = run.text("reduce_dtype") or "bf16"
    return "fp32" if text.startswith("fp32") else text.split()[0]


def _fsdp2(run: PublishedRun) -> dict[str, Any]:
    """torchtitan's wrapping, as of the row's date."""
    table: dict[str, Any] = {"kind": "fsdp2", "reduce_dtype": _reduce_dtype(run)}
    table["wrapping"] = "torchtitan-0.1" if run.text("date") < "2025" else "torchtitan"
    return table


def _fsdp1(run: PublishedRun, gpus: int) -> dict[str, Any]:
    text = run.text("strategy")
    table: dict[str, Any] = {"kind": "fsdp1", "reduce_dtype": _reduce_dtype(run)}
    shard = run.count("shard_group") or gpus
    if re.search(r"HSDP|HYBRID", text) or 1 < shard < gpus:
        table |= {"sharding_strategy": "HYBRID_SHARD", "replicate": gpus // shard}
    elif "SHARD_GRAD_OP" in text:
        table["sharding_strategy"] = "SHARD_GRAD_OP"
    if "NO backward prefetch" in text:
        table["backward_prefetch"] = "none"
    if is_autocast(run):
        table |= {"param_dtype": "fp32", "reduce_dtype": "bf16"}
    if is_composer(run):
        table["backward_prefetch"] = "BACKWARD_POST"  # composer's default
        table["limit_all_gathers"] = limits_all_gathers(run)
    size = re.search(r"size-based wrap (\d+)M", text)
    if size:
        table["wrapping"] = f"size:{size.group(1)}000000"
    return table


def _deepspeed(run: PublishedRun, stage: int, assumptions: list[str]) -> dict[str, Any]:
    table: dict[str, Any] = {"kind": "deepspeed", "version": _deepspeed_version(run)}
    if is_early_zero3(run):
        assumptions.append("DeepSpeed before 0.6 with the defaults of 0.10.3")
    blocks = offload_blocks(run, assumptions)
    if run.source == "azure-zero3":
        table["config"] = azure_config(stage, blocks)
    elif is_stas00(run):  # `ds_config` of its benchmark.py and bench_decompose.py
        zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, **blocks}
        table["config"] = {"gradient_clipping": 1.0, "zero_optimization": zero}
    elif blocks:
        table["config"] = {"zero_optimization": {"stage": stage, **blocks}}
    else:
        table["stage"] = stage
    if is_stas00(run) and stage == 3:
        table["zero_init"] = False
    return table


def azure_config(stage: int, blocks: Mapping[str, Any]) -> dict[str, Any]:
    """`ds_config.json` of Megatron-DeepSpeed's examples_deepspeed/azure (run-175b.sh, run-1t.sh; commit
    62bc4562 of July 2022), the same for all sizes but for what is offloaded, which is the row's."""
    zero = {
        "stage": stage, "stage3_max_live_parameters": 3e9, "stage3_max_reuse_distance": 3e9,
        "stage3_param_persistence_threshold": 1e5, "stage3_prefetch_bucket_size": 5e7,
        "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": 90_000_000,
        "sub_group_size": 1e9,
    }  # fmt: skip
    return {"gradient_clipping": 1.0, "zero_optimization": {**zero, **blocks}}


def is_early_zero3(run: PublishedRun) -> bool:
    """Whether the row's ZeRO-3 is of before DeepSpeed 0.6 (March 2022, pull request 1453)."""
    return run.count("zero_stage") == 3 and run.text("date") < "2022"


def _deepspeed_version(run: PublishedRun) -> str:
    """The release whose defaults apply: the row's own; else the oldest and the newest that zsim knows."""
    known = re.search(r"DeepSpeed (\d+)\.(\d+)\.(\d+)", run.text("software"))
    if known:
        return ".".join(known.groups()) if tuple(map(int, known.groups())) > (0, 10, 3) else "0.10.3"
    return "0.10.3" if run.text("date") < "2023-10" else "0.19.8"


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
