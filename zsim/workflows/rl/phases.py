"""Seconds of the phases of an RL step, each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from zsim.api import Result
from zsim.dtypes import DTYPE_BYTES
from zsim.engine.micro_batches import SimulatedStep, simulate_step
from zsim.engine.simulator import Simulator
from zsim.explain.report_of import report_of_step
from zsim.fabric.fabric import idle_fabric
from zsim.operations.operation import Parameter
from zsim.plan.memory.capacity import framework_memory
from zsim.plan.memory.tensors import bytes_at_peak, resident_bytes_by_category
from zsim.plan.ops import MODEL_STATES, Collective, Group, Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.model.adapters import base_model
from zsim.specs.model.spec import ModelSpec
from zsim.specs.topology.topology import Topology
from zsim.workflows.rl.job import RlJob, packed_job

SLEEP_BYTES_PER_SECOND = 37e9
"""Bytes that an engine's sleep gives back each second: 51.57 GiB in 1.3 to 1.6 s (huggingface/trl #4086)."""
WAKE_SECONDS = 0.3  # of an engine, the same source


TRAINED_BYTES = 2  # of a weight, as the trainer has it for its products
BROADCAST_SHARE = 0.46
"""Part of the bandwidth of its links that a broadcast of buckets reaches, with packing, loading and the waits
of sender and receivers for each other: the geometric mean of four syncs of 27 to 235 billion parameters by
one sender, 0.39 to 0.57 (verl-project/verl docs/advance/fully_async.md and pull request 7291, as
`python -m validation.rl.calibration RUNS.csv` prints them)."""
RESHARD_EXCESS = 1.5  # of the bytes that the slowest receiver gets, as ranks do not all send evenly


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of the phases of a step that do not depend on the rollout."""

    update: Result
    """One update, simulated."""
    training: float
    """All updates of a step."""
    old_logprobs: float
    reference: float
    values: float
    """The critic's pass over all samples."""
    reward: float
    weight_sync: float
    offload: float
    controller: float
    """Python outside all phases, and the data that the controller hands out."""
    pass_peak: Mapping[str, int]
    """Bytes of the fullest GPU by category at the peak of the actor's pass without backward. Empty without
    passes."""
    critic_peak: Mapping[str, int]
    """The same of the critic's update."""
    states: Mapping[str, int]
    """Bytes of the actor's states between updates, see `kept_states`."""
    critic_states: Mapping[str, int]
    """The same of the critic's."""
    reward_peak: Mapping[str, int]
    """The same of the reward model's pass."""

    @property
    def training_side(self) -> float:
        """Seconds of the trainer's own phases."""
        return self.training + self.old_logprobs + self.reference + self.values


def phase_times(job: RlJob, simulator: Simulator) -> PhaseTimes:
    """Simulate the trainer's update and passes, and price the rest."""
    step = simulate_step(job.update_job, simulate=simulator.outcome)
    report = report_of_step(step, 0.0)
    update = Result(job.update_job, step, report)
    forward = reference = 0.0
    pass_peak, critic_peak, reward_peak = dict[str, int](), dict[str, int](), dict[str, int]()
    states, critic_states = kept_states(step.peak_plan), dict[str, int]()
    if job.passes:
        whole_pass = _pass(job, job.update_job, simulator)
        forward = reference = whole_pass.seconds
        pass_peak = _peak_of(whole_pass)
    if job.has_reference and job.has_adapters:
        base = replace(job.update_job, model=base_model(job.update_job.model))
        reference = _pass(job, base, simulator).seconds
    values = critic_updates = 0.0
    if job.critic_job is not None:
        values = _pass(job, job.critic_job, simulator).seconds
        critic = simulate_step(job.critic_job, simulate=simulator.outcome, seconds_only=True)
        critic_updates, critic_peak = job.updates * critic.seconds, _peak_of(critic)
        critic_states = kept_states(critic.peak_plan)
    tokens = float(job.samples.totals.sum()) / 1e6
    rates = job.framework.controllers[job.table.placement]
    extra = {name: job.chunks * seconds for name, seconds in rates.phases.items()}  # of every call
    reload = reload_seconds(job, states)
    critic_reload = reload_seconds(job, critic_states)
    # A reference without adapters is a model of its own, which verl leaves where it is.
    reference_reload = reload if job.has_adapters else 0.0
    reward = reward_seconds(job)
    if job.reward_job is not None:
        scoring = simulate_step(job.reward_job, simulate=simulator.outcome, seconds_only=True)
        reward, reward_peak = reward + scoring.seconds, _peak_of(scoring)
    return PhaseTimes(
        update,
        job.updates * step.seconds + critic_updates + reload + critic_reload + extra.get("training", 0.0),
        forward + reload + extra.get("old_logprobs", 0.0) if job.recomputes_logprobs else 0.0,
        reference + reference_reload + extra.get("reference", 0.0) if job.has_reference else 0.0,
        values + critic_reload + extra.get("values", 0.0) if values else 0.0,
        reward,
        0.0 if shares_weights(job, states) else sync_seconds(job),
        offload_seconds(job, states, critic_states),
        job.chunks * rates.seconds + rates.seconds_per_million_tokens * tokens,
        pass_peak,
        critic_peak,
        states,
        critic_states,
        reward_peak,
    )


