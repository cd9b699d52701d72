"""From rows to jobs: what each column sets, and what is refused with which reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from validation.published.job import row_job
from validation.published.predict import measured_seconds
from validation.published.table import PublishedRun
from zsim.errors import NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.specs.model.spec import Attention, Loss

CELLS = {
    "arch_type": "decoder", "n_layers": "12.0", "hidden": "768.0", "n_heads": "12.0", "ffn": "3072.0",
    "mlp_type": "gelu", "vocab": "50368", "tied_emb": "True", "seq_len": "2048", "gpu": "A100-SXM4-80GB",
    "n_gpus": "16", "gpus_per_node": "8", "inter_gbps_per_gpu": "200", "strategy": "FSDP1 FULL_SHARD",
    "micro_batch": "4", "grad_accum": "2", "global_batch": "128", "precision": "bf16", "act_ckpt": "none",
    "attn_kernel": "flash-attn 2", "compile": "no", "offload": "none", "reduce_dtype": "fp32",
    "date": "2024-01",
    "zero_stage": "3", "optimizer": "AdamW",
}  # fmt: skip
MOSAIC = {
    "strategy": "FSDP1 FULL_SHARD (MP mode DEFAULT)", "software": "torch 2.1.0 + composer",
    "precision": "amp_bf16",
}  # fmt: skip


def run(**changes: str) -> PublishedRun:
    return PublishedRun("r-1", "somewhere", "", {**CELLS, **changes}, "runs.csv: line 2")


def test_a_gelu_row_is_gpt_2s_block_with_the_rows_parameters() -> None:
    """llm-foundry's 125M: 12 blocks of 12 h^2 + 13 h, (50368 + 2048) h of tables, 2 h of the last norm:
    85,054,464 + 40,255,488 + 1,536 = 125,311,488."""
    row = row_job(run(n_params="125311488", n_params_kind="exact"))
    assert row.job.model.numel == 125_311_488
    assert (row.job.num_nodes, row.job.gpus_per_node, row.sequences) == (2, 8, 8.0)


def test_a_swiglu_row_is_llamas_block() -> None:
    row = row_job(run(mlp_type="swiglu", tied_emb="False", n_kv_heads="4", ffn="2048"))
    assert row.job.model.family == "llama"


def test_dlperf_s_port_is_one_under_a_switch_without_gpudirect() -> None:
    """Its pages: one EDR port for the node, PIX to two GPUs; the table's 12.5 Gb/s for each GPU are not eight
    cards."""
    cells = run(gpu="V100-SXM2-16GB", inter_gbps_per_gpu="12.5", n_gpus="16", precision="fp16")
    found = row_job(replace(cells, source="dlperf-deepspeed-v100"))
    nic = found.job.cluster.nic
    assert (nic.per_node, nic.bandwidth, nic.gpudirect, nic.attached) == (1, 12.5e9, False, "switch")
    assert any(text.startswith("GPUDirect's module was not loaded") for text in found.assumptions)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"inter_gbps_per_gpu": "50"}, {"nic.bandwidth": 6.25e9, "nic.per_node": 8}),
        ({"gpus_per_node": "4"}, {"gpus_per_node": 4, "nic.per_node": 4}),
        ({"intra_link": "NVLink3/NVSwitch 400GB/s bidir"}, {"node_link.bandwidth": 200e9}),
        ({"intra_link": "A100: 600GB/s; H100: 900GB/s"}, {"node_link.bandwidth": 300e9}),
    ],
)
def test_the_rows_hardware_replaces_the_presets(changes: dict[str, str], expected: dict[str, Any]) -> None:
    cluster = row_job(run(**changes)).job.cluster
    for dotted, value in expected.items():
        found: Any = cluster
        for name in dotted.split("."):
            found = getattr(found, name)
        assert found == pytest.approx(value)


def test_the_attention_kernels_generation_comes_from_the_row() -> None:
    second = row_job(run()).job.cluster.gpu.attention.forward_fraction
    first = row_job(run(attn_kernel="flash-attn (triton v1)")).job.cluster.gpu.attention.forward_fraction
    assert first < 0.7 * second
    assert row_job(run(attn_kernel="unfused attention")).job.training.attention == "math"


@pytest.mark.parametrize(
    ("text", "every", "kind"),
    [
        ("full-block", 1, "full"),
        ("selective-layer (2)", 2, "full"),
        ("selective (torchtitan op-SAC)", 1, "selective-op"),
        ("selective (fraction ~1/2 from HFU/MFU)", 2, "full"),
        ("selective (HFU/MFU ~1.3: near full)", 1, "full"),
        ("none (unstated)", 1, "none"),
    ],
)
def test_what_is_recomputed_comes_from_the_row(text: str, every: int, kind: str) -> None:
    training = row_job(run(act_ckpt=text)).job.training
    assert (training.activation_checkpointing, training.checkpoint_every) == (kind, every)


def test_pull_request_135_means_operators_by_sac() -> None:
    """Its table was read as every second layer, which would need 28 % more memory than it measured."""
    row = replace(run(act_ckpt="selective-layer (2)"), source="torchtitan-pr135")
    training = row_job(row).job.training
    assert (training.activation_checkpointing, training.checkpoint_every) == ("selective-op", 1)


@pytest.mark.parametrize(
    ("software", "loss"),
    [
        ("HF SFTTrainer + Accelerate FSDP; none", "eager"),
        ("HF SFTTrainer + Accelerate FSDP; foak-fast-kernels", "unsloth"),
        ("HF SFTTrainer + Accelerate FSDP; foak-fast-kernels-liger", "fused_linear"),
    ],
)
def test_fast_kernels_bring_their_loss(software: str, loss: str) -> None:
    assert row_job(run(software=software)).job.training.cross_entropy == loss


@pytest.mark.parametrize(("date", "loss"), [("2024-12", "eager"), ("2025-04", "fused")])
def test_torchtitan_compiles_its_loss_since_april_2025(date: str, loss: str) -> None:
    cells = {**CELLS, "compile": "per-block", "date": date, "software": "torch nightly, torchtitan"}
    row = PublishedRun("r-1", "a-new-source", "", cells, "runs.csv: line 2")
    assert row_job(row).job.training.cross_entropy == loss


def test_mosaics_first_attention_was_the_cuda_kernel() -> None:
    """FlashMHA until February 2023, Triton's after: at head width 128 a fifth slower."""
    kernel = {"attn_kernel": "flash-attn (attn_impl=flash, triton/HazyResearch v1)"}
    curves = [
        row_job(run(**MOSAIC, **kernel, date=date)).job.cluster.gpu.attention
        for date in ("2022-12", "2023-04")
    ]
    assert [curve.forward_fraction for curve in curves] == [0.228, 0.362]


