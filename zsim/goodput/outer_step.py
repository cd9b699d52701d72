"""The outer step of local SGD and DiLoCo: what replicas that train separately send when they synchronize.

Every rank averages its shard with the ranks of the other replicas that hold the same one. That is an
all-reduce over R ranks, of which a ring sends 2 (R - 1) / R times the shard from each (torchft 73dafea
local_sgd.py, and Patarasuk and Yuan 2009). DiLoCo sends fp32 changes, a fragment of the model at a time, and
keeps the last common parameters in host memory, from where they come and to where they go at each outer step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zsim.api import Result
from zsim.errors import InputError, NotSimulatedError
from zsim.fabric.fabric import idle_seconds
from zsim.goodput.checkpoints.framework import framework_checkpoint
from zsim.goodput.checkpoints.machine import SavingMachine, saving_rates
from zsim.goodput.checkpoints.tensors import collect_model_states
from zsim.plan.ops import Collective, Group
from zsim.specs.experiment.job import Job, job_topology
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.run.run import LocalTrainingTable
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.registry import kinds

_FP32 = 4


@dataclass(frozen=True, slots=True)
class OuterStep:
    """A synchronization of `replicas`."""

    replicas: int
    bytes_per_gpu: float
    """Bytes that the fullest rank sends for all fragments."""
    averaging_seconds: float
    """All-reduce of one fragment, on idle links."""
    copying_seconds: float
    """Copies of one fragment, on idle links."""
    added_seconds: float
    """The mean addition to an inner step."""


def replica_experiment(experiment: Experiment, table: LocalTrainingTable) -> Experiment:
    """The experiment of a replica: its part of the nodes. Raises InputError where they do not divide."""
    job = resolve(experiment)
    if job.num_nodes % table.replicas:
        raise InputError(
            f"run.local.replicas: found {table.replicas}, which does not divide the {job.num_nodes} nodes; "
            f"expected {_divisor_words(job.num_nodes)}, as a replica has whole nodes"
        )
    if not framework_checkpoint(job.kind).has_local_replicas:
        raise NotSimulatedError(
            f"run.local: replicas of strategy '{job.kind}' are not simulated; expected strategy.kind "
            f"{' or '.join(repr(kind) for kind in _local_kinds())}, or no [run.local]"
        )
    return change_experiment(experiment, {"nodes": job.num_nodes // table.replicas, "gpus": None})


def _local_kinds() -> list[str]:
    """The strategies whose replicas may train separately."""
    return [kind for kind in reversed(kinds()) if framework_checkpoint(kind).has_local_replicas]


def _divisor_words(nodes: int) -> str:
    """The possible numbers of replicas of so many nodes, in words."""
    divisors = [str(count) for count in range(2, nodes + 1) if nodes % count == 0]
    return " or ".join(divisors) if divisors else "more nodes"


def outer_step(experiment: Experiment, table: LocalTrainingTable, inner: Result) -> OuterStep:
    """The outer step that follows inner steps as `inner` of one replica."""
    full_job, shard = resolve(experiment), _shard_bytes(inner.job)
    world, replicas = full_job.world_size, table.replicas
    groups = {"replicas": Group.regular("replicas", world, replicas, world // replicas)}
    fragment_bytes = -(-shard // table.fragments)
    averaging = idle_seconds(
        job_topology(full_job), groups, [Collective("all_reduce", fragment_bytes, "fp32", "replicas")]
    )
    copying = 0.0
    if table.method == "diloco":
        machine = SavingMachine(inner.job, saving_rates())
        amounts = np.full(inner.job.world_size, 2 * fragment_bytes, dtype=np.int64)  # there and back
        copying = machine.copy_seconds(amounts, is_pinned=True)
    waiting_seconds = max(0.0, averaging - table.delay * inner.report.step_seconds) + copying
    return OuterStep(
        replicas,
        2 * (replicas - 1) / replicas * fragment_bytes * table.fragments,
        averaging,
        copying,
        waiting_seconds * table.fragments / table.every,
    )


def _shard_bytes(job: Job) -> int:
    """fp32 bytes of the parameters of the fullest rank."""
    model_states = collect_model_states(job)
    num_shards = framework_checkpoint(job.kind).num_shards(job, job.strategy, model_states)
    largest = max(model_states.numels)
    return -(-largest // num_shards) * _FP32
