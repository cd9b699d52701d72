"""FSDP1 and DDP plans against torch's own, run on CPU with a fake process group.

The toy transformer of conftest.py, four steps, the last one compared call by call.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plan.steps import plan_step
from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.plan.ops import Collective, Plan
from zsim.plan.workload.workload import make_workload

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

RANKS = 8


def question(**changes: Any) -> dict[str, Any]:
    base = {
        "kind": "fsdp1",
        "wrapping": "huggingface",
        "sharding_strategy": "FULL_SHARD",
        "backward_prefetch": "BACKWARD_PRE",
        "forward_prefetch": False,
        "checkpoints": False,
        "num_blocks": 4,
        "micro_batches": 1,
        "no_sync": False,
    }
    return {**base, **changes}


FSDP1 = {
    "blocks": question(),
    "blocks, prefetch after backward": question(
        backward_prefetch="BACKWARD_POST", checkpoints=True, micro_batches=2
    ),
    "blocks, forward prefetch only": question(
        backward_prefetch="none", forward_prefetch=True, micro_batches=2, no_sync=True
    ),
    "shard gradients, no sync": question(sharding_strategy="SHARD_GRAD_OP", micro_batches=2, no_sync=True),
    "shard gradients, forward prefetch": question(
        sharding_strategy="SHARD_GRAD_OP", forward_prefetch=True, checkpoints=True, micro_batches=2
    ),
    "no shard": question(sharding_strategy="NO_SHARD"),
    "hybrid": question(sharding_strategy="HYBRID_SHARD", checkpoints=True),
    "mlps and the rest": question(wrapping="size:2000", num_blocks=3),
    "mlps, checkpointed": question(wrapping="size:2000", num_blocks=3, checkpoints=True),
    "attention and linears, checkpointed": question(wrapping="size:1000", num_blocks=3, checkpoints=True),
    "attention and linears, forward prefetch": question(
        wrapping="size:1000", num_blocks=3, checkpoints=True, forward_prefetch=True, micro_batches=2
    ),
    "attention and linears, prefetch after backward": question(
        wrapping="size:1000", num_blocks=3, backward_prefetch="BACKWARD_POST"
    ),
    "attention and linears, no prefetch": question(
        wrapping="size:1000", num_blocks=3, checkpoints=True, backward_prefetch="none"
    ),
    "attention and linears, shard gradients": question(
        wrapping="size:1000",
        sharding_strategy="SHARD_GRAD_OP",
        num_blocks=3,
        checkpoints=True,
        micro_batches=2,
        no_sync=True,
    ),
    "single linears": question(wrapping="size:500", num_blocks=2, checkpoints=True),
    "one flat parameter": question(wrapping="none"),
}
DDP: dict[str, dict[str, Any]] = {
    f"{cap} MiB, {'tied' if is_tied else 'not tied'}": {
        "kind": "ddp",
        "num_blocks": 4,
        "is_tied": is_tied,
        "bucket_cap_mb": cap,
    }
    for cap in (0.002, 0.01, 0.03)
    for is_tied in (False, True)
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """All questions in one process: torch takes seconds to import."""
    questions = {**FSDP1, **DDP}
    command = [
        sys.executable,
        str(Path(__file__).with_name("run_torch.py")),
        json.dumps([*questions.values()]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(questions, json.loads(done.stdout.splitlines()[-1]), strict=True))


def planned_fsdp1(toys: Any, question: dict[str, Any]) -> Plan:
    strategy = Fsdp1Config(
        sharding_strategy=question["sharding_strategy"],
        replicate=2 if "HYBRID" in question["sharding_strategy"] else 1,
        wrapping=question["wrapping"],
        backward_prefetch=question["backward_prefetch"],
        forward_prefetch=question["forward_prefetch"],
        limit_all_gathers=True,
        param_dtype="bf16",
        reduce_dtype="fp32",
        no_sync=question["no_sync"],
    )
    training = toys.training(
        gradient_accumulation_steps=question["micro_batches"],
        activation_checkpointing="full" if question["checkpoints"] else "none",
    )
    workload = make_workload(toys.transformer(question["num_blocks"]), training)
    return plan_step(workload, strategy, RANKS)


def calls_of(plan: Plan) -> list[str]:
    """Collectives as "AG unit", and "limit" where the host waits; HSDP's second reduction left out."""
    calls = []
    kinds = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}
    is_hybrid = "shard" in plan.groups and "replicate" in plan.groups
    for op in plan.ops:
        calls += ["limit"] * len(op.host_waits)
        if isinstance(op.work, Collective) and not (is_hybrid and op.work.kind == "all_reduce"):
            calls.append(f"{kinds[op.work.kind]} {op.module or 'root'}")
    return calls


@pytest.mark.parametrize("name", FSDP1)
def test_fsdp1_issues_what_torch_issues_and_waits_where_torch_waits(
    answers: dict[str, Any], toys: Any, name: str
) -> None:
    recorded = [call.split()[0] if call.startswith("limit") else call for call in answers[name]]
    assert calls_of(planned_fsdp1(toys, FSDP1[name])) == recorded


@pytest.mark.parametrize("name", FSDP1)
def test_the_rate_limiter_waits_for_the_units_that_torch_waits_for(
    answers: dict[str, Any], toys: Any, name: str
) -> None:
    """An event of the plan is the last compute op of the unit that was freed after it."""
    plan = planned_fsdp1(toys, FSDP1[name])
    waited = [plan.ops[event] for op in plan.ops for event in op.host_waits]
    recorded = [call.split()[1] for call in answers[name] if call.startswith("limit")]
    assert len(waited) == len(recorded)
    for op, unit in zip(waited, recorded, strict=True):
        assert op.name.endswith("root") if unit == "root" else op.module.startswith(unit)


@pytest.mark.parametrize("name", DDP)
def test_ddp_fills_the_buckets_that_torch_fills(answers: dict[str, Any], toys: Any, name: str) -> None:
    question = DDP[name]
    cap = round(question["bucket_cap_mb"] * 2**20)
    training = toys.training()
    workload = make_workload(toys.transformer(4, is_tied=question["is_tied"]), training)
    plan = plan_step(workload, DdpConfig(bucket_cap_bytes=cap, first_bucket_cap_bytes=cap), RANKS)
    planned = [op.work.bytes // 4 for op in plan.ops if isinstance(op.work, Collective)]
    assert planned == answers[name]
