"""From rows of Megatron, nanotron and InternEvo to their strategy."""

from __future__ import annotations

from typing import Any

import pytest

from validation.published.job import RowJob, row_job
from validation.published.predict import predict_row
from validation.published.table import PublishedRun
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.make import make_plan
from zsim.specs.experiment.data.loading import waiting_seconds
from zsim.specs.model.spec import Residual

CELLS = {
    "arch_type": "decoder", "n_layers": "12", "hidden": "1024", "n_heads": "16", "ffn": "4096",
    "mlp_type": "gelu", "vocab": "50304", "tied_emb": "True", "seq_len": "1024", "gpu": "A100-SXM4-80GB",
    "n_gpus": "16", "gpus_per_node": "8", "inter_gbps_per_gpu": "200", "micro_batch": "4", "grad_accum": "2",
    "global_batch": "128", "precision": "fp16", "act_ckpt": "full-layer", "compile": "no",
    "attn_kernel": "unfused Megatron softmax", "offload": "none", "date": "2023", "optimizer": "Adam",
    "strategy": "TP1 PP1 DP16 1F1B", "software": "Megatron-LM", "zero_stage": "0", "tp": "1", "pp": "1",
}  # fmt: skip
CORE = {
    "strategy": "Megatron dist-opt (ZeRO-1) TP1 PP1 CP1", "software": "NeMo/Megatron-Core", "zero_stage": "1",
    "date": "2025-11", "precision": "bf16", "reduce_dtype": "bf16", "attn_kernel": "TE/cuDNN fused attention",
}  # fmt: skip
INTERNEVO = {
    "software": "InternEvo (InternLM) v0.2.x", "precision": "bf16", "zero_stage": "1", "shard_group": "8",
    "strategy": "ZeRO-1 optimizer states over 8 GPUs (hybrid ZeRO), TP1", "attn_kernel": "flash-attn",
    "mlp_type": "swiglu", "tied_emb": "False",
}  # fmt: skip
NANOTRON = {
    **INTERNEVO, "software": "nanotron 2025-01", "strategy": "DP16 TP1(SP, async) PP1 1F1B ZeRO-1",
    "gpu": "H100-SXM5-80GB", "inter_gbps_per_gpu": "400",
    "inter_desc": "AWS p5 EFA 3200Gb/s per node (HF cluster; collectives degrade strongly with nodes)",
}  # fmt: skip


def row(**changes: str) -> RowJob:
    source = changes.pop("source", "somewhere")
    return row_job(PublishedRun("r-1", source, "", {**CELLS, **changes}, "runs.csv: line 2"))


def megatron(**changes: str) -> MegatronConfig:
    strategy = row(**changes).job.strategy
    assert isinstance(strategy, MegatronConfig)
    return strategy


@pytest.mark.parametrize(
    ("date", "source", "placeholders", "loss"),
    [
        ("2024-02", "somewhere", False, "megatron-before-0.8"),
        ("2024-05", "somewhere", False, "megatron-before-0.8"),
        ("2024-08", "somewhere", False, "megatron"),
        ("2025-07", "somewhere", False, "megatron"),
        ("2025", "megatron-ci", True, "megatron"),
        ("2025-08", "somewhere", True, "megatron"),
    ],
)
def test_a_row_of_megatron_core_is_of_the_release_of_its_date(
    date: str, source: str, placeholders: bool, loss: str
) -> None:
    """0.4.0 until February 2024, 0.7.0 until 0.8.0 of August, 0.12.0 until 0.13.0 of July 2025."""
    found = row(**{**CORE, "date": date, "source": source})
    assert isinstance(found.job.strategy, MegatronConfig)
    assert found.job.strategy.keeps_placeholders == placeholders
    assert found.job.training.cross_entropy == loss


