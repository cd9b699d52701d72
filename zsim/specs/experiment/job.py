"""A job: an experiment with every name looked up and every default filled in, and its placement in a
fabric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from zsim.arrays import Floats, Ints, unique
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.faults import FaultsTable, apply_faults, kernel_slowdowns
from zsim.specs.experiment.jitter import JitterConfig, slowest_gpu_factor
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.run_cost import CostTable
from zsim.specs.experiment.tables import (
    Experiment,
    SimulationTable,
)
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.mesh import Mesh
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyConfig
from zsim.specs.strategy.training import TrainingConfig
from zsim.specs.topology.topology import Topology

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
