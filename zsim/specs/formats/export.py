"""Writes every file that can express a job's configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.deepspeed.export import deepspeed_json
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.torch.export import python_file, why_not_python
from zsim.programs.accelerate.write import DEEPSPEED_FILE, accelerate_yaml, why_not_accelerate
from zsim.programs.megatron_lm.write import SCRIPT, megatron_script, why_not_megatron
from zsim.programs.torchtitan.write import (
    torchtitan_model,
    torchtitan_toml,
    why_not_torchtitan,
)
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.toml import experiment_toml
from zsim.specs.strategy.optimizers import optimizer_of
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS


@dataclass(frozen=True)
class ExportedFiles:
    """The files that express a job, and the reasons for those that cannot."""

    files: dict[str, str] = field(default_factory=dict)
    """{name: text}"""
    missing: dict[str, str] = field(default_factory=dict)
    """{name: why that file cannot express this configuration}"""
    notes: tuple[str, ...] = ()
    """What the training script must do because no file can express it."""


def export_files(job: Job) -> ExportedFiles:
    """The files that can express the job, and the reasons why the others cannot.

    They are experiment.toml, ds_config.json, fsdp2.py (fsdp1.py, ddp.py), accelerate.yaml, torchtitan.toml
    and megatron.sh.
    """
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
    if isinstance(job.strategy, MegatronConfig):
        reason = why_not_megatron(job)
        if reason is None:
            files[SCRIPT] = megatron_script(job)
        else:
            missing[SCRIPT] = reason
    reason = why_not_accelerate(job)
    if reason is None:
        files["accelerate.yaml"] = accelerate_yaml(job)
    else:
        missing["accelerate.yaml"] = reason
    files["experiment.toml"] = experiment_toml(_make_portable(job.experiment, DEEPSPEED_FILE in files))
    notes = _script_notes(job)
    if "accelerate.yaml" in files:
        notes += _accelerate_notes(job)
    if "torchtitan.toml" in files:
        notes += _torchtitan_notes(job)
    return ExportedFiles(files, missing, tuple(notes))


def _accelerate_notes(job: Job) -> list[str]:
    notes = []
    if isinstance(job.strategy, DeepSpeedConfig):
        notes.append(f"accelerate.yaml: start it in its own folder, where {DEEPSPEED_FILE} lies")
    else:
        notes.append(f"accelerate.yaml: the script's: {', '.join(_accelerate_calls(job))}")
    if job.num_nodes > 1:
        notes.append(
            "accelerate.yaml: every node's own: accelerate launch --machine_rank NUMBER "
            "--main_process_ip ADDRESS_OF_NODE_0 --main_process_port 29500"
        )
    return notes


def _torchtitan_notes(job: Job) -> list[str]:
    notes = []
    if torchtitan_model(job) is None:
        notes.append(
            f"torchtitan.toml: torchtitan 0.2 has no flavor that is {job.model.name}: without model.name and "
            "model.flavor it trains its debugmodel"
        )
    if not job.training.gradient_clipping:
        notes.append(
            "torchtitan.toml: torchtitan always takes the gradients' norm, the simulated step does not; "
            "max_norm = 1e9 clips nothing"
        )
    return notes


def _make_portable(experiment: Experiment, has_deepspeed: bool) -> Experiment:
    """The experiment with absolute paths, and with the exported DeepSpeed JSON as its config."""
    changes: dict[str, Any] = {}
    for key in ("model", "cluster"):
        value = getattr(experiment, key)
        if isinstance(value, str) and os.path.exists(value):
            changes[key] = str(Path(value).resolve())
    table = experiment.strategy
    if has_deepspeed and isinstance(table, DeepSpeedTable):
        update = {"config": DEEPSPEED_FILE, "config_name": None, "stage": None}
        changes["strategy"] = table.model_copy(update=update)
    return experiment.model_copy(update=changes)


def _script_notes(job: Job) -> list[str]:
    """Notes on what the script must do because no file can express it."""
    training, notes = job.training, []
    if isinstance(job.strategy, DeepSpeedConfig):
        kind, call = training.activation_checkpointing, _checkpointing_call(job)
        if training.block_checkpointing:
            notes.append("activation checkpointing, which differs by block, is the script's")
        elif call:
            notes.append(f"activation checkpointing '{kind}' is the script's: {call}")
        if job.strategy.optimizer.name is None:
            offloaded = job.strategy.zero.offload_optimizer is not None
            optimizer = "DeepSpeedCPUAdam" if offloaded else "FusedAdam"
            notes.append(f"the optimizer is the script's: deepspeed.ops.adam.{optimizer}")
        if training.compile:
            notes.append("compile the blocks: block.compile()")
        notes += _deepspeed_degrees(job)
    if training.precision == "fp8":
        suffix = "" if isinstance(job.strategy, DeepSpeedConfig) else ", but torchtitan's"
        notes.append(f"fp8 products are the script's (torchao, Transformer Engine){suffix}")
    if training.liger:
        notes.append("Liger's kernels are the script's: use_liger_kernel")
    if training.expandable_segments:
        notes.append("in the run's environment: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    if training.device_max_connections != DEFAULT_CONNECTIONS:
        connections = training.device_max_connections
        notes.append(f"in the run's environment: CUDA_DEVICE_MAX_CONNECTIONS={connections}")
    notes += _loop_notes(job)
    notes.append(f"sequences of {training.sequence_length:,} tokens are the data's")
    return notes


def _deepspeed_degrees(job: Job) -> Iterator[str]:
    """Notes on parallelism that DeepSpeed leaves to the script."""
    parallelism = job.parallelism
    if parallelism.pipeline > 1:
        layers = ", ".join(map(str, parallelism.layers_per_stage))
        yield (
            f"the pipeline is the script's: deepspeed.pipe.PipelineModule(num_stages={parallelism.pipeline}) "
            f"with {layers} layers a stage"
        )
    if parallelism.fuses_projections:
        yield f"tensor parallelism of {parallelism.tensor} is the model's, as in Megatron-DeepSpeed (mpu)"
    if parallelism.context > 1:
        yield "split sequences are the script's: UlyssesSPAttentionHF.register_with_transformers"


def _loop_notes(job: Job) -> Iterator[str]:
    """Notes on the training loop's other work, and on the torch release that it needs."""
    training, trainer = job.training, job.experiment.trainer
    trainer_settings = trainer.model_dump(exclude_defaults=True)
    if trainer_settings:
        yield (
            "[trainer] is the script's: "
            f"{', '.join(f'{key} {value}' for key, value in trainer_settings.items())}"
        )
    if training.autocast:
        yield f'parameters in fp32 under torch.autocast("cuda", {training.precision}) are the script\'s'
    if training.stored_dtype != "fp32":
        yield f"a model that is loaded and kept in {training.stored_dtype} is the script's, but torchtitan's"
    if job.model.trainable_numel != job.model.numel:
        yield "adapters and frozen parameters are the script's (PEFT's get_peft_model, requires_grad)"
    if optimizer_of(training.optimizer).library not in ("torch", "deepspeed"):
        source = optimizer_of(training.optimizer).source
        yield f"the optimizer {training.optimizer} is the script's ({source})"
    if job.sequences is not None:
        yield f"a last micro-batch that is smaller ({job.sequences:g} sequences a step) is the script's"
    if isinstance(job.strategy, Fsdp1Config) and job.strategy.before_torch_2:
        yield "it is simulated as in torch 1.12 and 1.13"