def test_a_row_without_settings_is_megatrons_command_line_of_its_date() -> None:
    """fp16 of 2023: one buffer of fp16 gradients, reduced behind backward, by 3.0, which joins nothing and
    fuses only fp32 sums; its kernels are its own, its gradients are clipped."""
    found = row()
    strategy = found.job.strategy
    assert isinstance(strategy, MegatronConfig)
    assert (strategy.distributed_optimizer, strategy.overlap_grad_reduce) == (False, False)
    assert (strategy.grad_dtype, strategy.is_contiguous, strategy.fuses_accumulation) == ("fp16", True, False)
    assert found.job.training.compile
    assert found.job.training.cross_entropy == "megatron-before-0.8"
    assert found.assumptions == ("gradients are reduced after backward",)


@pytest.mark.parametrize(
    ("date", "is_contiguous", "checks_nan"),
    [("2020-05", False, False), ("2021-08", True, False), ("2026", True, True)],
)
def test_the_date_says_the_release(date: str, is_contiguous: bool, checks_nan: bool) -> None:
    strategy = megatron(date=date)
    assert (strategy.is_contiguous, strategy.checks_nan) == (is_contiguous, checks_nan)


@pytest.mark.parametrize(("date", "overlaps"), [("2023-12", False), ("2025-06", True)])
def test_nemos_recipes_overlap_where_no_note_says_otherwise(date: str, overlaps: bool) -> None:
    """NeMo 2's DistributedDataParallelConfig; its launch settings are named as assumed."""
    found = row(**{**CORE, "date": date})
    strategy = found.job.strategy
    assert isinstance(strategy, MegatronConfig)
    assert (strategy.overlap_grad_reduce, strategy.overlap_param_gather) == (overlaps, overlaps)
    assert any("NeMo's recipes" in text for text in found.assumptions) == overlaps


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ("", (False, False)),
        ("hybrid{sp=0,grad_overlap=0,param_overlap=0,dist_opt=1}", (False, False)),
        ("log; hybrid{sp=0,grad_overlap=1,param_overlap=0,dist_opt=1}", (True, False)),
        ("hybrid{sp=0,grad_overlap=1,param_overlap=1,dist_opt=1}", (True, True)),
    ],
)
def test_the_hybrid_note_says_what_overlaps(note: str, expected: tuple[bool, bool]) -> None:
    strategy = megatron(**{**CORE, "software": "Megatron-Core"}, notes=note)
    assert strategy.distributed_optimizer
    assert (strategy.overlap_grad_reduce, strategy.overlap_param_gather) == expected
    assert strategy.grad_dtype == "bf16"


def test_a_cuda_graph_spares_the_host_the_layers() -> None:
    assert megatron(**CORE, notes="hybrid{grad_overlap=0,cuda_graph=False}").host_events.block is not None
    assert megatron(**CORE, notes="hybrid{grad_overlap=0,cuda_graph=full}").host_events.block is None
    parts = megatron(**CORE, notes="hybrid{grad_overlap=0,cuda_graph=transformer_engine:attn+moe_router}")
    assert parts.host_events.block == "megatron_core_half_block"
    tests = megatron(**CORE, notes="hybrid{grad_overlap=0}", flags="deterministic-mode + NCCL_ALGO=Ring")
    assert tests.host_events.block == "megatron_core_deterministic_block"


@pytest.mark.parametrize(
    ("gpu", "test", "expected"),
    [
        ("A100-SXM4-80GB", "gpt/gpt3_mcore_te_tp1_pp4_vp1/golden_values_dev_dgx_a100.json", (True, 1.7)),
        ("A100-SXM4-80GB", "gpt/gpt3_mcore_tp1_pp2/golden_values_dev_dgx_a100.json", (True, 1.4)),
        ("A100-SXM4-80GB", "gpt/gpt3_7b_tp4_pp1_memory_speed/golden_values_dev_dgx_a100.json", (False, 1.5)),
        ("H100-SXM5-80GB", "gpt/gpt3_mcore_tp1_pp2/golden_values_dev_dgx_h100.json", (False, 0.95)),
        ("H100-SXM5-80GB", "gpt/gpt3_mcore_te_tp1_pp4_vp1/golden_values_dev_dgx_h100.json", (False, 1.3)),
        (
            "H100-SXM5-80GB",
            "gpt/gpt3_mcore_te_tp4_pp2_frozen_resume_torch_dist_reshard_8x1xNone/golden_values.json",
            (True, 1.85),
        ),
    ],
)
def test_megatrons_tests_ran_with_the_timers_and_hosts_of_their_day(
    gpu: str, test: str, expected: tuple[bool, float]
) -> None:
    """As their rules say; without one a cluster has its file's host."""
    found = row(source="megatron-ci", gpu=gpu, source_ref=f"NVIDIA/Megatron-LM@d98e8a64:{test}")
    assert isinstance(found.job.strategy, MegatronConfig)
    assert (found.job.strategy.synchronizes_timers, found.job.cluster.host.overhead_factor) == expected


