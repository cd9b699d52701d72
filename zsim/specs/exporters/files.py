"""Every file that can say a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zsim.specs.experiment import DeepSpeedTable, Experiment
from zsim.specs.exporters.accelerate_yaml import DEEPSPEED_FILE, accelerate_yaml, why_not_accelerate
from zsim.specs.exporters.deepspeed_json import deepspeed_json
from zsim.specs.exporters.experiment_toml import experiment_toml
from zsim.specs.exporters.exported import Exported
from zsim.specs.exporters.fsdp_python import python_file, why_not_python
from zsim.specs.exporters.torchtitan_toml import torchtitan_toml, why_not_torchtitan
from zsim.specs.importers.deepspeed import DeepSpeedConfig
from zsim.specs.job import Job


def export_files(job: Job) -> Exported:
    """experiment.toml, and what of ds_config.json, fsdp2.py (fsdp1.py, ddp.py), accelerate.yaml and
    torchtitan.toml can say the job."""
    files: dict[str, str] = {}
    missing: dict[str, str] = {}
    if isinstance(job.strategy, DeepSpeedConfig):
        files[DEEPSPEED_FILE] = deepspeed_json(job)
    else:
        reason = why_not_python(job)
        if reason is None:
            name, text = python_file(job)
            files[name] = text
        else:
            missing[f"{job.kind}.py"] = reason
        reason = why_not_torchtitan(job)
        if reason is None:
            files["torchtitan.toml"] = torchtitan_toml(job)
        else:
            missing["torchtitan.toml"] = reason
    reason = why_not_accelerate(job)
    if reason is None:
        files["accelerate.yaml"] = accelerate_yaml(job)
    else:
        missing["accelerate.yaml"] = reason
    files["experiment.toml"] = experiment_toml(_portable(job.experiment, DEEPSPEED_FILE in files))
    notes = _script_notes(job)
    if "torchtitan.toml" in files and not job.training.gradient_clipping:
        notes.append(
            "torchtitan.toml: torchtitan always takes the gradients' norm, the simulated step does not; "
            "max_norm = 1e9 clips nothing"
        )
    return Exported(files, missing, tuple(notes))


def _portable(experiment: Experiment, has_deepspeed: bool) -> Experiment:
    """Files by their whole paths; the DeepSpeed JSON is the one beside it."""
    changes: dict[str, Any] = {}
    for key in ("model", "cluster"):
        value = getattr(experiment, key)
        if isinstance(value, str) and Path(value).exists():
            changes[key] = str(Path(value).resolve())
    table = experiment.strategy
    if has_deepspeed and isinstance(table, DeepSpeedTable):
        update = {"config": DEEPSPEED_FILE, "config_name": None, "stage": None}
        changes["strategy"] = table.model_copy(update=update)
    return experiment.model_copy(update=changes)


def _script_notes(job: Job) -> list[str]:
    """What no file says and the script must do."""
    training, notes = job.training, []
    kind = training.activation_checkpointing
    if isinstance(job.strategy, DeepSpeedConfig):
        calls = {
            "full": "model.gradient_checkpointing_enable()",
            "selective": "recompute the core of attention",
            "selective-op": "keep fused attention and every second product, run the rest again",
        }
        if training.block_checkpointing:
            notes.append("activation checkpointing, which differs by block, is the script's")
        elif kind != "none":
            notes.append(f"activation checkpointing '{kind}' is the script's: {calls[kind]}")
        if job.strategy.optimizer.name is None:
            offloaded = job.strategy.zero.offload_optimizer is not None
            optimizer = "DeepSpeedCPUAdam" if offloaded else "FusedAdam"
            notes.append(f"the optimizer is the script's: deepspeed.ops.adam.{optimizer}")
        if training.compile:
            notes.append("compile the blocks: block.compile()")
        if training.precision == "fp8":
            notes.append("fp8 products are the script's (torchao, Transformer Engine)")
    if training.liger:
        notes.append("Liger's kernels are the script's: use_liger_kernel")
    if training.expandable_segments:
        notes.append("in the run's environment: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    notes.append(f"sequences of {training.sequence_length:,} tokens are the data's")
    return notes
