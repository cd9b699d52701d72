"""The experiment that predicts a published run, or the reason why zsim cannot predict it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from validation.published.cluster import cluster_preset, cluster_table, complete_cluster
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
from validation.published.training import (
    adapter_keys,
    attention_key,
    checkpointing_keys,
    is_compiled,
    optimizer_implementation,
    optimizer_name,
    precision_keys,
    stored_dtype,
)
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

_MODEL_PARALLEL = r"\bTP ?(?!1\b)\d+|PTD-P|3D|\+ ?MP"  # without degrees in the row


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
    gpus, micro_batch = num_gpus(run), run.count("micro_batch")
    replicas = replicas_of(run, gpus)
    micro_batch, steps, total = batch_of(run, micro_batch, replicas, assumptions)
    name = cluster_preset(run)
    preset = load_cluster(name)
    cluster = cluster_table(run, name, preset, assumptions)
    per_node = cluster.get("gpus_per_node", preset.gpus_per_node)
    if gpus > per_node and gpus % per_node:
        raise NotSimulatedError(f"{gpus} GPUs do not fill nodes of {per_node} evenly")
    nodes = -(-gpus // per_node)
    strategy = strategy_table(run, replicas * (run.count("cp") or 1), per_node, assumptions)
    kind = strategy["kind"]
    num_pieces = pipeline_micro_batches(run, kind, micro_batch, assumptions)
    model = adapt_model(run, model_config(run, assumptions), assumptions)
    length = run.count("seq_len")
    if not length:
        raise NotSimulatedError("the shape is not published: no seq_len")
    data: dict[str, Any] = {
        "model": model,
        "cluster": cluster,
        "nodes": nodes,
        "gpus": gpus,
        "training": {
            "sequence_length": length,
            "micro_batch_size": micro_batch // num_pieces,
            "gradient_accumulation_steps": steps * num_pieces,
            "global_batch_size": total,
            **precision_keys(run, kind, assumptions),
            **checkpointing_keys(run, kind, assumptions),
            "attention": attention_key(run),
            "compile": is_compiled(run, assumptions),
            "liger": bool(re.search(r"(?i)(?<![-\w])liger", run.text("software"))),
            "optimizer": optimizer_name(run),
            "optimizer_implementation": optimizer_implementation(run),
            **adapter_keys(run, kind, assumptions),
        },
        "trainer": {},
        "simulation": {"every_micro_batch": False, "known_to_fit": True},
        "strategy": strategy,
    }
    parallelism = parallelism_table(run, strategy, assumptions)
    if "lora" in data["training"] and parallelism.pop("async_tensor", False):
        assumptions.append("tensor parallelism: its overlap left out, which LoRA has not")
    if parallelism:
        data["parallelism"] = {**parallelism, "passes": steps} if num_pieces > 1 else parallelism
    if data["strategy"]["kind"] in ("ddp", "fsdp1"):
        data["training"]["stored_dtype"] = stored_dtype(run)
    assumptions += apply_rules(run, data)
    data["cluster"] = complete_cluster(run, data["cluster"])
    data["strategy"] = merge_stage(data["strategy"])
    if data["training"]["attention"] not in (None, "math", "flash2", *preset.gpu.attention.variants):
        data["training"]["attention"] = None
    return RowExperiment(Experiment.of_data(data, origin=run.where), tuple(assumptions))


def _refuse_unsupported(run: PublishedRun) -> None:
    strategy = run.text("strategy")
    if model_ranks_of(run) == 1 and re.search(_MODEL_PARALLEL, strategy) and not run.text("tp"):
        raise NotSimulatedError(f"degrees of model parallelism are not published (strategy '{strategy}')")
    if re.search(r"(?<!Megatron-)FSDP TP\d", strategy):
        raise NotSimulatedError(
            f"NeMo's FSDP with tensor parallelism is not simulated (strategy '{strategy}')"
        )


def num_gpus(run: PublishedRun) -> int:
    """The GPUs of the row, or what its degrees make. Raises NotSimulatedError where it has neither."""
    gpus = run.count("n_gpus")
    if gpus:
        return gpus
    if run.count("dp"):
        return (run.count("dp") or 1) * model_ranks_of(run)
    raise NotSimulatedError("the number of GPUs is not published")


def batch_of(
    run: PublishedRun, micro_batch: int | None, replicas: int, assumptions: list[str]
) -> tuple[int, int, int | None]:
    """(the micro-batch, micro-batches per step, global batch in sequences if it is no multiple of the
    micro-batch, else None). A micro-batch that is not published follows from the global batch and its
    accumulation, or is 1."""
    steps, total = run.count("grad_accum"), run.count("global_batch")
    if not micro_batch:
        if not total:
            raise NotSimulatedError("neither the micro-batch nor the global batch is published")
        micro_batch = max(1, total // (replicas * steps)) if steps else 1
        assumptions.append(f"batch: micro-batch not published, taken as {micro_batch}")
    if not steps:
        steps = max(1, round(total / (replicas * micro_batch))) if total else 1
        assumptions.append(f"grad_accum {steps}")
    if not total:
        return micro_batch, steps, None
    sequences = total / replicas
    if not (steps - 1) * micro_batch < sequences <= steps * micro_batch:
        raise NotSimulatedError(
            f"global_batch {total} does not come from {run.text('n_gpus')} GPUs with {steps} micro-batches "
            f"of {micro_batch}"
        )
    return micro_batch, steps, None if sequences == steps * micro_batch else total


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
