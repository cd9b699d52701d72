"""Published configurations as experiments, for `zsim tune`. Batch sizes that are assumed are marked so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zsim

_NVME = {"device": "nvme", "nvme_path": "/nvme"}


@dataclass(frozen=True)
class Setting:
    """A published configuration. `row` is its row in training_runs.csv."""

    name: str
    row: str
    experiment: dict[str, Any]

    def load(self) -> zsim.Experiment:
        return zsim.Experiment(**self.experiment)


def _gpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024,
        "vocab_size": 50257,
    }  # fmt: skip


SETTINGS = (
    # GPT-8B of the ZeRO paper, 72 layers of 3,072 (its Table 4); the batch is assumed: 8 sequences per GPU.
    Setting("ZeRO paper, 8B, 128 V100", "zero-paper-charts-0005", {
        "model": _gpt(3072, 72, 24), "cluster": "dgx-2", "nodes": 8,
        "training": {"sequence_length": 1024, "micro_batch_size": 8, "precision": "fp16",
                     "activation_checkpointing": "full"},
        "strategy": {"kind": "deepspeed", "stage": 2, "version": "0.10.3"},
    }),
    Setting("torchtitan, Llama-3.1-8B, 128 H100", "torchtitan-2024-12-0004", {
        "model": "llama-3.1-8b", "cluster": "grand-teton-h100-500w", "nodes": 16,
        "training": {"sequence_length": 8192, "micro_batch_size": 2, "precision": "bf16",
                     "activation_checkpointing": "selective-op"},
        "strategy": {"kind": "fsdp2", "wrapping": "torchtitan-0.1"},
    }),
    Setting("torchtitan, Llama-2-70B, 64 A100", "torchtitan-2024-a100-0007", {
        "model": "llama-2-70b", "cluster": "dgx-a100-80gb", "nodes": 8,
        "training": {"sequence_length": 4096, "micro_batch_size": 1, "precision": "bf16",
                     "activation_checkpointing": "selective-op"},
        "strategy": {"kind": "fsdp2", "wrapping": "torchtitan-0.1"},
    }),
    Setting("llm-foundry, MPT-7B, 256 H100", "mosaic-2024-01-0011", {
        "model": "mpt-7b", "cluster": "dgx-h100", "nodes": 32,
        "training": {"sequence_length": 2048, "micro_batch_size": 6, "precision": "bf16"},
        "strategy": {"kind": "fsdp1", "backward_prefetch": "BACKWARD_POST"},
    }),
    Setting("llm-foundry, MPT-30B, 128 H100", "mosaic-2024-01-0006", {
        "model": "mpt-30b", "cluster": "dgx-h100", "nodes": 16,
        "training": {"sequence_length": 2048, "micro_batch_size": 8, "precision": "bf16",
                     "activation_checkpointing": "full"},
        "strategy": {"kind": "fsdp1", "backward_prefetch": "BACKWARD_POST"},
    }),
    # A trillion parameters of ZeRO-Infinity; the batch is assumed: 5 sequences per GPU.
    Setting("ZeRO-Infinity, 1T, 512 V100", "zero-infinity-slides-0010", {
        "model": _gpt(25600, 128, 160), "cluster": "dgx-2", "nodes": 32,
        "training": {"sequence_length": 1024, "micro_batch_size": 5, "activation_checkpointing": "full"},
        "strategy": {"kind": "deepspeed", "config": {
            "fp16": {"enabled": True},
            "activation_checkpointing": {"cpu_checkpointing": True},
            "zero_optimization": {
                "stage": 3, "sub_group_size": 12_500_000,
                "offload_optimizer": {**_NVME, "pipeline_read": True, "pipeline_write": True,
                                      "buffer_count": 12},
                "offload_param": {**_NVME, "max_in_cpu": 0, "buffer_count": 8, "buffer_size": 200_000_000},
            },
        }},
    }),
)  # fmt: skip
