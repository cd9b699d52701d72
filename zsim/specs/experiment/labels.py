"""Short labels of a job, for headlines."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.specs.experiment.job import Job
from zsim.specs.strategy.mesh import CONTEXT, DATA, PIPELINE, TENSOR
from zsim.specs.strategy.training import TrainingConfig
from zsim.units import format_gpus


def strategy_label(job: Job) -> str:
    """Label of the strategy: "ZeRO-3 + hpZ 8", "HSDP 16 x 8", "FSDP1 SHARD_GRAD_OP"."""
    return job.strategy.label(job.world_size, job.mesh.size(DATA, CONTEXT))


def gpus_label(job: Job) -> str:
    """Number of GPUs, as in "16 GPUs". Where the job does not use all GPUs of its nodes, it is "8 GPUs on 2
    nodes".
    """
    gpus, nodes = job.world_size, job.num_nodes
    nodes_phrase = (
        f" on {nodes:,} nodes" if nodes > 1 and min(job.placement.gpus) < job.cluster.gpus_per_node else ""
    )
    return format_gpus(gpus) + nodes_phrase


def parallelism_label(job: Job) -> str:
    """The degrees above 1, outermost first, as in "PP 4 (1f1b) x DP 16 x TP 8, EP 8". Empty for data
    parallelism alone.
    """
    parallelism = job.parallelism
    if parallelism.is_trivial:
        return ""
    abbreviations = {PIPELINE: "PP", DATA: "DP", CONTEXT: "CP", TENSOR: "TP"}
    degree_labels = [f"{abbreviations[axis]} {size}" for axis, size in job.mesh.axes if size > 1]
    virtual_phrase = f", {parallelism.virtual_stages} stages each" if parallelism.virtual_stages > 1 else ""
    pipeline_label = f"PP {parallelism.pipeline} ({parallelism.schedule}{virtual_phrase})"
    label = " x ".join(pipeline_label if word.startswith("PP") else word for word in degree_labels)
    experts = parallelism.experts
    expert_labels = [
        f"{word} {size}" for word, size in (("EP", experts.ranks), ("ETP", experts.tensor)) if size > 1
    ]
    return f"{label}, {' x '.join(expert_labels)}" if expert_labels else label


def batch_label(training: TrainingConfig, sizes: Sequence[int] = ()) -> str:
    """Tokens of a replica's step, as in "2 x 8,192 tokens" or "2 x 8,192 tokens x 4 micro-batches".

    With `sizes` of micro-batches that differ, it is "1 to 2 x 8,192 tokens".
    """
    steps = training.gradient_accumulation_steps
    steps_phrase = f" x {steps:,} micro-batches" if steps > 1 else ""
    size = f"{min(sizes):,} to {max(sizes):,}" if sizes else f"{training.micro_batch_size:,}"
    return f"{size} x {training.sequence_length:,} tokens{steps_phrase}"


def training_label(job: Job) -> str:
    """Precision and checkpointing, as in "bf16, full activation checkpointing", with "(1 block of 2)" or the
    policies by block.
    """
    training = job.training
    policy, interval = training.activation_checkpointing, training.checkpoint_every
    if training.block_checkpointing:
        checkpointing = f"{', '.join(sorted(set(training.block_checkpointing)))} by block"
    else:
        checkpointing = "no" if policy == "none" else policy
        if training.recompute_modules:
            core = () if policy == "none" else ("core_attn",)
            checkpointing = f"selective ({', '.join((*core, *training.recompute_modules))})"
        checkpointing += f" (1 block of {interval})" if interval > 1 and policy != "none" else ""
    return f"{training.precision}, {checkpointing} activation checkpointing"