def test_vtrains_single_node_skips_its_updates() -> None:
    found = row(source="vtrain-single", inter_gbps_per_gpu="", n_gpus="8", global_batch="64")
    assert isinstance(found.job.strategy, MegatronConfig)
    assert found.job.strategy.skips_update
    assert any("loss scale" in assumption for assumption in found.assumptions)
    assert not megatron(source="vtrain-multi").skips_update


def test_vtrains_single_node_recomputes_nothing_and_reduces_in_line() -> None:
    """As its rows of role calibrate show, and as Megatron-DeepSpeed did then; its runs on many nodes
    recompute, and are as their release of Megatron."""
    cells = {"strategy": "TP2 PP1 DP4 1F1B", "tp": "2", "dp": "4", "inter_gbps_per_gpu": "", "n_gpus": "8"}
    found = row(source="vtrain-single", global_batch="32", **cells)
    other = row(source="vtrain-multi", global_batch="32", **cells)
    assert found.job.training.activation_checkpointing == "none"
    assert other.job.training.activation_checkpointing == "full"
    assert not found.job.parallelism.overlap_tensor_reduce
    assert other.job.parallelism.overlap_tensor_reduce
    assert (found.job.cluster.gpu.gemm.max_fraction, other.job.cluster.gpu.gemm.max_fraction) == (0.74, 0.84)
    assert "nothing is recomputed" in found.assumptions


def test_internevo_sums_on_all_ranks_and_shards_states_within_its_group() -> None:
    """Two groups of 8 among 16; 512 Mi elements to a bucket; the mapping is said."""
    found = row(**INTERNEVO)
    strategy = found.job.strategy
    assert isinstance(strategy, MegatronConfig)
    assert (strategy.has_whole_tensor_owners, strategy.is_contiguous, strategy.optimizer_instances) == (
        True,
        False,
        2,
    )
    assert strategy.bucket_size == 512 * 2**20
    assert (strategy.overlap_grad_reduce, strategy.overlap_param_gather) == (True, False)
    assert strategy.host_events.block is None
    assert any("InternEvo" in assumption for assumption in found.assumptions)
    assert not found.job.training.compile
    assert megatron(**{**INTERNEVO, "shard_group": "16"}).optimizer_instances == 1