def test_composers_releases_are_known_by_their_date() -> None:
    """DEFAULT left parameters in fp32 to autocast with torch 1.12 and 1.13; checkpoints stop early from torch
    2.1 on; prefetching is BACKWARD_POST throughout."""
    old, new = row_job(run(**MOSAIC, date="2022-12")).job, row_job(run(**MOSAIC)).job
    assert (old.strategy.param_dtype, old.strategy.reduce_dtype) == ("fp32", "bf16")  # type: ignore[attr-defined]
    assert (new.strategy.param_dtype, new.strategy.reduce_dtype) == ("bf16", "fp32")  # type: ignore[attr-defined]
    assert (old.training.autocast, new.training.autocast) == (True, False)
    assert (old.training.checkpoint_stops_early, new.training.checkpoint_stops_early) == (False, True)
    assert new.strategy.backward_prefetch == "BACKWARD_POST"  # type: ignore[attr-defined]
    losses = [module.op_spec for module in new.model.after if isinstance(module.op_spec, Loss)]
    assert losses == [Loss(50368, 2, "as they are")]
    assert (old.training.cross_entropy, new.training.cross_entropy) == ("autocast", "fused")
    assert (old.training.optimizer_implementation, new.training.optimizer_implementation) == (
        "fused",
        "fused",
    )


