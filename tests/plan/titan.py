"""Questions to run_torchtitan.py, and zsim's plan of the same model on the same ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.plan.conftest import training
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.frameworks.torch.parallelism import TORCH
from zsim.plan.make import plan_stages, stages_of
from zsim.plan.ops import Collective, Plan, PointToPoint
from zsim.plan.workload.workload import Workload, make_workloads
from zsim.specs.model.huggingface import model_from_config
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import PIPELINE, ParallelismConfig, resolve_parallelism
from zsim.specs.strategy.parallelism_table import ParallelismTable

SHAPE = {"hidden": 64, "heads": 4, "kv_heads": 2, "head": 16, "ffn": 96, "vocab": 128}
WIDE = {**SHAPE, "heads": 8, "kv_heads": 8, "head": 8}
_LLAMA = {"model_type": "llama", "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-5}
Question = dict[str, Any]


def question(**changes: Any) -> Question:
    """A Llama of two layers on 2 x 2 ranks, FSDP by tensor parallelism; `ranks`: those that answer."""
    base: Question = {
        "pp": 1, "dp_replicate": 1, "fsdp": 2, "tp": 2, "shape": SHAPE, "layers_per_stage": [2],
        "schedule": "1f1b", "micro_batches": 1, "length": 32, "sequence_parallel": True,
        "checkpointing": "none", "reshards": None, "ranks": [0], "async_tensor": False,
        "gather_per_product": False,
        "is_real": False, "file": "",
    }  # fmt: skip
    return base | changes


def ask(questions: list[Question]) -> list[dict[str, Any]]:
    """torch's answers: by rank (as text), its calls."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.run_torchtitan", json.dumps(questions)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def model_of(asked: Question) -> ModelSpec:
    shape = asked["shape"]
    config = {
        **_LLAMA,
        "hidden_size": shape["hidden"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head"],
        "intermediate_size": shape["ffn"],
        "vocab_size": shape["vocab"],
        "num_hidden_layers": sum(asked["layers_per_stage"]),
        "tie_word_embeddings": False,
    }
    return model_from_config(config, "toy", "made up")


def world_of(asked: Question) -> int:
    ranks: int = asked["pp"] * asked["dp_replicate"] * asked["fsdp"] * asked["tp"]
    return ranks


def parallelism_of(asked: Question) -> ParallelismConfig:
    pipeline: dict[str, Any] = {}
    if asked["pp"] > 1:
        pipeline = {
            "schedule": asked["schedule"],
            "virtual_stages": len(asked["layers_per_stage"]) // asked["pp"],
            "layers_per_stage": tuple(asked["layers_per_stage"]),
        }
    table = ParallelismTable(
        tensor=asked["tp"],
        sequence_parallel=asked["sequence_parallel"],
        async_tensor=asked["async_tensor"],
        gather_per_product=asked["gather_per_product"],
        pipeline=asked["pp"],
        **pipeline,
    )
    return resolve_parallelism(table, TORCH, "fsdp2", world_of(asked), sum(asked["layers_per_stage"]))


def workloads_of(asked: Question, **changes: Any) -> list[Workload]:
    """The stages' workloads on one rank of a tensor-parallel group."""
    settings = training(
        precision="bf16",
        sequence_length=asked["length"],
        gradient_accumulation_steps=asked["micro_batches"],
        activation_checkpointing=asked["checkpointing"],
        gradient_clipping=1.0,
        optimizer="adamw",
        **{"micro_batch_size": 1, **changes},
    )
    return make_workloads(stages_of(model_of(asked), parallelism_of(asked)), settings)


def plan_for(asked: Question, **changes: Any) -> Plan:
    strategy = Fsdp2Config(
        asked["reshards"], asked["dp_replicate"], "torchtitan", "bf16", "fp32", no_sync=False
    )
    parallelism = parallelism_of(asked)
    return plan_stages(workloads_of(asked, **changes), strategy, world_of(asked), parallelism)


def calls_of(plan: Plan, rank: int) -> list[list[Any]]:
    """[kind, bytes, dtype, ranks] of each call of a rank with others; a message's ranks are its pipeline's,
    which is the communicator that torch names for it."""
    calls: list[list[Any]] = []
    for op in plan.program_on(rank).ops:
        work = op.work
        if isinstance(work, Collective):
            if len(ranks := _group_of(plan, work.group, rank)) > 1:
                calls.append([work.kind, work.bytes, work.dtype, ranks])
        elif isinstance(work, PointToPoint):
            ranks = _group_of(plan, PIPELINE, rank)
            calls += [[one.direction, one.bytes, work.dtype, ranks] for one in work.messages]
    return calls


def _group_of(plan: Plan, name: str, rank: int) -> list[int]:
    rows = plan.groups[name].members
    row: list[int] = rows[(rows == rank).any(axis=1)][0].tolist()
    return row
