"""DeepSpeed's own config class takes the JSON that zsim writes. Needs DeepSpeed."""

from __future__ import annotations

import json
from typing import Any

import pytest

import zsim
from tests.expect import of_kind
from tests.specs.written_files import cases_with, job_of
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig as OurConfig
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install zsim[interop]")


@pytest.fixture
def deepspeed_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeedConfig on 16 ranks that are not there."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(comm, "get_world_size", lambda group=None: 16)
    monkeypatch.setattr(comm, "get_rank", lambda group=None: 0)
    return DeepSpeedConfig


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeeds_own_class_reads_the_same_values(deepspeed_config: Any, stage: int, offload: str) -> None:
    if offload == "nvme" and stage < 3:
        pytest.skip("NVMe is stage 3's")
    where = {"device": offload, **({"nvme_path": "/nvme"} if offload == "nvme" else {})}
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 2e8}
    if stage and offload != "none":
        zero["offload_optimizer"] = where
    if stage == 3:
        zero |= {"offload_param": where, "stage3_prefetch_bucket_size": 1e7}
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    job = resolve(
        zsim.Experiment(
            model="llama-3-8b", cluster="dgx-h100", nodes=2, strategy={"config": config},
            training={"gradient_accumulation_steps": 4},
        )
    )  # fmt: skip
    theirs = deepspeed_config(json.loads(export_files(job).files["ds_config.json"]))
    ours = of_kind(job.strategy, OurConfig)
    assert theirs.train_batch_size == ours.batch.train_batch_size == 128
    assert theirs.gradient_accumulation_steps == 4
    assert theirs.gradient_clipping == ours.gradient_clipping
    assert theirs.bfloat16_config.enabled
    zero_config = theirs.zero_config
    assert zero_config.stage == stage
    if stage:
        for key in ("overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size"):
            assert getattr(zero_config, key) == getattr(ours.zero, key), key
    if stage == 3:
        for key in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "max_live_parameters",
            "sub_group_size",
        ):
            assert getattr(zero_config, key) == getattr(ours.zero, key), key
        param = zero_config.offload_param
        assert (str(param.device).rpartition(".")[2] if param is not None else "none") == offload


@pytest.mark.parametrize("name", cases_with("ds_config.json"))
def test_deepspeed_takes_every_json(deepspeed_config: Any, name: str) -> None:
    job = job_of(name)
    theirs = deepspeed_config(json.loads(export_files(job).files["ds_config.json"]))
    assert theirs.train_micro_batch_size_per_gpu == 2
    assert theirs.bfloat16_config.enabled == (job.training.precision == "bf16")
    assert theirs.float16_config.enabled == (job.training.precision == "fp16")