@pytest.mark.parametrize(
    ("software", "before_torch_2"),
    [
        ("torch 1.12 + composer", True),
        ("torch 1.13.1 + composer", True),
        ("PyTorch 1.11 FSDP", True),
        ("torch 2.1.0 + composer", False),
    ],
)
def test_torch_before_2_is_known_by_its_release(software: str, before_torch_2: bool) -> None:
    strategy = row_job(run(**{**MOSAIC, "software": software})).job.strategy
    assert isinstance(strategy, Fsdp1Config)
    assert strategy.before_torch_2 == before_torch_2


def test_composers_old_name_for_a_precision_tells_of_torch_1_13() -> None:
    """No composer knows "bf16" and runs on torch 2: parameters gathered as the row says, but FSDP1 of 1.13,
    its larger CUDA context, and checkpoints that do not stop early."""
    changes = {**MOSAIC, "strategy": "FSDP1 FULL_SHARD (MP mode PURE)", "act_ckpt": "full-block"}
    old, new = (row_job(run(**changes | {"precision": name})).job for name in ("bf16", "amp_bf16"))
    for job, is_old in ((old, True), (new, False)):
        assert isinstance(job.strategy, Fsdp1Config)
        assert (job.strategy.before_torch_2, job.strategy.param_dtype) == (is_old, "bf16")
        assert job.training.checkpoint_stops_early != is_old
        assert job.training.cross_entropy == "fused"
    assert old.cluster.framework_memory.context > new.cluster.framework_memory.context


@pytest.mark.parametrize(
    ("source", "date", "holds"),
    [
        ("torchtitan-pr135", "2024-03", "in fp32"),
        ("torchtitan-2024-12", "2024-12", "no"),
        ("fms-fsdp", "2024-04", "as they are"),
        ("fms-fsdp", "2025-08", "no"),
    ],
)
def test_loops_that_hold_their_logits_are_known_by_their_date(source: str, date: str, holds: str) -> None:
    job = row_job(replace(run(date=date), source=source)).job
    assert [
        module.op_spec.holds_logits for module in job.model.after if isinstance(module.op_spec, Loss)
    ] == [holds]


def test_checkpoints_are_reentrant_where_their_trainer_left_them_so() -> None:
    """composer's until MosaicML's YAML files said otherwise."""
    changes = {**MOSAIC, "act_ckpt": "full-block"}
    found = [row_job(run(**changes, date=date)).job.training for date in ("2023-02", "2023-04", "2024-01")]
    assert [training.checkpoint_is_reentrant for training in found] == [True, False, False]
    assert [training.checkpoint_stops_early for training in found] == [False, False, True]


def test_composers_early_models_run_slower_kernels_and_every_release_logs_its_metrics() -> None:
    """torch's cross-entropy and a padding mask until February 2023; two metrics a micro-batch always; its own
    AdamW goes tensor by tensor."""
    early = row_job(run(**MOSAIC, date="2023-02", optimizer="DecoupledAdamW fp32 states")).job
    assert [module.op_spec for module in early.model.after if isinstance(module.op_spec, Loss)] == [
        Loss(50368, 2, "as they are")
    ]
    assert early.training.cross_entropy == "autocast"
    cores = [m.op_spec for m in early.model.blocks[0].modules if isinstance(m.op_spec, Attention)]
    assert [core.unpads for core in cores] == [True]
    assert early.training.optimizer_implementation == "for_loop"
    plain = row_job(run(date="2023-02")).job
    assert [m.op_spec for m in plain.model.after if isinstance(m.op_spec, Loss)] == [Loss(50368)]


