"""Small jobs with ZeRO++ and MiCS, for their tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import zsim
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

HPZ: dict[str, Any] = {"zero_hpz_partition_size": 8}
QWZ: dict[str, Any] = {"zero_quantized_weights": True}
QGZ: dict[str, Any] = {"zero_quantized_gradients": True}
NOTHING_KEPT: dict[str, Any] = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}


def experiment_of(
    zero: dict[str, Any],
    *,
    model: Any = "llama-3.2-1b",
    nodes: int = 2,
    steps: int = 1,
    version: str = "0.19.8",
    precision: str = "fp16",
    **training: Any,
) -> zsim.Experiment:
    """Llama-3.2-1B on two nodes of 8 A100, 1,024 tokens."""
    config = {precision: {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}
    return zsim.Experiment(
        model=model,
        cluster="dgx-a100-80gb",
        nodes=nodes,
        training={"sequence_length": 1024, "gradient_accumulation_steps": steps, **training},
        strategy={"kind": "deepspeed", "config": config, "version": version},
    )


def job_of(zero: dict[str, Any], **options: Any) -> Job:
    options.setdefault("micro_batch_size", 1)
    return resolve(experiment_of(zero, **options))


def plan_of(zero: dict[str, Any], **options: Any) -> Plan:
    return make_plan(job_of(zero, **options))


def calls(plan: Plan, phase: str | None = None) -> Counter[tuple[str, str, str]]:
    """Collectives by kind, group and type; without the scalars of the step."""
    return Counter(
        (op.work.kind, op.work.group, op.work.dtype)
        for op in plan.ops
        if isinstance(op.work, Collective) and op.work.bytes > 8 and phase in (None, op.phase)
    )


def sent(plan: Plan, kind: str, group: str, dtype: str) -> int:
    """Bytes of all tensors of one kind of call."""
    works = [op.work for op in plan.ops if isinstance(op.work, Collective)]
    return sum(w.bytes for w in works if (w.kind, w.group, w.dtype) == (kind, group, dtype))