def _checkpointing_call(job: Job) -> str:
    """The call by which a script checkpoints all blocks. It is empty without checkpointing."""
    training = job.training
    if training.activation_checkpointing == "full" and training.checkpoint_every > 1:
        return f"torch.utils.checkpoint around one block of {training.checkpoint_every}"
    return {
        "none": "",
        "full": "model.gradient_checkpointing_enable()",
        "selective": "recompute the core of attention",
        "selective-op": "keep fused attention and every second product, run the rest again",
    }[training.activation_checkpointing]


def _accelerate_calls(job: Job) -> list[str]:
    """Settings that Accelerate takes from the script and not from its YAML, under PyTorch's own engines."""
    training, strategy = job.training, job.strategy
    calls = [f"DataLoader(batch_size={training.micro_batch_size})"]
    if training.gradient_accumulation_steps > 1:
        calls.append(f"Accelerator(gradient_accumulation_steps={training.gradient_accumulation_steps})")
    if training.gradient_clipping:
        calls.append(f"accelerator.clip_grad_norm_(model.parameters(), {training.gradient_clipping:g})")
    if not isinstance(strategy, DdpConfig):
        return calls
    options = []
    if strategy.bucket_cap_bytes != DdpConfig().bucket_cap_bytes:
        options.append(f"bucket_cap_mb={strategy.bucket_cap_bytes / 2**20:g}")
    if strategy.gradient_as_bucket_view:
        options.append("gradient_as_bucket_view=True")
    if options:
        calls.append(f"kwargs_handlers=[DistributedDataParallelKwargs({', '.join(options)})]")
    if training.block_checkpointing:
        calls.append("activation checkpointing, which differs by block")
    elif training.activation_checkpointing != "none":
        calls.append(_checkpointing_call(job))
    return calls