def test_nanotron_reduces_behind_backward_with_zero_1_and_in_ddps_buckets_without() -> None:
    """25 MiB of bf16 to a bucket; fp32 sums either way, and gathers behind the update."""
    sharded, whole = megatron(**NANOTRON), megatron(**{**NANOTRON, "zero_stage": "0"})
    assert (sharded.distributed_optimizer, whole.distributed_optimizer) == (True, False)
    assert (sharded.bucket_size, whole.bucket_size) == (None, 25 * 2**20 // 2)
    assert (sharded.overlap_grad_reduce, whole.overlap_grad_reduce) == (False, True)
    for strategy in (sharded, whole):
        assert strategy.is_nanotron
        assert not strategy.has_whole_tensor_owners
        assert not strategy.overlap_param_gather
        assert (strategy.grad_dtype, strategy.host_events.block) == ("fp32", "nanotron_block")


def test_nanotrons_network_is_its_busy_clusters() -> None:
    """Rounds between nodes take 242 us more than on an idle p5; other p5 clusters stay idle."""
    busy, idle = row(**NANOTRON).job.cluster, row(**{**NANOTRON, "inter_desc": "AWS p5 EFA"}).job.cluster
    assert (busy.name, idle.name) == ("aws-p5-busy", "aws-p5")
    rounds = [one.collectives.protocols["simple"].inter_round for one in (busy, idle)]
    assert rounds[0] - rounds[1] == pytest.approx(242e-6, abs=1e-6)
    assert busy.nic.bandwidth == idle.nic.bandwidth


def test_nanotrons_pipelines_on_64_nodes_wait_for_every_send() -> None:
    """All of role calibrate do; on fewer nodes some do, and without a pipeline nothing is sent."""
    many = {**NANOTRON, "source": "nanotron-sweep", "n_gpus": "512", "mlp_type": "swiglu", "tied_emb": "True"}
    piped = {"pp": "2", "strategy": "DP256 TP1 PP2 1F1B ZeRO-1", "shard_group": "256", "global_batch": "2048"}
    found = row(**{**many, **piped})
    assert found.job.cluster.collectives.message_delay == pytest.approx(0.1)
    assert any("0.1 s more" in one for one in found.assumptions)
    fewer = {**many, **piped, "n_gpus": "256", "shard_group": "128", "global_batch": "1024"}
    alone = {**many, "shard_group": "512", "global_batch": "4096"}
    for other in (fewer, alone):
        assert row(**other).job.cluster.collectives.message_delay == 0.0


def test_tests_on_one_node_of_gb200_wait_for_their_samples() -> None:
    """0.2 s for a micro-batch of 4 sequences, however many replicas the node has; others do not wait."""
    ci = {
        **CORE, "source": "megatron-ci", "gpu": "GB200-186GB", "gpus_per_node": "4", "tp": "2", "dp": "2",
        "strategy": "Megatron DDP TP2 PP1 CP1 EP1", "zero_stage": "0", "act_ckpt": "none",
    }  # fmt: skip
    for gpus, waits in (("4", 0.8), ("8", 0.0)):
        replicas = int(gpus) // 2
        cells = {"n_gpus": gpus, "dp": str(replicas), "grad_accum": "4", "global_batch": str(16 * replicas)}
        job = row(**{**ci, **cells}).job
        found = waiting_seconds(job.experiment.data, job.training, job.gpus_per_node, 2, 0.1)
        assert found == pytest.approx(waits)


def test_deepspeed_beside_megatron_stays_deepspeeds() -> None:
    for strategy in ("Megatron TP1 + DeepSpeed ZeRO-3", "TP1 PP1 DP16 + ZeRO-1", "ZeRO-0"):
        stage = strategy[-1]
        found = row(strategy=strategy, zero_stage=stage).job.strategy
        assert isinstance(found, DeepSpeedConfig)
        assert found.stage == int(stage)


@pytest.mark.parametrize(("date", "is_early"), [("2021-04", True), ("2022-07", False)])
def test_zero_3_of_before_2022_fetches_one_by_one(date: str, is_early: bool) -> None:
    """DeepSpeed 0.6 is of March 2022."""
    found = row(strategy="ZeRO-3 without model parallelism", zero_stage="3", date=date)
    assert isinstance(found.job.strategy, DeepSpeedConfig)
    assert found.job.strategy.fetches_one_by_one == is_early
    assert any("before 0.6" in assumption for assumption in found.assumptions) == is_early


@pytest.mark.parametrize(
    ("gpu", "name", "capacity"),
    [
        ("V100-SXM2-16GB", "dgx-1", 15.78), ("V100-SXM2-32GB", "jean-zay-v100", 31.75),
        ("GB200-186GB", "gb200-nvl72", None),
    ],
)  # fmt: skip
def test_new_gpus_have_their_cluster(gpu: str, name: str, capacity: float | None) -> None:
    per_node = "8" if name == "dgx-1" else "4"
    cluster = row(gpu=gpu, gpus_per_node=per_node, inter_gbps_per_gpu="12.5").job.cluster
    assert cluster.name == name
    if capacity:
        assert cluster.gpu.memory.capacity == round(capacity * 2**30)


@pytest.mark.parametrize(
    ("attention", "kind", "dropout"),
    [
        ("Megatron fused softmax (no flash)", None, 0.1), ("local impl", "math", 0.1),
        ("unfused attention", "math", 0.1), ("TE/cuDNN flash", "flash", 0.0),
    ],
)  # fmt: skip
def test_written_out_attention_of_megatrons_has_dropout(
    attention: str, kind: str | None, dropout: float
) -> None:
    found: Any = row(attn_kernel=attention).job
    core = next(module.op_spec for module in found.model.blocks[0].modules if module.name == "attn.core")
    assert core.dropout == dropout
    assert kind in (None, found.training.attention)


@pytest.mark.parametrize(
    ("text", "policy"), [("full-layer (uniform, every 1)", "full"), ("full-layer", "full")]
)
def test_every_layer_is_every_layer(text: str, policy: str) -> None:
    assert row(act_ckpt=text).job.training.activation_checkpointing == policy


def test_fp16_products_of_megatron_run_at_the_rate_of_its_own_tables() -> None:
    """Fitted to megatron-2020; bf16 and other frameworks keep the GPU file's."""
    rates = [
        row(**changes).job.cluster.gpu.gemm.max_fraction for changes in ({}, {"precision": "bf16"}, INTERNEVO)
    ]
    assert rates == [0.84, 0.792, 0.792]


TESTS = {
    "source": "megatron-ci", "software": "Megatron-LM tests, mcore", "date": "2026-08", "precision": "bf16",
    "strategy": "Megatron DDP TP1 PP1 CP1", "attn_kernel": "TE fused/flash",
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "reference", "expected"),
    [
        ("A100-SXM4-80GB", "gpt/gpt3_mcore_te_tp1_pp1_x/", (2**25, 2**25, 2**22)),
        ("H100-SXM5-80GB", "gpt/gpt3_mcore_te_tp1_pp1_x/", (2**25, 2**25, 2**25)),
        ("A100-SXM4-80GB", "gpt/gpt3_mcore_te_tp1_pp1_nondeterministic/", (8_519_680, 8_519_680, 2**22)),
        ("H100-SXM5-80GB", "gpt/gpt3_mcore_tp1_pp1/", (2**25, 2**25)),
    ],
)
def test_tests_of_megatrons_have_workspaces_by_gpu_modules_and_mode(
    gpu: str, reference: str, expected: tuple[int, ...]
) -> None:
    """Two of torch's, 2 x 4 MiB and 8 x 16 KiB, or 32 MiB on Hopper and in deterministic mode; Transformer
    Engine's, 4 or 32 MiB."""
    assert megatron(**TESTS, gpu=gpu, source_ref=reference).workspaces == expected


