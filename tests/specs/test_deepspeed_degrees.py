"""Degrees of parallelism in a DeepSpeed JSON, what DeepSpeed refuses beside them, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.expect import of_kind
from zsim.errors import InputError
from zsim.frameworks.deepspeed.parallelism import AUTOTP, SPLIT_LAYERS
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files


def job_of(stage: int, parallelism: dict[str, Any], version: str = "0.19.8", **config: Any) -> Job:
    """Llama 3 8B on 16 GPUs, with the keys of the JSON."""
    strategy = {
        "kind": "deepspeed",
        "version": version,
        "config_name": "ds.json",
        "config": {
            "bf16": {"enabled": True},
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            **config,
        },
    }
    experiment = zsim.Experiment(
        model="llama-3-8b", cluster="dgx-h100", nodes=2, strategy=strategy, parallelism=parallelism
    )
    return resolve(experiment)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_autotp_splits_layers_and_shards_over_the_rest(stage: int) -> None:
    """64 sequences on 16 / 4 replicas, one at a time: 16 micro-batches."""
    job = job_of(stage, {}, tensor_parallel={"autotp_size": 4})
    assert (job.parallelism.tensor, job.parallelism.style) == (4, AUTOTP)
    assert (job.parallelism.sequence_parallel, job.data_parallel_size) == (False, 4)
    assert job.training.gradient_accumulation_steps == 16


def test_ulysses_counts_batches_over_the_replicas_and_shards_over_all() -> None:
    """64 sequences on 16 / 8 replicas: 32 micro-batches; ZeRO's groups are the 16 ranks, 8 on a node."""
    job = job_of(3, {}, sequence_parallel_size=8)
    assert (job.parallelism.context, job.parallelism.context_method) == (8, "all-to-all")
    assert (job.data_parallel_size, job.training.gradient_accumulation_steps) == (2, 32)
    assert of_kind(job.strategy, DeepSpeedConfig).gpus_per_node == 8


def test_without_autotp_the_model_splits_its_own_layers() -> None:
    settings = {"stages": 2, "grad_partitioned": False}
    job = job_of(1, {"tensor": 4, "pipeline": 2}, pipeline=settings)
    assert (job.parallelism.style, job.parallelism.schedule) == (SPLIT_LAYERS, "1f1b")
    assert job.data_parallel_size == 2
    pipeline = of_kind(job.strategy, DeepSpeedConfig).pipeline
    assert (pipeline.pipe_partitioned, pipeline.grad_partitioned) == (True, False)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_with_sharded_gradients_is_refused(stage: int) -> None:
    """runtime/pipe/engine.py: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"."""
    message = rf"stage: found {stage} with 2 pipeline stages.*the nearest stage is 1"
    with pytest.raises(InputError, match=message):
        job_of(stage, {"pipeline": 2})
    assert job_of(1, {"pipeline": 2}).parallelism.pipeline == 2


@pytest.mark.parametrize(
    ("stage", "version", "parallelism", "config", "message"),
    [
        (3, "0.19.3", {}, {}, "DeepSpeed 0.19.3 refuses beside AutoTP; expected stage 2"),
        (1, "0.19.8", {"pipeline": 2}, {}, "PipelineEngine refuses that; expected pipeline 1"),
        (1, "0.19.8", {"tensor": 8}, {}, "parallelism.tensor: found 8, but ds.json says .*autotp_size 4"),
        (1, "0.19.8", {}, {"tp": {"tp_size": 8}}, "tp_size: found 8, but tensor_parallel.autotp_size is 4"),
        (1, "0.19.8", {"sequence_parallel": True}, {}, "DeepSpeed's AutoTP has none"),
    ],
)
def test_what_autotp_refuses_is_refused(
    stage: int, version: str, parallelism: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        job_of(stage, parallelism, version, tensor_parallel={"autotp_size": 4, **config})
    assert job_of(3, {}, "0.19.4", tensor_parallel={"autotp_size": 4}).parallelism.tensor == 4


@pytest.mark.parametrize("version", ["0.16.4", "0.17.6", "0.18.9", "0.19.8"])
def test_ulysses_beside_autotp_is_refused(version: str) -> None:
    """`check_dataloader_inputs_same_across_ranks`: "Data inconsistency within the TP group"."""
    with pytest.raises(InputError, match=r"sequence_parallel_size: found 2 .*expected one of the two"):
        job_of(1, {}, version, tensor_parallel={"autotp_size": 4}, sequence_parallel_size=2)


@pytest.mark.parametrize(
    ("parallelism", "config", "missing"),
    [
        ({}, {"tensor_parallel": {"autotp_size": 4}}, set()),
        ({}, {"sequence_parallel_size": 4}, set()),
        ({"context": 4}, {}, set()),
        ({"pipeline": 2}, {"pipeline": {"grad_partitioned": False}}, {"accelerate.yaml"}),
        ({"tensor": 4, "pipeline": 2, "sequence_parallel": True}, {}, {"accelerate.yaml"}),
    ],
)
def test_what_is_written_is_read_back(
    tmp_path: Path, parallelism: dict[str, Any], config: dict[str, Any], missing: set[str]
) -> None:
    job = job_of(1, parallelism, **config)
    exported = export_files(job)
    assert set(exported.missing) == missing
    for name, text in exported.files.items():
        (tmp_path / name).write_text(text)
    back = resolve(zsim.load_experiment(tmp_path / "experiment.toml"))
    assert (back.parallelism, back.training) == (job.parallelism, job.training)
    written = json.loads(exported.files["ds_config.json"])
    # The degree of tensor parallelism that a model has of its own is nowhere in the JSON.
    own = {"tensor": job.parallelism.tensor} if job.parallelism.style == SPLIT_LAYERS else {}
    alone = build_experiment(
        {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 2},
        {
            "strategy.config": written,
            **{f"parallelism.{key}": value for key, value in own.items()},
            "parallelism.sequence_parallel": job.parallelism.sequence_parallel,
        },
        origin="test",
    )
    assert resolve(alone).parallelism == job.parallelism


def test_what_the_script_must_do_is_said() -> None:
    notes = " ".join(export_files(job_of(1, {"tensor": 2, "pipeline": 2})).notes)
    assert "PipelineModule(num_stages=2) with 16, 16 layers a stage" in notes
    assert "tensor parallelism of 2 is the model's, as in Megatron-DeepSpeed" in notes
