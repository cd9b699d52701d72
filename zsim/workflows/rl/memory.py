"""The memory of a GPU, and of a node's host, in each phase of an RL step.

A colocated GPU holds the trainer's states and the engine's in turn. What the trainer does not offload stays
beside the engine's share, and where both are more than the GPU has, the engine cannot start. What it offloads
is page-locked memory of the host, and so are the weights of an engine that sleeps at level 1 (vLLM
`CuMemAllocator.sleep`, which keeps a copy on the host for what it frees, and at level 2 none).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from math import floor

from zsim.plan.memory.capacity import usable_bytes
from zsim.units import format_bytes
from zsim.workflows.rl.job import RlJob
from zsim.workflows.rl.phases import TRAINED_BYTES, PhaseTimes, parameter_bytes, shares_weights
from zsim.workflows.rollout.limits import ENGINE_OVERHEAD

ENGINE = ("rollout_weights", "kv_cache", "engine")


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Bytes of a GPU, or of a node's host, in a phase, by what they are for."""

    by_category: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())

    def to_dict(self) -> dict[str, int]:
        return {"total": self.total, **self.by_category}


def memory_by_phase(job: RlJob, times: PhaseTimes) -> dict[str, PhaseMemory]:
    """The fullest GPU of each phase. Passes without backward are one where their micro-batches are not those
    of an update, whose peak is above theirs otherwise. Training is the actor's update or the critic's, beside
    the states of the other that stay."""
    update = {name: int(size) for name, size in times.update.report.peaks["gpu"].at_total.items()}
    states = times.states
    others = {
        "critic": sum(_kept(job, times.critic_states).values()),
        "reward": times.reward_peak.get("parameters", 0),
        "reference": _shard_bytes(job, states["parameters"]) if job.keeps_reference else 0,
    }
    others = {name: size for name, size in others.items() if size}
    passes = {**times.pass_peak, **others}
    if job.offloads.optimizer:
        passes.pop("optimizer_states", None)
    actor = {"actor": sum(_kept(job, states).values())}
    critic = {**times.critic_peak, **actor, **{n: size for n, size in others.items() if n != "critic"}}
    update = max(({**update, **others}, critic), key=lambda sizes: sum(sizes.values()))
    shares = shares_weights(job, states)
    engine = {
        "rollout_weights": 0 if shares else job.model.weight_bytes,
        "kv_cache": job.cache_bytes,
        "engine": ENGINE_OVERHEAD,
    }
    sleeping = engine if job.offloads.sleep_level == 0 else {"engine": ENGINE_OVERHEAD}
    if job.limits.has_static_batches:  # the gathered weights are let go, and the workspace stays
        sleeping = {**sleeping, "rollout_weights": 0}
    engine_rest = sleeping if job.is_colocated else {}
    own_passes = {_pass_phase(job): PhaseMemory({**passes, **engine_rest})} if _pass_keys(job) else {}
    training = PhaseMemory({**update, **engine_rest})
    if not job.is_colocated:
        bucket = {"bucket": int(2 * job.sync.bucket_bytes)}
        weight_sync = PhaseMemory({**states, **others, **bucket})
        return {
            "rollout": PhaseMemory(engine), **own_passes, "training": training, "weight_sync": weight_sync,
        }  # fmt: skip
    remnant = {**_kept(job, states), **others}
    weights = {"parameters": states["parameters"], "rollout_weights": engine["rollout_weights"]}
    bucket = {"bucket": 0 if shares else int(job.sync.bucket_bytes), "engine": ENGINE_OVERHEAD}
    return {
        "rollout": PhaseMemory({**remnant, **engine}),
        **own_passes,
        "training": training,
        "weight_sync": PhaseMemory({**remnant, **weights, **bucket}),
    }


def host_memory_by_phase(job: RlJob, times: PhaseTimes) -> dict[str, PhaseMemory]:
    """The host of a node that trains, in each phase: what the trainer has there in its update, and copies of
    what leaves the GPUs."""
    peak = times.update.report.peaks["host"]
    gpu, ranks = times.states, min(job.training_gpus, job.cluster.gpus_per_node)
    trainer = {name: int(size) for name, size in peak.at_total.items() if size}
    if job.has_reference and not job.keeps_reference and not job.has_adapters:
        trainer["reference"] = ranks * _shard_bytes(job, gpu["parameters"])
    offloads = job.offloads
    states = ("optimizer_states",) * offloads.optimizer, ("parameters",) * offloads.parameters
    optimizer, parameters = ({name: ranks * gpu[name] for name in names} for names in states)
    if critic := ranks * sum(times.critic_states.get(name, 0) for names in states for name in names):
        trainer["critic"] = critic
    asleep = {"rollout_weights": ranks * job.model.weight_bytes} if offloads.sleep_level == 1 else {}
    own_passes = {_pass_phase(job): PhaseMemory(_sum(trainer, optimizer, asleep))} if _pass_keys(job) else {}
    return {
        "rollout": PhaseMemory(_sum(trainer, optimizer, parameters)),
        **own_passes,
        "training": PhaseMemory(_sum(trainer, asleep)),
        "weight_sync": PhaseMemory(_sum(trainer, optimizer)),
    }


def _pass_keys(job: RlJob) -> list[str]:
    """The keys by which passes without backward have micro-batches of their own. None without passes."""
    names = ("logprob_micro_batch_size", "logprob_micro_batch_tokens")
    return [f"rl.{name}" for name in names if job.passes and getattr(job.table, name)]


