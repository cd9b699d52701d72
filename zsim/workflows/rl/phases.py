"""Seconds of the phases of an RL step, each by itself."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from zsim.api import Result
from zsim.dtypes import DTYPE_BYTES
from zsim.engine.micro_batches import simulate_step
from zsim.engine.simulator import Simulator
from zsim.explain.report_of import report_of_step
from zsim.fabric.idle import idle_fabric
from zsim.plan.ops import Collective, Group
from zsim.specs.model.spec import ModelSpec
from zsim.specs.topology.topology import Topology
from zsim.workflows.rl.job import RlJob, packed_job

SLEEP_BYTES_PER_SECOND = 37e9
"""Bytes that an engine's sleep gives back each second: 51.57 GiB in 1.3 to 1.6 s (huggingface/trl #4086)."""
WAKE_SECONDS = 0.3  # of an engine, the same source


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of the phases of a step that do not depend on the rollout."""

    update: Result
    """One update, simulated."""
    training: float
    """All updates of a step."""
    old_logprobs: float
    reference: float
    reward: float
    weight_sync: float
    offload: float
    controller: float
    """Python outside all phases, and the data that the controller hands out."""

    @property
    def training_side(self) -> float:
        """Seconds of the trainer's own phases."""
        return self.training + self.old_logprobs + self.reference


def phase_times(job: RlJob, simulator: Simulator) -> PhaseTimes:
    """Simulate the trainer's update and passes, and price the rest."""
    step = simulate_step(job.update_job, simulate=simulator.outcome)
    report = report_of_step(step, 0.0)
    update = Result(job.update_job, step.outcome.plan, step.outcome.trace, report)
    forward = 0.0
    if job.passes:
        forward_job = packed_job(job.update_job, job.whole_pass, forward_only=True)
        forward = simulate_step(forward_job, simulate=simulator.outcome, seconds_only=True).seconds
    tokens = job.samples.totals.sum() / 1e6
    rates = job.framework.controllers[job.table.placement]
    return PhaseTimes(
        update,
        job.updates * step.seconds,
        forward if job.recomputes_logprobs else 0.0,
        forward if job.has_reference else 0.0,
        reward_seconds(job),
        sync_seconds(job),
        offload_seconds(job, update),
        rates.seconds + rates.seconds_per_million_tokens * tokens,
    )


def reward_seconds(job: RlJob) -> float:
    """Seconds that a rule takes for all samples, on its workers. 0 where it runs beside the rollout."""
    reward = job.table.reward
    if reward.overlap:
        return 0.0
    return ceil(job.num_samples / reward.workers) * reward.seconds_per_sample


def sync_seconds(job: RlJob) -> float:
    """Seconds until the engines have new weights.

    The slowest of three: the trainer's gather and the way to the engines, the engines' copies, and the calls
    for every parameter. A broadcast leaves the trainer by one rank's network card.
    """
    rates = job.sync
    num_bytes = model_bytes(job)
    calls = rates.seconds_per_tensor * num_tensors(job.update_job.model)
    copies = num_bytes / rates.bytes_per_second
    path = 0.0
    if rates.transport == "ipc":
        path = _gather_seconds(job, num_bytes, rates.bucket_bytes)
    elif rates.transport == "broadcast":
        path = num_bytes / job.cluster.nic.bandwidth
    elif rates.transport == "reshard":
        path = num_bytes / job.model.layout.gpus / job.cluster.nic.bandwidth
    return (rates.seconds + calls + max(path, copies)) / job.table.sync.every


def model_bytes(job: RlJob) -> float:
    """Bytes of the weights that the engines get."""
    return float(job.update_job.model.numel * DTYPE_BYTES[job.model.layout.weight_dtype])


def num_tensors(model: ModelSpec) -> int:
    """Parameters that a sync handles one by one: every expert of a layer has its own in a checkpoint."""
    count = 0
    for _, parameter in model.named_parameters():
        count += parameter.shape[0] if len(parameter.shape) == 3 else 1
    return count


def _gather_seconds(job: RlJob, num_bytes: float, bucket_bytes: float) -> float:
    """Seconds to gather all parameters on every GPU, bucket by bucket, on otherwise idle links."""
    ranks = job.training_gpus
    if ranks == 1:
        return 0.0
    placement = job.update_job.placement
    topology = Topology(job.cluster, placement.fabric_nodes, placement.gpus_per_node, None)
    size = int(min(bucket_bytes, num_bytes))
    collective = Collective("all_gather", size, "bf16", "gather")
    fabric = idle_fabric(topology, Group.regular("gather", ranks, ranks), [collective])
    seconds = fabric.transfer(collective, 0).isolated_seconds
    return seconds * num_bytes / size


def offload_seconds(job: RlJob, update: Result) -> float:
    """Seconds that a colocated job's states take to the host and back, and the engine's sleep and wake."""
    if not job.is_colocated:
        return 0.0
    peak = update.report.peaks["gpu"].by_category
    moved = 0
    if job.offloads.optimizer:
        moved += peak.get("optimizer_states", 0)
    if job.offloads.parameters:
        moved += peak.get("parameters", 0) + peak.get("gradients", 0)
    seconds = 2 * moved / job.cluster.pcie.bandwidth
    if job.offloads.sleep_level:
        engine_bytes = job.model.weight_bytes + job.limits.cache_blocks * 16 * job.model.cache_bytes_per_token
        seconds += engine_bytes / SLEEP_BYTES_PER_SECOND + WAKE_SECONDS
    return seconds
