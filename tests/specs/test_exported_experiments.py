"""An exported experiment, read back, is the same job: over all presets, with changes."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.specs.experiment.load import build_experiment, load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files
from zsim.specs.presets import model_preset_names, model_preset_path, topology_preset_names

_APART = ("experiment", "notes")  # the request as given, with other paths

STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": {"kind": "fsdp2", "reshard_after_forward": False}},
    "fsdp1": {"strategy": {"kind": "fsdp1", "sharding_strategy": "SHARD_GRAD_OP"}},
    "ddp": {"strategy": {"kind": "ddp"}},
    "ZeRO-3 by its JSON": {
        "strategy": {
            "kind": "deepspeed",
            "config": {
                "bf16": {"enabled": True},
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3, "offload_param": None},
            },
        }
    },
    "Megatron": {
        "strategy": {"kind": "megatron", "distributed_optimizer": True},
        "parallelism": {"tensor": 2, "pipeline": 2},
        "training": {"gradient_accumulation_steps": 4},
    },
    "LoRA": {"strategy": {"kind": "fsdp2"}, "training": {"lora": {"rank": 8}}},
    "lengths": {
        "strategy": {"kind": "fsdp2"},
        "training": {"lengths": {"law": "exponential", "mean": 400, "batching": "padded"}},
    },
}


def check_read_back(data: dict[str, Any], changes: dict[str, Any], folder: Path) -> None:
    job = resolve(build_experiment(data, changes, origin="test"))
    for name, text in export_files(job).files.items():
        (folder / name).write_text(text, encoding="utf-8")
    again = resolve(load_experiment(folder / "experiment.toml"))
    for field in fields(job):
        if field.name not in _APART:
            assert _settings(getattr(again, field.name)) == _settings(getattr(job, field.name)), field.name


def _settings(value: Any) -> Any:
    """A part of a job without what DeepSpeed's settings say of the file that they are from."""
    return replace(value, name="", origins=()) if isinstance(value, DeepSpeedConfig) else value


# Sparse attention, of which zsim knows Megatron's kernels alone, and layers that share a block.
SPARSE = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "minimax_m3_vl")
KINDS = dict.fromkeys(SPARSE, "megatron") | {"zamba2": "ddp"}


@pytest.mark.parametrize("name", model_preset_names())
def test_a_changed_model_is_read_back(name: str, tmp_path: Path) -> None:
    """A changed config.json stands in the experiment, where null is a value: DeepSeek-V2-Lite's `q_lora_rank`
    is null, and without the key it is 1,536 (15.749 billion parameters for 15.706)."""
    config = json.loads(model_preset_path(name).read_text(encoding="utf-8"))
    kind = KINDS.get(config["model_type"], "fsdp2")
    training = {"activation_checkpointing": "none"}  # the only one that hyper-connections take everywhere
    data = {
        "model": name, "cluster": "dgx-h100", "nodes": 2, "strategy": {"kind": kind}, "training": training,
    }  # fmt: skip
    key = "model.text_config.vocab_size" if "text_config" in config else "model.vocab_size"
    check_read_back(data, {key: 102_400}, tmp_path)


@pytest.mark.parametrize("name", topology_preset_names())
def test_a_changed_cluster_is_read_back(name: str, tmp_path: Path) -> None:
    data = {"model": "gpt2", "cluster": name, "strategy": {"kind": "fsdp2"}}
    check_read_back(data, {"cluster.host.memory": "1 TB"}, tmp_path)


@pytest.mark.parametrize("case", STRATEGIES)
def test_changed_strategies_are_read_back(case: str, tmp_path: Path) -> None:
    data = {"model": "llama-3.2-1b", "cluster": "dgx-h100", "nodes": 1, **STRATEGIES[case]}
    changes = {"training.sequence_length": 512, "model.num_hidden_layers": 4, "cluster.nvme.drives": 2}
    check_read_back(data, changes, tmp_path)
