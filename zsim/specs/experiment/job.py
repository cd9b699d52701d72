"""A job: an experiment with every name looked up and every default filled in, and its placement in a
fabric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from zsim.arrays import Floats, Ints, unique
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.faults import FaultsTable, apply_faults, kernel_slowdowns
from zsim.specs.experiment.jitter import JitterConfig, slowest_gpu_factor
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.tables import (
    CostTable,
    Experiment,
    SimulationTable,
)
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import CONTEXT, DATA, PIPELINE, TENSOR, Mesh, ParallelismConfig
from zsim.specs.strategy.table import StrategyConfig
from zsim.specs.strategy.training import TrainingConfig
from zsim.specs.topology.topology import Topology
from zsim.units import format_gpus

Strategy = StrategyConfig


@dataclass(frozen=True)
class Job:
    """The input of a simulation. `experiment` is the request, and all other fields describe what is
    simulated. `gpus_per_node` is the maximum number of GPUs that the job uses on a node.
    """

    experiment: Experiment
    """The request as the user wrote it."""
    model: ModelSpec
    cluster: Cluster
    placement: Placement
    training: TrainingConfig
    strategy: Strategy
    notes: tuple[str, ...]
    colocated_jobs: Mapping[str, Job] = field(default_factory=dict)
    """Co-located jobs on the same fabric, by name."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    sequences: float | None = None
    """Sequences per rank and step if they are not a whole number of micro-batches, so that the last one is
    smaller. Else None.
    """
    micro_batch_sizes: tuple[int, ...] = ()
    """Sequences of a micro-batch by type of the cluster's nodes, if they differ. `training` has that of the
    first. Else ().
    """
    simulation: SimulationTable = field(default_factory=SimulationTable)
    faults: FaultsTable = field(default_factory=FaultsTable)
    jitter: JitterConfig | None = None
    cost: CostTable | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.placement.nodes)

    @property
    def gpus_per_node(self) -> int:
        return self.placement.gpus_per_node

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model, each of which trains on its own micro-batches."""
        return self.world_size // self.parallelism.model_ranks

    @property
    def sequences_per_step(self) -> float:
        """Sequences of all GPUs in a step, the global batch."""
        training = self.training
        sequences = self.sequences or training.micro_batch_size * training.gradient_accumulation_steps
        if self.micro_batch_sizes:
            micro_batch = np.mean([self.micro_batch_size_on(kind) for kind in self.rank_types.tolist()])
            sequences = float(micro_batch) * training.gradient_accumulation_steps
        return self.data_parallel_size * sequences

    @property
    def may_repeat_micro_batches(self) -> bool:
        """Whether micro-batches in the middle of a step may be alike: where there is no pipeline, and nothing
        else makes them differ.
        """
        is_plain = self.parallelism.pipeline == 1 and self.sequences is None
        return is_plain and self.jitter is None and not self.colocated_jobs

    @property
    def nodes_per_domain(self) -> int:
        """See `Placement.nodes_per_domain`."""
        return self.placement.nodes_per_domain(self.cluster.node_link)

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks, by their coordinates along each parallelism."""
        return self.parallelism.mesh(self.world_size)

    @cached_property
    def rank_types(self) -> Ints:
        """Per rank, the type of its node, as an index into the cluster's `gpus`."""
        if not self.cluster.nodes:
            return np.zeros(self.world_size, dtype=np.int64)
        return np.repeat(self.cluster.node_type_indices[list(self.placement.nodes)], self.placement.gpus)

    @cached_property
    def types(self) -> tuple[int, ...]:
        """The types of nodes that the job is on."""
        return tuple(unique(self.rank_types))

    def micro_batch_size_on(self, type_of_node: int) -> int:
        """Sequences in a micro-batch of a rank on a type of nodes."""
        sizes = self.micro_batch_sizes
        return sizes[type_of_node] if sizes else self.training.micro_batch_size

    @property
    def kind(self) -> str:
        return self.experiment.strategy.kind


def job_topology(job: Job) -> Topology:
    """The fabric that the job is on, with its ranks placed and its faults applied.

    Raises InputError for faults of links and cards that the fabric does not have.
    """
    placement = job.placement
    per_node = max(sharing_job.gpus_per_node for sharing_job in (job, *job.colocated_jobs.values()))
    slots = None if placement.is_plain else placement.slots(per_node)
    topology = Topology(job.cluster, placement.fabric_nodes, per_node, slots)
    return apply_faults(topology, job.faults)


def colocated_topology(topology: Topology, job: Job) -> Topology:
    """The fabric with the ranks of a co-located job instead."""
    return topology.replace_slots(job.placement.slots(topology.gpus_per_node))


def slowdowns_of(job: Job, topology: Topology) -> Floats:
    """Per rank of the job, the factor by which its kernels take longer. `topology` is the job's.

    Raises InputError for ranks and nodes that no job is on.
    """
    colocated_topologies = [
        colocated_topology(topology, colocated_job) for colocated_job in job.colocated_jobs.values()
    ]
    return kernel_slowdowns(
        topology, job.faults, colocated_topologies=colocated_topologies
    ) * slowest_gpu_slowdown(job)


def slowest_gpu_slowdown(job: Job) -> float:
    """The factor by which kernels take longer on the job's slowest GPU (`slowest_gpu_factor`).

    It is 1 with jitter, where each GPU is drawn.
    """
    return 1.0 if job.jitter is not None else slowest_gpu_factor(job.world_size)


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
