"""The experiment that predicts a published run, or the reason why zsim cannot predict it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from validation.published.cluster import attention_variant, cluster_preset, cluster_table, complete_cluster
from validation.published.model import adapt_model, model_config
from validation.published.parallelism import (
    model_ranks_of,
    parallelism_table,
    pipeline_micro_batches,
    replicas_of,
)
from validation.published.sources import apply_rules, complete_run
from validation.published.strategy import merge_stage, strategy_table
from validation.published.table import PublishedRun
from zsim.cost.kernels.update import OptimizerImplementation
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

# Pattern in a strategy's text -> why the row cannot be simulated.
_NOT_SIMULATED = (
    (r"JAX|XLA|PaXML|MaxText", "XLA's scheduler, not PyTorch's"),
    (r"(?<!Megatron-)FSDP TP\d", "NeMo's FSDP with tensor parallelism"),
    (r"fairscale", "fairscale's FSDP"),
)
_MODEL_PARALLEL = r"\bTP ?(?!1\b)\d+|PTD-P|3D|\+ ?MP"  # without degrees in the row
# torchtitan's selective checkpointing by layer, by default every second one; fms-fsdp's checkpointing of
# half.
_MEGATRONS = r"Megatron|NeMo|mcore"  # whose "selective" is the core of attention
_EVERY_SECOND = r"selective-layer( \(2\)| \(every 2nd block\))?$|selective \(fraction ~1/2"
_MODULE_NAMES = {"norm": "layernorm", "act": "moe_act"}
_MODULES = (
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out",
)  # fmt: skip
_PRECISIONS = {"nvfp4": "fp8", "mxfp8": "fp8", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
# Word of a row's precision -> its recipe; "nvfp4 (with fp8 parts)" says that not all products are in fp4.
_RECIPES = (
    (r"with fp8 parts|nvfp4/fp8|\?", ""),
    (r"nvfp4", "nvfp4"),
    (r"mx", "mxfp8"),
    (r"block|sub-channel", "block"),
    (r"-cs|current|per-tensor", "current"),
    (r"delayed", "delayed"),
    (r"rowwise", "torchao-rowwise"),
)


@dataclass(frozen=True)
class RowExperiment:
    """The experiment of a row."""

    experiment: Experiment
    assumptions: tuple[str, ...]
    """The settings that the row leaves open."""


@dataclass(frozen=True)
class RowJob:
    """The job of a row."""

    job: Job
    assumptions: tuple[str, ...]
    """The settings that the row leaves open."""
    is_of_last_rank: bool = False
    """The row's memory is that of the last pipeline rank, not of the fullest."""

    @property
    def sequences(self) -> float:
        """Sequences per rank and step."""
        training = self.job.training
        count = float(training.micro_batch_size * training.gradient_accumulation_steps)
        return count if self.job.sequences is None else self.job.sequences


def row_job(run: PublishedRun) -> RowJob:
    """The job that zsim simulates for a row.

    Raises NotSimulatedError with the reason for rows that zsim does not support, or that leave open what no
    default settles."""
    row = row_experiment(run)
    try:
        job = resolve(row.experiment)
    except InputError as error:  # an impossible shape
        raise NotSimulatedError(str(error)) from None
    _check_parameters(run, job)
    return RowJob(job, row.assumptions, "last rank" in run.text("mem_kind"))


