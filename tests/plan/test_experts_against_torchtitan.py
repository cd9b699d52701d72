"""Collectives of expert parallelism, one by one, as torchtitan's own code issues them on fake groups."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.plan.ops import Collective, Plan

FOUND = importlib.util.find_spec("torchtitan")
pytestmark = pytest.mark.skipif(
    FOUND is None or not importlib.metadata.version("torchtitan").startswith("0.2"),
    reason="torchtitan 0.2 is not installed",
)
SHAPE = {
    "hidden": 64, "heads": 4, "kv_heads": 2, "head": 16, "vocab": 128, "experts": 8, "top_k": 2, "width": 32,
}  # fmt: skip
Call = tuple[str, int, str, tuple[int, ...]]


def question(**changes: Any) -> dict[str, Any]:
    base = {
        "world": 8, "tensor": 1, "expert": 4, "expert_tensor": 1, "layers": 2, "length": 64, "shape": SHAPE,
        "checkpointing": "none",
    }  # fmt: skip
    return {**base, **changes}


QUESTIONS = {
    "experts on four of eight ranks": question(),
    "every rank with an expert": question(expert=8),
    "more ranks than experts": question(world=32, expert=4),
    "recomputed": question(checkpointing="full"),
    "tensor ranks borrowed": question(tensor=2),
    "tensor ranks borrowed, recomputed": question(tensor=2, checkpointing="full"),
    "tensor ranks that share products": question(tensor=2, expert_tensor=2, expert=2),
    "tensor parallelism alone": question(tensor=2, expert=1),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Call]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.run_torchtitan_experts", json.dumps(list(QUESTIONS.values()))],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        name: [(kind, size, dtype, tuple(ranks)) for kind, size, dtype, ranks in calls]
        for name, calls in zip(QUESTIONS, found, strict=True)
    }


def plan_of(asked: dict[str, Any]) -> Plan:
    shape = asked["shape"]
    model = {
        "model_type": "mixtral", "hidden_size": shape["hidden"], "intermediate_size": shape["width"],
        "num_hidden_layers": asked["layers"], "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"], "head_dim": shape["head"], "vocab_size": shape["vocab"],
        "num_local_experts": shape["experts"], "num_experts_per_tok": shape["top_k"],
        "tie_word_embeddings": False, "sliding_window": None,
    }  # fmt: skip
    degrees = {"tensor": asked["tensor"], "expert": asked["expert"]}
    if asked["expert"] > 1:
        degrees["expert_tensor"] = asked["expert_tensor"]
    return zsim.make_plan(
        zsim.Experiment(
            model=model,
            cluster="dgx-h100",
            gpus=asked["world"],
            training={
                "sequence_length": asked["length"],
                "gradient_clipping": 0.0,
                "activation_checkpointing": asked["checkpointing"],
            },
            strategy={"kind": "fsdp2", "wrapping": "torchtitan"},
            parallelism={"expert_imbalance": 1.0, **degrees},
        )
    )


def calls_of(plan: Plan) -> list[Call]:
    """The collectives of rank 0 in forward and backward, those of the loss apart."""
    return [
        (op.work.kind, op.work.bytes, op.work.dtype, tuple(plan.groups[op.work.group].ranks_of(0)))
        for op in plan.ops
        if isinstance(op.work, Collective) and op.phase != "optimizer" and not op.name.startswith("loss ")
    ]


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_call_is_torchtitans(name: str, answers: dict[str, list[Call]]) -> None:
    assert calls_of(plan_of(QUESTIONS[name])) == answers[name]
