"""From rows of mixtures of experts to their model, their `[parallelism]` and Megatron's flags."""

from __future__ import annotations

from typing import Any

import pytest

from validation.published.job import row_experiment, row_job
from validation.published.parallelism import parse_pipeline_layout
from validation.published.table import PublishedRun
from zsim.errors import NotSimulatedError
from zsim.frameworks.megatron.settings.table import MegatronTable

QWEN = {
    "arch_type": "decoder-moe", "model": "Qwen3-30B-A3B", "n_layers": "48", "hidden": "2048",
    "n_heads": "32", "n_kv_heads": "4", "ffn": "6144", "mlp_type": "swiglu", "vocab": "151936",
    "tied_emb": "False", "n_params": "30532110336", "seq_len": "4096", "gpu": "H100-SXM5-80GB",
    "n_gpus": "16", "gpus_per_node": "8", "inter_gbps_per_gpu": "400", "micro_batch": "1",
    "grad_accum": "64", "global_batch": "1024", "precision": "BF16", "act_ckpt": "none",
    "attn_kernel": "TE/cuDNN flash", "date": "2026-04", "optimizer": "Adam dist-opt", "zero_stage": "1",
    "software": "Megatron-Bridge NeMo container 26.04", "dp": "16", "tp": "1", "pp": "1", "cp": "1",
    "ep": "16",
    "strategy": "DDP + distributed optimizer (ZeRO-1) TP1 PP1 CP1 EP16",
    "notes": "moe{experts=128,topk=8,moe_ffn=768,shared_ffn=0,dense_layers=0,head_dim=128}; token dropless; "
    "hybrid{sp=0,grad_overlap=1,param_overlap=1,dist_opt=1,cuda_graph=none,dispatcher=hybridep,ep_overlap=0,"
    "etp=1,sched=none}",
}  # fmt: skip
DEEPSEEK = {
    **QWEN, "model": "DeepSeek-V3-671B", "n_layers": "61", "hidden": "7168", "n_heads": "128",
    "n_kv_heads": "128", "ffn": "18432", "vocab": "129280", "n_params": "671026279424", "n_gpus": "256",
    "dp": "64", "pp": "4", "vp": "4", "ep": "64", "grad_accum": "64", "global_batch": "4096",
    "notes": "moe{experts=256,topk=8,moe_ffn=2048,shared_ffn=2048,dense_layers=3,"
    "mla=q1536/kv512/nope128/rope64/v128}; MTP: off; hybrid{dispatcher=alltoall,ep_overlap=0,etp=1}; "
    "pp_layout=Et*4|(t*4|)*14tL",
}  # fmt: skip
TEST = {
    **QWEN, "model": "GPT-MoE8e-240M", "n_layers": "12", "hidden": "512", "n_heads": "8", "n_kv_heads": "8",
    "ffn": "2048", "mlp_type": "gelu", "vocab": "50432", "tied_emb": "True", "n_params": "240329728",
    "seq_len": "1024", "n_gpus": "8", "dp": "4", "tp": "2", "ep": "2", "grad_accum": "2", "micro_batch": "4",
    "global_batch": "32", "strategy": "Megatron dist-opt (ZeRO-1) TP2 PP1 CP1 EP2",
    "software": "Megatron-LM main dev container",
    "notes": "hybrid{sp=1,grad_overlap=0,dist_opt=1,cuda_graph=0,sched=none}; moe{experts=8,topk=1,"
    "moe_ffn=2048,shared_ffn=0,moe_layers=12,etp=None,dispatcher=allgather,grouped_gemm=0,capacity=dropless}",
}  # fmt: skip


def run(base: dict[str, str], **changes: str) -> PublishedRun:
    return PublishedRun("r-1", "somewhere", "report", {**base, **changes}, "runs.csv: line 2")


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (QWEN, {"expert": 16, "expert_tensor": 1, "dispatcher": "hybridep"}),
        (TEST, {"expert": 2, "dispatcher": "all-gather", "tensor": 2, "sequence_parallel": True}),
        (DEEPSEEK, {"expert": 64, "expert_tensor": 1, "dispatcher": "all-to-all", "pipeline": 4,
                    "virtual_stages": 4, "layers_per_stage": (4,) * 15 + (1,)}),
    ],
)  # fmt: skip
def test_degrees_dispatcher_and_layout_are_read(base: dict[str, str], expected: dict[str, Any]) -> None:
    found = row_experiment(run(base)).experiment.parallelism.model_dump(exclude_unset=True)
    assert found == expected


@pytest.mark.parametrize("base", [QWEN, DEEPSEEK, TEST])
def test_the_model_has_as_many_parameters_as_the_row_says(base: dict[str, str]) -> None:
    model = row_job(run(base)).job.model
    assert model.numel == pytest.approx(float(base["n_params"]), rel=2e-3)