def _pass(job: RlJob, update_job: Job, simulator: Simulator) -> SimulatedStep:
    """A pass without backward over all samples."""
    forward_job = packed_job(update_job, job.whole_pass, forward_only=True)
    return simulate_step(forward_job, simulate=simulator.outcome, seconds_only=True)


def _peak_of(step: SimulatedStep) -> dict[str, int]:
    """Bytes of the fullest GPU by category at the peak of a step."""
    plan = step.peak_plan
    return {**bytes_at_peak(plan), "framework": framework_memory(step.job, plan).bytes}


def kept_states(plan: Plan) -> dict[str, int]:
    """Bytes of the states that the fullest GPU has between updates. Gradients are among them only as buffers
    that stay, of Megatron and of ZeRO-3. Others are let go behind the updates of a rollout (volcengine/verl
    0081137b verl/workers/actor/dp_actor.py `update_policy`, NVIDIA-NeMo/RL
    nemo_rl/models/policy/dtensor_policy_worker.py `train`, and transformers' Trainer, which TRL's is)."""
    resident = resident_bytes_by_category(plan)
    return {name: resident[name] for name in MODEL_STATES}


def reload_seconds(job: RlJob, states: Mapping[str, int]) -> float:
    """Seconds that offloaded parameters take to the GPUs before a pass of the trainer and back behind it,
    where the framework moves them for each."""
    if not job.offloads.parameters:
        return 0.0
    return 2 * states.get("parameters", 0) / job.framework.reload_bandwidth


def reward_seconds(job: RlJob) -> float:
    """Seconds that a rule takes for all samples, on its workers. 0 where it runs beside the rollout."""
    reward = job.table.reward
    if reward.overlap:
        return 0.0
    return ceil(job.num_samples / reward.workers) * reward.seconds_per_sample


def shares_weights(job: RlJob, states: Mapping[str, int]) -> bool:
    """Whether a hybrid engine generates with the trainer's parameters as they are, which ZeRO-0 to 2 leave
    whole on every GPU: `generate` gathers those of ZeRO-3 alone (DeepSpeed edaa7221
    deepspeed/runtime/hybrid_engine.py).
    """
    whole = parameter_bytes(job.update_job) * job.update_job.model.numel
    return job.limits.has_static_batches and states.get("parameters", 0) >= whole


