"""Does prefetching hide the communication that zsim says it hides? Two CPU nodes on a slow link, with real
overlap.

The recording (`python -m validation.overlap`) has the same step twice: gathering each unit when it is needed,
and one unit ahead. The first step determines the two numbers that zsim does not know: the machine's speed at
that time, and the fraction of the link's rate that its gathers reached. The second step is predicted with
them. Without overlap, the second step would take the sum of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zsim.engine.simulate import simulate_job
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.trace.trace import Trace

_ROUNDS = 8  # each reduces the error of the fit about tenfold


@dataclass(frozen=True)
class AheadPrediction:
    """Seconds of the step with prefetched gathers: with zsim's overlap, and without overlap."""

    seconds: float
    seconds_without_overlap: float


def predict_ahead(content: Mapping[str, Any]) -> AheadPrediction:
    """Predict a recording's second step from its first. Raises KeyError where the recording lacks a field."""
    serial = content["serial"]
    job = _job(content, prefetch=0)
    speed, efficiency = 1.0, 0.8
    for _ in range(_ROUNDS):
        trace = simulate_job(_on(job, speed, efficiency)).trace.select_rank(0)
        gathers, rest = _seconds(trace)
        computing = serial["step_seconds"]["mean"] - (trace.step_seconds - rest)
        efficiency = min(1.0, efficiency * gathers / serial["gather_seconds"])
        speed *= rest / computing if computing > 0 else 2.0
    ahead = _on(_job(content, prefetch=1), speed, efficiency)
    trace = simulate_job(ahead).trace.select_rank(0)
    return AheadPrediction(trace.step_seconds, trace.step_seconds + _hidden_seconds(trace))


def _hidden_seconds(trace: Trace) -> float:
    """Seconds that overlap hides: the sum of the spans less the time in which any span runs."""
    order = np.argsort(trace.start_seconds, kind="stable")
    starts, ends = trace.start_seconds[order], trace.end_seconds[order]
    reached = np.maximum.accumulate(np.concatenate(([0.0], ends[:-1])))
    return float((np.minimum(reached, ends) - starts).clip(min=0.0).sum())


def _job(content: Mapping[str, Any], *, prefetch: int) -> Job:
    shape = content["model"]
    return resolve(
        Experiment.of_data(
            {
                "model": {
                    **shape,
                    "model_type": "llama",
                    "max_position_embeddings": content["sequence_length"],
                },
                "cluster": {
                    "extends": "cpu-gloo",
                    "gpus_per_node": 1,
                    "nic": {
                        "bandwidth": f"{bytes_per_second(content['rate'])} B/s",
                        "source": "what tc tbf lets through",
                        "evidence": "measured",
                    },
                },
                "nodes": content["nodes"],
                "training": {
                    "sequence_length": content["sequence_length"],
                    "micro_batch_size": content["sequences_per_node"],
                    "precision": "fp32",
                    "attention": "math",
                },
                "strategy": {"kind": "reference", "stage": 3, "prefetch": prefetch, "keep_gathered": False},
            }
        )
    )


def _on(job: Job, speed: float, efficiency: float) -> Job:
    """The job on cores `speed` times as fast and a link that reaches the fraction `efficiency` of its
    rate."""
    gpu, nic = job.cluster.gpu, job.cluster.nic
    rates = {
        "peak": gpu.peak.model_copy(update={"fp32": (gpu.peak.fp32 or 0.0) * speed}),
        "memory": gpu.memory.model_copy(update={"bandwidth": gpu.memory.bandwidth * speed}),
        "launch": gpu.launch.model_copy(update={"seconds_per_kernel": gpu.launch.seconds_per_kernel / speed}),
    }
    cluster = job.cluster.model_copy(
        update={
            "gpu": gpu.model_copy(update=rates),
            "nic": nic.model_copy(update={"efficiency": efficiency}),
        }
    )
    return replace(job, cluster=cluster)


def bytes_per_second(rate: str) -> float:
    """The bytes per second of tc's notation: `"400mbit"` -> 5e7."""
    return float(rate[:-4]) * {"mbit": 1e6, "gbit": 1e9}[rate[-4:]] / 8


def _seconds(trace: Trace) -> tuple[float, float]:
    """(seconds of all gathers, seconds of everything that is not a collective)."""
    spans = trace.end_seconds - trace.start_seconds
    kinds = np.array([info.kind for info in trace.infos])[trace.info_indices]
    sizes = np.array([info.group_size for info in trace.infos])[trace.info_indices]
    return float(spans[kinds == "all_gather"].sum()), float(spans[sizes <= 1].sum())
