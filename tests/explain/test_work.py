"""Tokens and FLOPs of a job whose model is shared by several GPUs: 16 GPUs, of which 2 x 4 train on one
micro-batch of 4,096 tokens, and there are 3 per step and replica."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import zsim
from tests.pipelines import one_f_one_b, pipeline_plan
from zsim.cost.flops import model_flops_per_token
from zsim.cost.kernels.kernel import Kernel
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError
from zsim.explain.job import model_size, step_work
from zsim.explain.report_of import report_of
from zsim.report.job_features import strategy_name
from zsim.report.report import Report
from zsim.report.views.html.report import tiles
from zsim.report.views.tables import cost_rows
from zsim.report.views.text.sentences import headline
from zsim.specs.experiment.job import Job, parallelism_label, training_label
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.huggingface import load_model
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.study.scaling.scaling import _split_batch
from zsim.study.sensitivity.sensitivity import parse_target
from zsim.study.sweep.records import report_row
from zsim.study.tune.axes import base_of, resize_base

TOKENS = 3 * 4096


def experiment(**tables: Any) -> Experiment:
    return Experiment(
        model="llama-2-7b",
        cluster="dgx-h100",
        gpus=16,
        training={"micro_batch_size": 1, "sequence_length": 4096, "gradient_accumulation_steps": 3},
        strategy={"kind": "fsdp2"},
        parallelism={"tensor": 2, "pipeline": 4},
        **tables,
    )


def job(**tables: Any) -> Job:
    return resolve(experiment(**tables))


def report(**tables: Any) -> Report:
    """The report of a pipeline made by hand on the job's GPUs."""
    plan = pipeline_plan(one_f_one_b, 4, 3, (Kernel("copy", 0.0, 3e9),) * 2, replicas=4)
    return report_of(simulate_job(job(**tables), plan=plan), 0.0)


def test_gpus_share_the_tokens_and_the_models_flops() -> None:
    """A GPU's share of the batch is 12,288 / 8 tokens, and of the model's FLOPs as much."""
    work = step_work(job())
    assert (work.tokens, work.tokens_per_gpu, work.step_tokens(16)) == (TOKENS, TOKENS / 8, 2 * TOKENS)
    whole = 2 * TOKENS * model_flops_per_token(job().model, 4096)
    assert 16 * work.model_flops == pytest.approx(whole)
    assert work.hardware_flops == pytest.approx(work.model_flops)


def test_a_report_counts_the_global_batch_once() -> None:
    found = report()
    assert found.step_tokens == 2 * TOKENS
    assert found.tokens_per_second_per_gpu == pytest.approx(2 * TOKENS / found.step_seconds / 16)
    flops = 2 * TOKENS * model_flops_per_token(job().model, 4096) / 16
    assert found.mfu_fraction == pytest.approx(flops / found.step_seconds / 989.4e12, rel=1e-3)
    small = {label: text for label, _, text in tiles(found)}
    assert small["Step time"] == "12,288 tokens per 8 GPUs"
    assert small["Tokens/s/GPU"] == f"{2 * TOKENS / found.step_seconds:,.0f} in all"


def test_a_run_lasts_as_many_steps_as_its_tokens_need() -> None:
    """24,576,000 tokens are 1,000 steps."""
    found = report(cost={"gpu_hour_price": 2.0, "tokens": 1000 * 2 * TOKENS})
    assert found.cost is not None
    assert found.cost.gpu_hours == pytest.approx(1000 * 16 * found.step_seconds / 3600)
    days = next(row for row in cost_rows(found) if row[0] == "days")
    assert float(days[2]) == pytest.approx(1e9 / (2 * TOKENS) * found.step_seconds / 86400, rel=5e-3)


def _mean_bubble(found: Report) -> float:
    assert found.pipeline is not None
    return sum(row.bubble_seconds for row in found.pipeline.rows) / 4 / found.step_seconds


def test_studies_count_the_global_batch_once() -> None:
    """Of 6 sequences each of 2 replicas has 3; on 8 GPUs there is one replica, which has all."""
    row = report_row(report(), job())
    assert row["step_tokens"] == 2 * TOKENS
    assert row["bubble_fraction"] == pytest.approx(_mean_bubble(report()))
    assert row["tokens_per_second"] == pytest.approx(2 * TOKENS / row["step_seconds"])
    assert parse_target("tokens_per_second_per_gpu=1000", job()).step_seconds == TOKENS / 8 / 1000
    assert job().sequences_per_step == base_of(experiment()).batch_sequences == 6
    assert _split_batch(6, 16, 1, 8) == (1, 3)
    one = resize_base(base_of(experiment()), 1, 8)
    assert (one.sequences, one.job.data_parallel_size, one.batch_sequences) == (6, 1, 6)


@pytest.mark.parametrize(("batch", "gpus"), [(7, 16), (6, 12)])
def test_a_batch_that_the_replicas_cannot_share_is_refused(batch: int, gpus: int) -> None:
    with pytest.raises(
        InputError, match=f"{batch} sequences does not divide over {gpus} GPUs, 8 to a replica"
    ):
        _split_batch(batch, gpus, 1, 8)