def row_experiment(run: PublishedRun) -> RowExperiment:
    """The row as an experiment. Raises NotSimulatedError as `row_job` does."""
    completed = complete_run(run)
    run, assumptions = completed.run, list(completed.assumptions)
    _refuse_unsupported(run)
    gpus = run.count("n_gpus")
    micro_batch = run.count("micro_batch")
    if not gpus or not micro_batch:
        raise NotSimulatedError("the number of GPUs or the micro-batch is not published")
    replicas = replicas_of(run, gpus)
    steps, total = _batch(run, micro_batch, replicas, assumptions)
    name = cluster_preset(run)
    preset = load_cluster(name)
    cluster = cluster_table(run, name, preset)
    per_node = cluster.get("gpus_per_node", preset.gpus_per_node)
    if gpus > per_node and gpus % per_node:
        raise NotSimulatedError(f"{gpus} GPUs do not fill nodes of {per_node} evenly")
    nodes = -(-gpus // per_node)
    strategy = strategy_table(run, replicas * (run.count("cp") or 1), per_node, assumptions)
    num_pieces = pipeline_micro_batches(run, strategy["kind"], micro_batch, assumptions)
    data: dict[str, Any] = {
        "model": adapt_model(run, model_config(run), assumptions),
        "cluster": cluster,
        "nodes": nodes,
        "gpus": gpus,
        "training": {
            "sequence_length": run.count("seq_len"),
            "micro_batch_size": micro_batch // num_pieces,
            "gradient_accumulation_steps": steps * num_pieces,
            "global_batch_size": total,
            **_precision(run, strategy["kind"], assumptions),
            **_checkpointing(run),
            "attention": _attention(run),
            "compile": run.text("compile").lower() in ("yes", "true", "per-block", "torch.compile"),
            "liger": "Liger" in run.text("software"),
            "optimizer": _optimizer(run),
            "optimizer_implementation": _optimizer_implementation(run),
        },
        "trainer": {},
        "simulation": {"every_micro_batch": False, "known_to_fit": True},
        "strategy": strategy,
    }
    parallelism = parallelism_table(run, strategy, assumptions)
    if parallelism:
        data["parallelism"] = {**parallelism, "passes": steps} if num_pieces > 1 else parallelism
    if data["strategy"]["kind"] in ("ddp", "fsdp1"):
        data["training"]["stored_dtype"] = _stored_dtype(run)
    assumptions += apply_rules(run, data)
    data["cluster"] = complete_cluster(run, data["cluster"])
    data["strategy"] = merge_stage(data["strategy"])
    if data["training"]["attention"] not in (None, "math", "flash2", *preset.gpu.attention.variants):
        data["training"]["attention"] = None
    return RowExperiment(Experiment.of_data(data, origin=run.where), tuple(assumptions))


def _attention(run: PublishedRun) -> str | None:
    if re.search(r"unfused|local impl", run.text("attn_kernel")):
        return "math"
    return attention_variant(run) or None


def _refuse_unsupported(run: PublishedRun) -> None:
    if run.role == "trend":
        raise NotSimulatedError("role 'trend': batch size, shape or units are not published")
    strategy = run.text("strategy")
    if model_ranks_of(run) == 1 and re.search(_MODEL_PARALLEL, strategy):
        raise NotSimulatedError(f"degrees of model parallelism are not published (strategy '{strategy}')")
    for pattern, feature in _NOT_SIMULATED:
        if re.search(pattern, strategy):
            raise NotSimulatedError(f"{feature} is not simulated (strategy '{strategy}')")
    compiler = run.text("compile")
    if "thunder" in compiler:
        raise NotSimulatedError(f"compiler '{compiler}' is not torch.compile")


def _batch(
    run: PublishedRun, micro_batch: int, replicas: int, assumptions: list[str]
) -> tuple[int, int | None]:
    """(micro-batches per step, global batch in sequences if it is no multiple of the micro-batch, else
    None)."""
    steps = run.count("grad_accum")
    total = run.count("global_batch")
    if not steps:
        steps = max(1, round(total / (replicas * micro_batch))) if total else 1
        assumptions.append(f"grad_accum {steps}")
    if not total:
        return steps, None
    sequences = total / replicas
    if not (steps - 1) * micro_batch < sequences <= steps * micro_batch:
        raise NotSimulatedError(
            f"global_batch {total} does not come from {run.text('n_gpus')} GPUs with {steps} micro-batches "
            f"of {micro_batch}"
        )
    return steps, None if sequences == steps * micro_batch else total


def _precision(run: PublishedRun, kind: str, assumptions: list[str]) -> dict[str, Any]:
    """Keys of the precision, with the recipe of fp8 training where the row says it. "tensorwise" is
    Megatron's word for current scales."""
    text = run.text("precision").lower()
    if not text:
        assumptions.append("precision")
        return {}
    precision = next((precision for word, precision in _PRECISIONS.items() if word in text), None)
    if precision is None:
        raise NotSimulatedError(f"precision '{run.text('precision')}' is not simulated")
    if precision != "fp8":
        return {"precision": precision}
    recipe = next((recipe for pattern, recipe in _RECIPES if re.search(pattern, text)), None)
    if recipe == "":
        stated = run.text("precision")
        raise NotSimulatedError(f"precision '{stated}': which products are in which type is not published")
    if recipe is None and kind == "megatron" and "tensorwise" in text:
        recipe = "current"
    return {"precision": precision, "fp8_recipe": recipe} if recipe else {"precision": precision}


def _checkpointing(run: PublishedRun) -> dict[str, Any]:
    """Keys of activation checkpointing: by default reentrant, and recomputing the whole block, unless a rule
    on the source says otherwise."""
    block_interval = 2 if re.match(_EVERY_SECOND, run.text("act_ckpt")) else 1
    is_megatron = re.search(_MEGATRONS, run.text("software")) is not None
    modules = _recomputed_modules(run.text("act_ckpt"))
    if modules:
        return {"activation_checkpointing": "selective", "recompute_modules": modules}
    return {
        "activation_checkpointing": _policy(run.text("act_ckpt"), block_interval, is_megatron),
        "checkpoint_every": block_interval,
        "checkpoint_is_reentrant": True,
        "checkpoint_stops_early": False,
    }


def _recomputed_modules(text: str) -> list[str]:
    """The modules of Megatron's `--recompute-modules` in "selective (layernorm+moe_act)", or [] for other
    policies. The model zoo's "norm" and "act" are Megatron's layernorm and moe_act.
    """
    match = re.fullmatch(r"selective(?: \(|: )\[?([a-z_+, ]+)\]?\)?", text)
    names = re.split(r"[+, ]+", match[1]) if match else []
    modules = [_MODULE_NAMES.get(name, name) for name in names]
    return modules if all(name in _MODULES for name in modules) else []


def _policy(text: str, block_interval: int, is_megatron: bool) -> str:
    if text.startswith("none"):
        return "none"
    if block_interval == 2 or (text.startswith("full") and not re.search(r"every (?!1\b)", text)):
        return "full"
    if "near full" in text:  # according to the row's hardware and model FLOPs
        return "full"
    if "op-SAC" in text or text.startswith("selective-op"):
        return "selective-op"
    if text == "selective (core attention)" or (text == "selective" and is_megatron):
        return "selective"
    if not text or text.startswith("unstated"):
        raise NotSimulatedError("activation checkpointing is not published")
    raise NotSimulatedError(f"activation checkpointing '{text}' is not simulated")


def _stored_dtype(run: PublishedRun) -> str:
    """The dtype in which weights and optimizer states are stored. transformers and litgpt can train in bf16
    throughout.
    """
    text = f"{run.text('precision')}, {run.text('optimizer')}"
    return "bf16" if re.search(r"pure bf16|bf16-true|bf16 states", text) else "fp32"


def _optimizer(run: PublishedRun) -> str:
    text = run.text("optimizer").lower()
    return "sgd" if text == "sgd" else "adamw"


def _optimizer_implementation(run: PublishedRun) -> OptimizerImplementation:
    """torch's foreach, the default of transformers, for "(HF)". A loop over tensors for composer's
    DecoupledAdamW. Fused for all others.
    """
    text = run.text("optimizer")
    return "foreach" if "(HF)" in text else "for_loop" if "Decoupled" in text else "fused"


def _check_parameters(run: PublishedRun, job: Job) -> None:
    """Raise NotSimulatedError unless the shape has the number of parameters that the source states."""
    published = run.number("n_params")
    if not published:
        return
    tolerance = 0.01 if run.text("n_params_kind").startswith("exact") else 0.15
    if abs(job.model.numel / published - 1) > tolerance:
        raise NotSimulatedError(
            f"the shape has {job.model.numel:,} parameters, but the row says {published:,.0f}"
        )