def test_a_last_micro_batch_may_be_smaller_but_not_missing() -> None:
    """128 GPU-sequences over 16 GPUs are 8 each; 2 x 5 = 10 > 8 leaves a last one of 3; 3 x 5 does not."""
    assert row_job(run(micro_batch="5")).sequences == 8.0
    with pytest.raises(NotSimulatedError, match="global_batch 128 does not come from"):
        row_job(run(micro_batch="5", grad_accum="3"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": "3"}, "tp 3 do not divide 16 GPUs"),
        ({"ep": "2"}, "expert parallelism (ep = 2)"),
        ({"notes": "moe{experts=8,topk=2}"}, "moe_ffn of the routed experts is ''"),
        ({"strategy": "JAX/XLA FSDP (GSPMD)"}, "XLA's scheduler"),
        ({"strategy": "fairscale FSDP"}, "fairscale"),
        ({"offload": "optimizer->CPU"}, "offload 'optimizer->CPU' is not simulated (strategy"),
        ({"strategy": "ZeRO-3", "zero_stage": "3", "offload": "hidden states"}, "offload 'hidden states'"),
        ({"strategy": "PTD-P", "tp": ""}, "degrees of model parallelism are not published"),
        ({"strategy": "something else", "zero_stage": ""}, "strategy 'something else' is not simulated"),
        ({"strategy": "ZeRO-3", "zero_stage": "3", "offload": "optimizer NVMe"}, "NVMe of unknown drives"),
        ({"arch_type": "moe"}, "number and width of the routed experts"),
        ({"arch_type": "hybrid-mamba2-dense"}, "architecture 'hybrid-mamba2-dense'"),
        ({"gpu": "TPU v4"}, "GPU 'TPU v4'"),
        ({"hidden": ""}, "no hidden"),
        ({"n_heads": "7"}, "7"),
        ({"n_gpus": "12", "global_batch": "96"}, "12 GPUs do not fill nodes of 8"),
        ({"n_params": "1e9", "n_params_kind": "exact"}, "parameters, but the row says"),
        ({"compile": "thunder nvfuser"}, "thunder"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_its_reason(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(NotSimulatedError) as caught:
        row_job(run(**changes))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"act_ckpt": ""}, "checkpointing: not published, taken as none"),
        ({"act_ckpt": "as usual"}, "checkpointing: 'as usual' taken as none"),
        ({"inter_gbps_per_gpu": ""}, "network: not published, taken as the dgx-a100-80gb preset's"),
        (
            {"inter_gbps_per_gpu": "", "inter_desc": "8x200 Gb/s RoCE"},
            "network: not published, taken as 200 Gb/s for each GPU",
        ),
        ({"precision": "fp8 (?)", "gpu": "H100"}, "precision: 'fp8 (?)' taken as fp8 throughout"),
        (
            {"strategy": "ZeRO-3", "zero_stage": "3", "offload": "unknown"},
            "offload: 'unknown' taken as none",
        ),
        ({"micro_batch": "", "grad_accum": "2"}, "batch: micro-batch not published, taken as 4"),
        ({"mlp_type": ""}, "model: mlp_type not published, taken as swiglu"),
        (
            {"strategy": "sharded somehow", "zero_stage": "2"},
            "strategy: 'sharded somehow' taken as deepspeed",
        ),
        ({"compile": "sometimes"}, "compile: 'sometimes' taken as no"),
    ],
)
def test_what_a_row_leaves_open_is_taken_and_named(changes: dict[str, str], sentence: str) -> None:
    assert sentence in row_job(run(**changes)).assumptions


def test_degrees_in_the_strategys_text_count_where_no_column_has_them() -> None:
    job = row_job(run(strategy="FSDP2 4 x TP 4", grad_accum="8")).job
    assert (job.kind, job.parallelism.tensor) == ("fsdp2", 4)


def test_rows_of_role_trend_are_predicted_and_not_compared() -> None:
    trend = PublishedRun("r", "s", "trend", {**CELLS, "step_time_s": "1.0"}, "x")
    assert row_job(trend).job.world_size == 16
    assert measured_seconds(trend) is None
    assert measured_seconds(replace(trend, role="report")) == 1.0