def _pass_phase(job: RlJob) -> str:
    """The phase of the passes without backward."""
    return "old_logprobs" if job.recomputes_logprobs else "reference"


def _sum(*tables: Mapping[str, int]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for table in tables:
        total.update(table)
    return dict(total)


def _kept(job: RlJob, states: Mapping[str, int]) -> dict[str, int]:
    """The states of a trainer that stay on the GPU while others work."""
    names = ("parameters", "gradients") * (not job.offloads.parameters)
    names += ("optimizer_states",) * (not job.offloads.optimizer)
    return {name: states.get(name, 0) for name in names}


def _shard_bytes(job: RlJob, shard_bytes: int) -> int:
    """A GPU's shard of a reference, in 16 bits or the actor's type, cut as the actor's parameters are."""
    numel, size = job.update_job.model.numel, parameter_bytes(job.update_job)
    own_size = size if job.framework.has_one_dtype else min(size, TRAINED_BYTES)
    return round(own_size * numel * min(1.0, shard_bytes / (size * numel)))


_REFERENCE_ON_HOST = 'rl.reference = "host"'
_OPTIMIZER_ON_HOST = "rl.offload.optimizer = true"
_SLEEP = "rl.offload.sleep_level = 1"


def engine_bytes(phase: PhaseMemory) -> int:
    """The part of a phase that an engine takes, whatever the trainer has."""
    return sum(phase.by_category.get(name, 0) for name in ENGINE)


def remedies(
    job: RlJob,
    phases: Mapping[str, PhaseMemory],
    capacity: int,
    *,
    is_host: bool = False,
    unlikely: Container[str] = (),
) -> Iterator[str]:
    """Sentences that name the keys with which each phase fits into `capacity` bytes, of a GPU or of a node's
    host, that does not, or that is one of the `unlikely`."""
    room, switches_of = "a GPU can use", _switches
    if is_host:
        room, switches_of = "the host of a node has", _host_switches
    for name, phase in phases.items():
        if (missing := phase.total - capacity) > 0 or name in unlikely:
            need = f"needs {format_bytes(missing)} more than {room}" if missing > 0 else "may need more"
            freed = _freed_bytes(phase)
            switches = [
                f"{words} ({format_bytes(freed[words])} of it)"
                if freed.get(words, missing) < missing
                else words
                for words in switches_of(job, name, phase)
            ]
            yield f"{name.replace('_', ' ')} {need}: {', or '.join(switches)}"


def _freed_bytes(phase: PhaseMemory) -> dict[str, int]:
    """The bytes of a phase that each switch frees, of those that free whole categories."""
    kept = phase.by_category
    return {
        _REFERENCE_ON_HOST: kept.get("reference", 0),
        _OPTIMIZER_ON_HOST: kept.get("optimizer_states", 0),
        _SLEEP: engine_bytes(phase) - kept.get("engine", 0),
    }


def _host_switches(job: RlJob, name: str, phase: PhaseMemory) -> list[str]:
    kept = phase.by_category
    switches = {
        'rl.reference = "resident"': kept.get("reference"),
        "rl.offload.sleep_level = 2": kept.get("rollout_weights"),
        "rl.offload.optimizer = false": name != "training" and job.offloads.optimizer,
        "rl.offload.parameters = false": name == "rollout" and job.offloads.parameters,
    }
    return [words for words, is_there in switches.items() if is_there] or ["more nodes"]


def _switches(job: RlJob, name: str, phase: PhaseMemory) -> list[str]:
    kept = phase.by_category
    switches = []
    if name == "rollout" and job.limits.has_static_batches:
        switches += ["a smaller rl.rollout.max_num_seqs"] * (job.limits.max_num_seqs > 1)
    elif name == "rollout":
        capacity, remnant = job.cluster.gpu.memory.capacity, phase.total - engine_bytes(phase)
        share = 1 - remnant / usable_bytes(job.cluster) - kept.get("engine", 0) / capacity
        if share > 0.1:
            switches.append(f"rl.rollout.gpu_memory_utilization = {floor(100 * share) / 100:g}")
    if kept.get("reference"):
        switches.append(_REFERENCE_ON_HOST)
    waits = bool(kept.get("actor") or kept.get("critic"))  # one while the other is trained
    if job.is_colocated and (waits or name != "training"):
        if kept.get("optimizer_states") and not job.offloads.optimizer:
            switches.append(_OPTIMIZER_ON_HOST)
        if kept.get("parameters") and not job.offloads.parameters and name in ("rollout", "training"):
            switches.append("rl.offload.parameters = true")
    if name == _pass_phase(job):
        switches += [f"a smaller {key}" for key in _pass_keys(job)]
    if name == "weight_sync":
        switches.append("a smaller rl.sync.bucket")
    if name == "training":
        if "kv_cache" in kept:
            switches.append(_SLEEP)
        training = job.update_job.training
        if training.activation_checkpointing != "full" and not training.block_checkpointing:
            switches.append('training.activation_checkpointing = "full"')
        if job.micro_batch_room > job.sequence_length:
            is_packed = job.table.micro_batch_tokens is not None
            key = "rl.micro_batch_tokens" if is_packed else "training.micro_batch_size"
            switches.append(f"a smaller {key}")
    return switches or [
        "more GPUs, or a model that more of them share"
        if name == "training"
        else "more GPUs to a replica (rl.rollout.tensor)"
    ]