def sync_seconds(job: RlJob) -> float:
    """Seconds until the engines have new weights, of each batch where a hybrid engine gathers them.

    The calls for every parameter, and the slower of the way to the engines and of their copies. From shard to
    shard a GPU of an engine gets what it keeps.
    """
    rates = job.sync
    num_bytes, tensors = model_bytes(job), num_tensors(job.update_job.model)
    calls = rates.seconds_per_tensor * tensors
    if DTYPE_BYTES[job.model.layout.weight_dtype] < TRAINED_BYTES:
        calls += rates.seconds_per_quantized_tensor * tensors
    nic = job.cluster.nic.bandwidth
    path, copied = 0.0, num_bytes
    if job.transport == "ipc":
        path = _gather_seconds(job, num_bytes, rates.bucket_bytes)
    elif job.transport == "broadcast":
        path = num_bytes / (BROADCAST_SHARE * broadcast_bandwidth(job))
    elif job.transport == "reshard":
        copied = RESHARD_EXCESS * num_bytes / job.model.layout.gpus
        path = copied / nic
    seconds = rates.seconds + calls + max(path, copied / rates.bytes_per_second)
    return job.rollout_batches * seconds / job.table.sync.every


def broadcast_bandwidth(job: RlJob) -> float:
    """Bytes/s of the links by which a broadcast leaves its sender.

    The GPU's own where all GPUs are of one node or NVLink domain, else the cards of the sender, which are all
    of its node's where all ranks of the trainer are members.
    """
    cluster = job.cluster
    domain = cluster.gpus_per_node * cluster.node_link.nodes_per_domain
    if job.training_gpus + job.rollout_gpus <= domain:
        return cluster.node_link.bandwidth or cluster.pcie.bandwidth
    cards = min(cluster.nic.per_node, job.training_gpus) if job.sync.trainer_joins else 1
    return cards * cluster.nic.bandwidth


def model_bytes(job: RlJob) -> float:
    """Bytes of the weights that the engines get."""
    model = job.update_job.model
    if not job.framework.has_one_dtype:
        return float(model.numel * DTYPE_BYTES[job.model.layout.weight_dtype])
    size = parameter_bytes(job.update_job)
    return float(sum(p.numel * _sent_bytes(p, size) for _, p in model.named_parameters()))


def _sent_bytes(parameter: Parameter, trained_bytes: int) -> int:
    """Bytes of an element of a weight that is sent as it is stored, a frozen one in a type of its own. Types
    of fewer bits than the engine's are converted.
    """
    if parameter.trainable or not parameter.stored_dtype:
        return trained_bytes
    if parameter.is_packed:
        return TRAINED_BYTES
    return max(DTYPE_BYTES[parameter.stored_dtype], TRAINED_BYTES)


def parameter_bytes(trainer: Job) -> int:
    """Bytes of a weight in the parameters that a trainer has on its GPUs."""
    training = trainer.training
    if training_of(trainer.kind).has_stored_dtype:
        return DTYPE_BYTES[training.stored_dtype]
    return TRAINED_BYTES if training.precision == "fp8" else DTYPE_BYTES[training.precision]


def num_tensors(model: ModelSpec) -> int:
    """Parameters that a sync handles one by one: every expert of a layer has its own in a checkpoint, and its
    gate and its product beside that are two (Qwen3-30B-A3B: 18,867, as its index of safetensors has them).
    """
    return sum(
        parameter.shape[0] * (2 if "gate_up" in parameter.name else 1)
        if name in model.expert_names and len(parameter.shape) == 3
        else 1
        for name, parameter in model.named_parameters()
    )


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


def offload_seconds(job: RlJob, actor: Mapping[str, int], critic: Mapping[str, int]) -> float:
    """Seconds that a colocated job's states, the critic's among them, take to the host and back, and the
    engine's sleep and wake. Buffers of gradients are let go without a copy (NVIDIA/Megatron-LM core_v0.16.0
    megatron/core/distributed/param_and_grad_buffer.py `offload_to_cpu`)."""
    if not job.is_colocated:
        return 0.0
    names = ("optimizer_states",) * job.offloads.optimizer + ("parameters",) * job.offloads.parameters
    moved = sum(states.get(name, 0) for states in (actor, critic) for name in names)
    seconds = 2 * moved / job.cluster.copy_bandwidth
    if job.offloads.sleep_level:
        engine_bytes = job.model.weight_bytes + job.cache_bytes
        seconds += engine_bytes / SLEEP_BYTES_PER_SECOND + WAKE_SECONDS
    return seconds