def test_grouped_products_and_a_capacity_are_the_strategys() -> None:
    dropping = QWEN["notes"].replace("dropless", "dropping").replace("hybridep", "alltoall")
    plain, dropped, loop = (
        row_experiment(run(base, notes=notes)).experiment.strategy
        for base, notes in ((QWEN, QWEN["notes"]), (QWEN, dropping), (TEST, TEST["notes"]))
    )
    assert isinstance(plain, MegatronTable)
    assert isinstance(dropped, MegatronTable)
    assert isinstance(loop, MegatronTable)
    assert (plain.moe_grouped_gemm, plain.moe_pad_to_capacity, plain.cuda_graph) == (True, False, False)
    assert (dropped.moe_grouped_gemm, dropped.moe_pad_to_capacity) == (True, True)
    assert not loop.moe_grouped_gemm


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        (QWEN["notes"], (False, False)),
        (QWEN["notes"].replace("ep_overlap=0", "ep_overlap=1"), (True, True)),
        (QWEN["notes"] + "; overlap-moe-expert-parallel-comm=True", (True, False)),
    ],
)
def test_overlapped_exchanges_are_the_strategys(notes: str, expected: tuple[bool, bool]) -> None:
    """Recipes delay the gradients of weights beside them; a command line says so itself."""
    strategy = row_experiment(run(QWEN, notes=notes)).experiment.strategy
    assert isinstance(strategy, MegatronTable)
    assert (strategy.overlap_expert_parallel, strategy.delay_wgrad_compute) == expected


@pytest.mark.parametrize(
    ("base", "old", "new", "reason"),
    [
        (QWEN, "moe_ffn=768", "moe_ffn=?", "moe_ffn of the routed experts is '?'"),
        (DEEPSEEK, "mla=q1536", "mla=x1536", "latent attention"),
    ],
)
def test_rows_that_are_skipped_say_why(base: dict[str, str], old: str, new: str, reason: str) -> None:
    with pytest.raises(NotSimulatedError) as caught:
        row_job(run(base, notes=base["notes"].replace(old, new)))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("dispatcher=hybridep", "dispatcher=?", "dispatcher: not published"),
        ("etp=1", "etp=1,balanced=0", "routing: how uneven is not published"),
    ],
)
def test_what_a_row_leaves_open_of_its_experts_is_named(old: str, new: str, kind: str) -> None:
    assumptions = row_job(run(QWEN, notes=QWEN["notes"].replace(old, new))).assumptions
    assert any(text.startswith(kind) for text in assumptions)


@pytest.mark.parametrize(
    ("layout", "stages", "expected"),
    [
        ("Et*4|(t*4|)*14tmL", 16, [4] * 15 + [1]),
        ("Et*3|(tt|)*6mL", 8, [3, *[2] * 6, 0]),
        ("Et*3|(tt|)*6mL", 4, []),
    ],
)
def test_a_layout_of_stages(layout: str, stages: int, expected: list[int]) -> None:
    assert parse_pipeline_layout(f"x; pp_layout={layout}; y", stages) == expected


@pytest.mark.parametrize(
    ("dispatcher", "gpu", "expected"),
    [
        ("hybridep", "GB200-186GB", 1),
        ("deepep", "GB200-186GB", 4),
        ("hybridep", "H100-SXM5-80GB", 2),
    ],
)
def test_hybridep_sees_an_nvlink_domain_as_a_node(dispatcher: str, gpu: str, expected: int) -> None:
    notes = QWEN["notes"].replace("dispatcher=hybridep", f"dispatcher={dispatcher}")
    per_node = "4" if gpu.startswith("GB") else "8"
    job = row_job(run(QWEN, notes=notes, gpu=gpu, gpus_per_node=per_node)).job
    assert job.parallelism.experts.nodes == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("selective (layernorm+moe_act)", ("layernorm", "moe_act")),
        ("selective (norm, act)", ("layernorm", "moe_act")),
        ("selective ([moe_act])", ("moe_act",)),
        ("selective (layernorm, moe)", ("layernorm", "moe")),
    ],
)
def test_recomputed_modules_have_megatrons_names(text: str, expected: tuple[str, ...]) -> None:
    assert row_job(run(QWEN, act_ckpt=text)).job.training.recompute_modules == expected


@pytest.mark.parametrize(("software", "is_later"), [("main 1e057005", False), ("long context", True)])
def test_the_model_zoos_first_rows_have_the_flags_they_were_published_with(
    software: str, is_later: bool
) -> None:
    """Its files of 27 May 2025 have no userbuffers, no fused loss and no experimental kernels."""
    notes = QWEN["notes"].replace("hybridep", "deepep").replace("sp=0", "sp=1")
    cells = {
        **QWEN, "software": f"Megatron-Core main/dev (MoE ModelZoo), {software}", "notes": notes, "tp": "2",
        "ep": "8", "dp": "8", "global_batch": "512", "precision": "bf16",
    }  # fmt: skip
    row = PublishedRun("r-1", "megatron-moe-modelzoo", "report", cells, "runs.csv: line 2")
    experiment = row_experiment(row).experiment
    strategy = experiment.strategy
    assert isinstance(strategy, MegatronTable)
    assert strategy.moe_permute_fusion
    assert strategy.enable_experimental is is_later
    assert experiment.parallelism.async_tensor is is_later
    assert (experiment.training.cross_entropy == "fused") is is_later