def test_the_headline_has_the_degrees() -> None:
    assert parallelism_label(job()) == "PP 4 (1f1b) x DP 2 x TP 2"
    assert "FSDP2 | PP 4 (1f1b) x DP 2 x TP 2 | dgx-h100" in headline(report())
    interleaved = {"pipeline": 2, "virtual_stages": 2, "context": 2, "layers_per_stage": (8,) * 4}
    deeper = resolve(experiment().model_copy(update={"parallelism": ParallelismTable(**interleaved)}))
    assert parallelism_label(deeper) == "PP 2 (interleaved-1f1b, 2 stages each) x DP 4 x CP 2"
    alone = resolve(experiment().model_copy(update={"parallelism": ParallelismTable()}))
    assert parallelism_label(alone) == ""


def test_validated_runs_of_data_parallelism_alone_say_little_about_a_pipeline() -> None:
    assert strategy_name(job()) == "FSDP2 + TP + PP"


def test_modules_that_run_again_are_named_and_count_as_hardware_flops() -> None:
    training = {"activation_checkpointing": "selective", "recompute_modules": ["mlp"]}
    found = resolve(
        Experiment(model="llama-2-7b", cluster="dgx-h100", training=training, strategy={"kind": "megatron"})
    )
    assert training_label(found) == "bf16, selective (mlp) activation checkpointing"
    work = step_work(found)
    assert work.hardware_flops - work.model_flops == 32 * 2 * 3 * 4096 * 11008 * work.tokens_per_gpu


def test_active_parameters_leave_out_experts_that_a_token_does_not_pass() -> None:
    """Mixtral 8x7B: 6 of the 8 experts of 32 layers, three matrices of 4,096 x 14,336 each."""
    found = model_size(replace(job(), model=load_model("mixtral-8x7b")))
    idle = 32 * 6 * 3 * 4096 * 14336
    assert found == {
        "parameters": 46_702_792_704, "active_parameters": 46_702_792_704 - idle, "mtp_parameters": 0,
    }  # fmt: skip


def test_pairs_that_the_mask_leaves_out_are_no_work_of_kernels() -> None:
    """Llama 3 8B, a sequence of a million tokens. By the convention 12 L d S is 12 x 32 x 4096 x 2^20 of a
    token's FLOPs, 97 %, and half of it is masked; full recomputation adds a third. The report said that
    kernels reach 86 % of the peak."""
    file: dict[str, Any] = {
        "model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 16, "strategy": {"kind": "fsdp2"},
        "parallelism": {"context": 64},
        "training": {"sequence_length": 2**20, "activation_checkpointing": "full"},
    }  # fmt: skip
    report = zsim.simulate(zsim.Experiment(**file)).report
    attention = 12 * 32 * 4096 * 2**20 * report.work.tokens_per_gpu
    assert report.work.masked_flops[0] == pytest.approx(attention / 2)
    assert report.work.masked_flops[1] == pytest.approx(attention / 2 * 4 / 3)
    assert report.limit.endswith("kernels reach 44 % of the peak.")
    assert any("49% of the model's FLOPs are pairs that the mask leaves out" in note for note in report.notes)


def test_usual_lengths_need_no_note_on_what_mfu_counts() -> None:
    file: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "nodes": 1,
        "strategy": {"kind": "fsdp2"},
    }
    report = zsim.simulate(zsim.Experiment(**file, training={"sequence_length": 8192})).report
    assert not any("the mask leaves out" in note for note in report.notes)


def test_attention_that_is_written_out_computes_masked_pairs_too() -> None:
    """GPT-2 on V100s, which have no fused attention: the products are over all pairs of 1,024 tokens."""
    found = zsim.Experiment(
        model="gpt2",
        cluster="dgx-2",
        gpus=1,
        training={"sequence_length": 1024, "precision": "fp16"},
        strategy={"kind": "ddp"},
    )
    assert step_work(resolve(found)).masked_flops == (0.0, 0.0)


@seed(41)
@settings(max_examples=12, deadline=None)
@given(
    model=st.sampled_from(["llama-3.2-1b", "gpt2-medium", "gemma3-1b", "olmoe-1b-7b"]),
    cluster=st.sampled_from(["dgx-h100", "hgx-b200", "dgx-a100-80gb"]),
    length=st.sampled_from([128, 1024, 65_536, 1_048_576]),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
    attention=st.sampled_from(["flash", "math"]),
)
def test_no_kernels_do_more_than_the_peak(
    model: str, cluster: str, length: int, checkpointing: str, attention: str
) -> None:
    """Utilisation by the convention counts pairs that no kernel computes, and passes 100 % on long sequences;
    by what a mask leaves it never does."""
    if attention == "math" and length > 1024:
        length = 1024
    if model == "gpt2-medium":
        length = min(length, 1024)
    training = {"sequence_length": length, "activation_checkpointing": checkpointing, "attention": attention}
    found = zsim.Experiment(model=model, cluster=cluster, gpus=1, training=training, strategy={"kind": "ddp"})
    report = zsim.simulate(found).report
    masked, usual = report.masked_hfu_fraction, report.hfu_fraction
    assert masked is not None
    assert usual is not None
    assert 0 < masked <= min(usual, 1)
    assert 0 < (report.masked_mfu_fraction or 0) <= (report.mfu_fraction or 0)