def test_workspaces_are_held_all_along_and_older_releases_have_none() -> None:
    plan = make_plan(row(**TESTS, source_ref="gpt/gpt3_mcore_tp1_pp1/").job)
    held = [memory.bytes for memory in plan.programs[0].resident if memory.category == "buffers"]
    assert held == [2**25, 2**25]
    assert megatron().workspaces == ()


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({}, True),
        ({"tp": "2", "n_gpus": "32"}, True),
        ({"source_ref": "gpt/gpt3_mcore_tp1_pp1/"}, False),  # --transformer-impl local
    ],
)
def test_transformer_engine_keeps_a_placeholder_of_every_shape_of_weights(
    changes: dict[str, str], is_kept: bool
) -> None:
    """qkv, projection and the two products of the MLP, each of a tensor rank's shape, in bf16, once for all
    layers; 16 bits of elements each, beside the workspaces."""
    cells = {**TESTS, "source_ref": "gpt/gpt3_mcore_te_tp1_pp1_x/", **changes}
    job = row(**cells).job
    hidden, ranks = int(CELLS["hidden"]), int(changes.get("tp", 1))
    expected = sorted(2 * features * hidden**2 // ranks for features in (3, 1, 4, 4))
    strategy = job.strategy
    assert isinstance(strategy, MegatronConfig)
    held = [memory.bytes for memory in make_plan(job).programs[0].resident if memory.category == "buffers"]
    assert sorted(held) == sorted([*strategy.workspaces, *(expected if is_kept else [])])


def test_tests_of_megatrons_drop_out_unless_they_have_context_parallelism() -> None:
    """Their files leave --hidden-dropout at 0.1, which adds a mask to every residual."""
    adds = [
        [
            m.op_spec.dropout
            for m in row(**TESTS, **cells).job.model.blocks[0].modules
            if isinstance(m.op_spec, Residual)
        ]
        for cells in ({}, {"cp": "2", "n_gpus": "32"}, {"n_kv_heads": "4"})
    ]
    assert adds == [[0.1, 0.1], [0.0, 0.0], [0.1, 0.1]]


@pytest.mark.parametrize(
    ("source", "gpus", "nodes"),
    [
        ("mlperf-llama31-405b", 256, 16),
        ("mlperf-llama31-405b", 2496, 16),
        ("mlperf-lora", 144, 18),
        ("dgxc-megatron", 512, 16),
        ("nemo-docs-gb200", 128, 16),
        ("nemo-docs-gb200", 64, 18),
        ("somewhere", 256, 18),
    ],
)
def test_racks_of_gb200_are_filled_as_their_launcher_asks(source: str, gpus: int, nodes: int) -> None:
    """624 nodes of 39 racks are 16 of each, 36 of two 18; elsewhere nothing is known, and racks fill up."""
    cells = {"gpu": "GB200-186GB", "gpus_per_node": "4", "n_gpus": str(gpus), "inter_gbps_per_gpu": "400"}
    sizes = {"micro_batch": "1", "grad_accum": "1", "global_batch": str(gpus), "dp": str(gpus)}
    found = row(**{**CORE, **cells, **sizes, "source": source, "strategy": f"TP1 PP1 DP{gpus} 1F1B"})
    assert found.job.cluster.node_link.nodes_per_domain == nodes


def test_kempnerforge_has_the_types_the_reductions_and_the_board_of_its_code() -> None:
    """kempnerforge/distributed/parallel.py and training/grad.py of 01b461a; four H200 without NVSwitch."""
    cells = {
        "source": "kempnerforge-h200", "gpu": "H200-SXM-141GB", "gpus_per_node": "4", "n_gpus": "4",
        "strategy": "FSDP2 2 x TP 2", "software": "KempnerForge 01b461a (PyTorch FSDP2 + TP)", "tp": "2",
        "dp": "2", "zero_stage": "3", "precision": "bf16 mixed", "attn_kernel": "SDPA flash",
        "inter_gbps_per_gpu": "400", "global_batch": "16", "optimizer": "AdamW fused fp32",
    }  # fmt: skip
    job = row(**cells).job
    assert isinstance(job.strategy, Fsdp2Config)
    assert (job.strategy.reduce_dtype, job.strategy.no_sync) == ("fp32", True)
    assert (job.training.stored_dtype, job.training.gradient_clipping) == ("bf16", 1.0)
    assert job.cluster.node_link.kind == "mesh"


def test_a_stranger_recomputes_what_a_table_assumes_only_where_memory_wants_it() -> None:
    """A small model fits without what its table assumes; one of thirty billion parameters does not."""
    large = {
        "n_layers": "40", "hidden": "8192", "ffn": "32768", "n_heads": "64", "tp": "8", "micro_batch": "4",
        "global_batch": "16", "strategy": "TP8 PP1 DP2 1F1B",
    }  # fmt: skip
    assert stranger_seconds() < 0.85 * stranger_seconds(assumed_fields="")
    assert stranger_seconds(**large) == stranger_seconds(**large, assumed_fields="")


def stranger_seconds(**changes: str) -> float:
    cells = {**CELLS, "assumed_fields": "recompute (config)", "step_time_s": "1", **changes}
    seconds = predict_row(PublishedRun("r-1", "", "", cells, "", is_strangers=True)).predicted_seconds
    assert seconds is not None
    return seconds