def test_an_offloaded_row_names_its_blocks_its_release_and_how_its_script_builds_the_model() -> None:
    """ml-engineering's script pins memory, checkpoints without re-entering and does not use zero.Init."""
    row = run(
        strategy="ZeRO-3 + CPU optimizer offload (pinned, DeepSpeedCPUAdam)", offload="optimizer->CPU",
        source="", software="torch 2.13, DeepSpeed 0.19.2, Liger 0.8", act_ckpt="full-block",
    )  # fmt: skip
    job = row_job(PublishedRun(row.row_id, "stas00-h200-b200", "", row.cells, row.where)).job
    offload = job.strategy.zero.offload_optimizer  # type: ignore[attr-defined]
    assert (offload.device, offload.pin_memory) == ("cpu", True)
    assert (job.strategy.version, job.strategy.zero_init) == ("0.19.2", False)  # type: ignore[attr-defined]
    training = job.training
    assert (training.liger, training.compile, training.cross_entropy) == (True, False, "fused_linear")
    assert training.checkpoint_stops_early


def test_parameters_leave_the_gpu_where_the_row_says_so() -> None:
    job = row_job(run(strategy="ZeRO-3", offload="optimizer+params CPU")).job
    assert job.strategy.zero.offload_param.device == "cpu"  # type: ignore[attr-defined]
    likely = row_job(run(strategy="ZeRO-3", offload="optimizer->CPU (likely)"))
    assert "offload" in likely.assumptions
    assert likely.job.strategy.zero.offload_param is None  # type: ignore[attr-defined]


def test_ml_engineerings_runs_have_the_configuration_of_their_script() -> None:
    """insights/when-to-upgrade-gpus: stage 2 overlaps there too, against DeepSpeed's default."""
    cells = {**CELLS, "strategy": "ZeRO-2", "zero_stage": "2", "software": "DeepSpeed 0.19.2"}
    ours, default = (
        row_job(PublishedRun("r-1", source, "", cells, "runs.csv: line 2")).job.strategy
        for source in ("stas00-h200-b200", "somewhere")
    )
    assert isinstance(ours, DeepSpeedConfig)
    assert isinstance(default, DeepSpeedConfig)
    assert (ours.zero.overlap_comm, ours.gradient_clipping) == (True, 1.0)
    assert (default.zero.overlap_comm, default.gradient_clipping) == (False, 0.0)


@pytest.mark.parametrize(
    ("software", "date", "connections"),
    [
        ("DeepSpeed 0.6.2, PyTorch 1.10.2", "2022-07", 8),
        ("DeepSpeed 0.9.5", "2023-06", 8),
        ("Megatron-DeepSpeed (BigScience), PyTorch 1.10", "2022-03", 8),
        ("Megatron-LM 2020", "2020-10", 8),
        ("Megatron-LM main dev container", "2025-06", 1),
        ("nanotron 2025-01 (Ultra-Scale Playbook sweep)", "2025-01", 1),
        ("torch 2.4, torchtitan", "2024-12", 8),
    ],
)
def test_hardware_queues_are_what_the_runs_scripts_export(software: str, date: str, connections: int) -> None:
    assert row_job(run(software=software, date=date)).job.training.device_max_connections == connections


def test_azures_runs_have_the_configuration_of_their_script() -> None:
    """examples_deepspeed/azure/run-175b.sh, where DeepSpeed's defaults are 1e9, 1e9 and 5e8."""
    cells = {**CELLS, "strategy": "ZeRO-3 (TP=PP=1)", "software": "DeepSpeed 0.6.2", "precision": "fp16"}
    job = row_job(PublishedRun("azure-1", "azure-zero3", "", cells, "runs.csv: line 2")).job
    assert isinstance(job.strategy, DeepSpeedConfig)
    zero = job.strategy.zero
    assert (zero.max_live_parameters, zero.max_reuse_distance) == (3 * 10**9, 3 * 10**9)
    assert (zero.reduce_bucket_size, zero.overlap_comm) == (90_000_000, True)
    assert (job.strategy.precision, job.strategy.gradient_clipping) == ("fp16", 1.0)
