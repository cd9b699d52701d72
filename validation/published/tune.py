"""Run `zsim tune` on published runs: `python -m validation.published.tune` searches the whole spaces (a few
minutes), and rewrites tuned.json in this folder and the table of docs/recipes/tune.md.

Each setting is the published configuration as an experiment; assumed batch sizes are marked as such. Times on
both sides are zsim's."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zsim
from zsim.study.tune.text import format_change
from zsim.study.tune.tune import Tuning, tune
from zsim.units import format_bytes, format_seconds

RESULTS = Path(__file__).with_name("tuned.json")
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "tune.md"
TABLE = re.compile(r"(<!-- python -m validation\.published\.tune -->\n).*?(?=\n\n)", re.DOTALL)
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


def result_of(tuned: Tuning) -> dict[str, Any]:
    """The stored result of a search: the best as overrides of the experiment, time and memory of both
    sides."""
    assert tuned.given is not None
    best = tuned.best[0]
    return {
        "overrides": best.candidate.overrides,
        "changes": [format_change(change) for step in tuned.steps for change in step.changes],
        "given": {"seconds": tuned.given.seconds, "gpu_bytes": tuned.given.gpu_bytes},
        "found": {"seconds": best.seconds, "gpu_bytes": best.gpu_bytes},
        "configurations": tuned.search.num_candidates,
        "simulated": tuned.num_simulated,
    }


def table_lines(results: dict[str, dict[str, Any]]) -> list[str]:
    """One row per setting: published, found, and the changes."""
    lines = [
        "| published | as published | found | less | what changes | simulated |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for name, result in results.items():
        less = (1 - result["found"]["seconds"] / result["given"]["seconds"]) * 100
        lines.append(
            f"| {name} | {_cell(result['given'])} | {_cell(result['found'])} | {less:.1f} % | "
            f"{'; '.join(result['changes']) or 'nothing'} | {result['simulated']} of "
            f"{result['configurations']} |"
        )
    return lines


def _cell(side: dict[str, Any]) -> str:
    return f"{format_seconds(side['seconds'])}, {format_bytes(side['gpu_bytes'])}"


def main(names: list[str]) -> None:
    """Run the settings whose names contain one of `names`; all settings if there are no names."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for setting in SETTINGS:
        if not names or any(name in setting.name for name in names):
            results[setting.name] = result_of(tune(setting.load(), count=1))
            print(setting.name, results[setting.name], flush=True)
    results = {setting.name: results[setting.name] for setting in SETTINGS if setting.name in results}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    table = "\n".join(table_lines(results))
    DOCUMENT.write_text(TABLE.sub(lambda match: match[1] + table, text, count=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
