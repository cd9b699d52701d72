"""The small jobs whose traces are kept: each framework, and each special kind of plan and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL = str(Path(__file__).parent / "model.json")
_TRAINING = {"sequence_length": 2048, "micro_batch_size": 1}
_NVME: dict[str, Any] = {
    "offload_optimizer": {"device": "nvme", "nvme_path": "/drive"},
    "offload_param": {"device": "nvme", "nvme_path": "/drive"},
}
_SPINE = {
    "extends": "dgx-h100",
    "network": {
        "source": "made up for a test", "evidence": "assumed", "kind": "fat-tree", "nodes_per_leaf": 2,
        "oversubscription": 8.0,
    },
}  # fmt: skip


def _job(strategy: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "cluster": "dgx-h100",
        "nodes": 2,
        "training": _TRAINING,
        "strategy": strategy,
    } | more


def _zero(stage: int, *, version: str = "0.19.8", **zero: Any) -> dict[str, Any]:
    config = {"zero_optimization": {"stage": stage, **zero}, "bf16": {"enabled": True}}
    return {"kind": "deepspeed", "version": version, "config": config}


JOBS: dict[str, dict[str, Any]] = {
    "ddp": _job({"kind": "ddp"}, training=_TRAINING | {"gradient_accumulation_steps": 2}),
    "zero-1": _job(_zero(1)),
    "zero-2-cpu": _job(_zero(2, offload_optimizer={"device": "cpu"}), nodes=1),
    "zero-3": _job(_zero(3), training=_TRAINING | {"activation_checkpointing": "full"}),
    "zero-3-of-0.10": _job(_zero(3, version="0.10.3")),
    "zero-3-nvme": _job(_zero(3, **_NVME), nodes=1),
    "zero-pp": _job(
        _zero(3, zero_hpz_partition_size=8, zero_quantized_weights=True, zero_quantized_gradients=True)
    ),
    "fsdp1": _job({"kind": "fsdp1"}, cluster="dgx-a100-80gb"),
    "fsdp2": _job({"kind": "fsdp2"}, training=_TRAINING | {"gradient_accumulation_steps": 2}),
    "fsdp2-cpu": _job({"kind": "fsdp2", "cpu_offload": True}, nodes=1),
    "hsdp": _job({"kind": "fsdp2", "replicate": 2}),
    "uneven-nodes": _job({"kind": "fsdp2"}, placement={"gpus_per_node": [8, 4]}),
    "slow-gpu": _job({"kind": "fsdp2"}, faults={"slow_gpus": {"9": 1.3}}),
    "jitter": _job({"kind": "fsdp2"}, jitter={"seed": 1, "steps": 3}),
    "two-jobs": _job(
        {"kind": "ddp"},
        cluster=_SPINE,
        placement={"fabric_nodes": 4, "nodes": [0, 2]},
        jobs={"other": {"placement": {"nodes": [1, 3]}}},
    ),
    "cpu-ranks": _job({"kind": "ddp"}, cluster="cpu-gloo", training=_TRAINING | {"precision": "fp32"}),
}  # fmt: skip
