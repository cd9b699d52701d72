"""Published steps with CPU-Adam: Llama-3.1-8B on 8 H200 and B200, GPT-2 10B on one V100."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import zsim
from validation.published.job import row_job
from validation.published.predict import predict_row, shipped_tables
from validation.published.table import PublishedRun, read_runs
from zsim.engine.simulate import simulate_job
from zsim.study.measured.prediction import RowResult


@cache
def runs() -> dict[str, PublishedRun]:
    return {run.row_id: run for run in read_runs(shipped_tables()).runs}


def result_of(row_id: str) -> RowResult:
    return predict_row(runs()[row_id])


@pytest.mark.parametrize("number", range(1, 13))
def test_eight_gpus_with_cpu_adam(number: int) -> None:
    """Odd rows are H200, even ones B200, 8k to 256k tokens. Every one was in the fit, so these are residuals;
    left out of it in turn, they are within 5 and 15 % (validation/published/calibrate_offload.py)."""
    row = result_of(f"stas00-h200-b200-{number:04}")
    assert row.status == "ok"
    assert row.predicted_fits
    assert row.relative_error == pytest.approx(0, abs=0.03 if number % 2 else 0.07)


@pytest.mark.parametrize(
    ("number", "least", "most"),
    [
        (1, -0.10, 0.0),
        (3, -0.10, 0.0),
        (5, 0.0, 0.10),
        (7, 0.0, 0.10),
        (9, 0.0, 0.10),
        (11, 0.0, 0.10),
    ],
)
def test_memory_of_eight_h200_with_cpu_adam(number: int, least: float, most: float) -> None:
    """17.5 to 133.7 GB reserved. At 8k tokens the peak is the start, when the whole model is on every GPU
    (no zero.Init); from 64k on activations are most of it, between which torch leaves less room than
    zsim's allocator: at 64k 31.1 GiB are allocated and 38.7 reserved, where 37.5 were measured."""
    error = result_of(f"stas00-h200-b200-{number:04}").memory_relative_error
    assert error is not None
    assert least < error < most


def test_only_the_shortest_row_tells_the_cpus_rate() -> None:
    """Half of the rate again moves 8k tokens by a fifth and 128k by 2 %."""
    for number, least, most in ((1, 0.10, 0.30), (7, 0.0, 0.02)):
        job = row_job(runs()[f"stas00-h200-b200-{number:04}"]).job
        rates = job.cluster.offload
        faster = {name: 1.5 * getattr(rates, name) for name in ("optimizer_fraction", "copy_fraction")}
        cluster = job.cluster.model_copy(update={"offload": rates.model_copy(update=faster)})
        base, fast = (simulate_job(each).trace.step_seconds for each in (job, replace(job, cluster=cluster)))
        assert least < base / fast - 1 < most


def test_the_zero_offload_tutorial_on_one_v100() -> None:
    """25.87 s for GPT-2 with 10.28B parameters, micro-batch 10, of which the CPU took 7.6 to 8.0
    (ds-tutorial-zero-offload-0001). Predicted 12 % short: forward and backward take 15 s where the log says
    18 (checkpoints go to pages of host memory that are touched for the first time), what follows 7.7 s where
    it says 7.8. It fits, as it did."""
    row = result_of("ds-tutorial-zero-offload-0001")
    assert row.relative_error == pytest.approx(-0.125, abs=0.03)
    assert row.predicted_fits


@pytest.mark.parametrize(("version", "within"), [("0.10.3", 0.1), ("0.19.8", 0.2)])
def test_10b_under_zero_offload_on_one_v100_is_near_40_teraflops(version: str, within: float) -> None:
    """Ren et al. 2021 (arXiv 2101.06840), abstract and section 6: 40 TFLOP/s at 10B on one V100 of a DGX-2,
    batch 512 of micro-batches of 10, 50 layers of 4,096, with the script's own configuration, which holds
    checkpoints in host memory (DeepSpeedExamples ece5e0e0 ds_zero-offload_10B_config.json). The oldest
    release that zsim knows copies them as 2020's did, today's on a stream of their own."""
    model = {
        "model_type": "gpt2", "vocab_size": 50304, "n_positions": 1024, "n_embd": 4096, "n_layer": 50,
        "n_head": 32, "activation_function": "gelu",
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 10,
        "gradient_accumulation_steps": 51,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True},
        "zero_optimization": {
            "stage": 2, "reduce_bucket_size": 50_000_000,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 50},
    }  # fmt: skip
    experiment = zsim.Experiment(
        model=model, cluster="dgx-2", gpus=1,
        training={"sequence_length": 1024, "activation_checkpointing": "full", "precision": "fp16"},
        strategy={"kind": "deepspeed", "config": config, "version": version},
    )  # fmt: skip
    report = zsim.simulate(experiment).report
    assert report.model_flops_per_second_per_gpu == pytest.approx(40e12, rel=within)
    assert report.fits
