"""From rows with tensor, pipeline and context parallelism to their `[parallelism]`, a row of each source."""

from __future__ import annotations

from typing import Any

import pytest

from validation.published.job import RowExperiment, row_experiment
from validation.published.parallelism import nanotron_layers
from validation.published.predict import measured_seconds
from validation.published.table import PublishedRun
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

GPT = {
    "arch_type": "decoder", "n_layers": "96", "hidden": "12288", "n_heads": "96", "ffn": "49152",
    "mlp_type": "gelu", "vocab": "51200", "tied_emb": "True", "seq_len": "2048", "gpu": "A100-SXM4-80GB",
    "n_gpus": "64", "gpus_per_node": "8", "inter_gbps_per_gpu": "200", "micro_batch": "1",
    "precision": "fp16", "act_ckpt": "full-layer", "compile": "no", "attn_kernel": "unfused attention",
    "offload": "none", "date": "2021-04", "optimizer": "Adam", "zero_stage": "0", "software": "Megatron-LM",
}  # fmt: skip
LLAMA = {
    **GPT, "mlp_type": "swiglu", "n_layers": "16", "hidden": "2048", "n_heads": "32", "ffn": "8192",
    "vocab": "131072", "seq_len": "4096", "gpu": "H100-SXM5-80GB", "precision": "bf16", "act_ckpt": "none",
    "attn_kernel": "flash-attn 2", "date": "2025-02", "inter_gbps_per_gpu": "400",
}  # fmt: skip
CORE = {**LLAMA, "software": "NeMo/Megatron-Core", "zero_stage": "1", "date": "2025-06", "tied_emb": "False"}
TITAN = {**LLAMA, "software": "torchtitan", "zero_stage": "3", "tied_emb": "False", "compile": "per-block"}


def experiment(source: str, base: dict[str, str], **cells: str) -> RowExperiment:
    return row_experiment(PublishedRun("r-1", source, "", {**base, **cells}, "runs.csv: line 2"))


def parallelism(row: RowExperiment) -> dict[str, Any]:
    return row.experiment.parallelism.model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    ("source", "base", "cells", "kind", "expected"),
    [
        ("megatron-sc21-table1", GPT, {"strategy": "TP+PP+DP (PTD-P), no ZeRO", "tp": "8", "pp": "8",
         "vp": "2"},
         "megatron",
         {"tensor": 8, "sequence_parallel": False, "pipeline": 8, "virtual_stages": 2}),
        ("megatron-2020", GPT, {"strategy": "TP8 x DP8", "tp": "8"}, "megatron",
         {"tensor": 8, "sequence_parallel": False}),
        ("korthikanti-table5", GPT,
         {"strategy": "TP8+SP PP8 DP1", "tp": "8", "pp": "8", "vp": "3",
          "act_ckpt": "selective (core attention)",
          "notes": "hybrid{sp=1,tp_overlap=0,p2p_overlap=1,dist_opt=0,sched=1f1b-interleaved}"}, "megatron",
         {"tensor": 8, "sequence_parallel": True, "pipeline": 8, "virtual_stages": 3}),
        ("vtrain-multi", GPT, {"strategy": "TP4 PP16 DP1 1F1B", "tp": "4", "pp": "16",
         "software": "Megatron-LM / Megatron-DeepSpeed (vTrain validation runs)"}, "megatron",
         {"tensor": 4, "sequence_parallel": False, "pipeline": 16}),
        ("bigscience-a100", GPT, {"strategy": "TP8 x PP8 x DP1 + ZeRO-1", "tp": "8", "pp": "8",
         "zero_stage": "1", "n_layers": "94"}, "deepspeed",
         {"tensor": 8, "sequence_parallel": False, "overlap_tensor_reduce": False, "pipeline": 8,
          "first_stage_less_layers": 1, "last_stage_less_layers": 1}),
        ("bigscience-v100", GPT, {"strategy": "Megatron TP4 + DeepSpeed ZeRO-3", "tp": "4",
         "zero_stage": "3"},
         "deepspeed", {"tensor": 4, "sequence_parallel": False, "overlap_tensor_reduce": False}),
        ("megascale-paper", GPT, {"strategy": "TP8 PP8 VP6 interleaved 1F1B, SP, ZeRO (paper: ZeRO-2 style)",
         "tp": "8", "pp": "8", "vp": "6", "micro_batch": "", "act_ckpt": "unstated"}, "megatron",
         {"tensor": 8, "sequence_parallel": True, "pipeline": 8, "virtual_stages": 6}),
        ("dgxc-megatron",
         CORE, {"strategy": "Megatron-Core (NeMo): distributed optimizer (ZeRO-1) with overlapped "
         "grad RS + param AG", "tp": "4", "pp": "4", "vp": "4", "cp": "2"}, "megatron",
         {"tensor": 4, "sequence_parallel": True, "async_tensor": True, "pipeline": 4, "virtual_stages": 4,
          "context": 2}),
        ("mlperf-llama31-405b", CORE, {"strategy": "Megatron dist-opt (ZeRO-1) TP4 PP4 CP2 VP2", "tp": "4",
         "pp": "4", "vp": "2", "cp": "2", "n_layers": "14",
         "notes": "hybrid{sp=1,tp_overlap=1,asym_pp=embedding+loss count as layers}"}, "megatron",
         {"tensor": 4, "sequence_parallel": True, "async_tensor": True, "pipeline": 4, "virtual_stages": 2,
          "first_stage_less_layers": 1, "last_stage_less_layers": 1, "context": 2}),
        ("megatron-ci", CORE, {"strategy": "Megatron DDP TP2 PP1 CP4 EP1", "tp": "2", "cp": "4",
         "notes": "hybrid{sp=0,tp_overlap=0,grad_overlap=0}"}, "megatron",
         {"tensor": 2, "sequence_parallel": False, "context": 4}),
        ("nemo-launcher-h100", CORE, {"strategy": "TP4 PP1 CP1 DP16 dist-opt", "tp": "4",
         "date": "2024-05"}, "megatron",
         {"tensor": 4, "sequence_parallel": True}),
        ("notes-h100-qwen14b", CORE, {"strategy": "TP4 + SP, distributed optimizer", "tp": "4",
         "software": "ms-swift Megatron backend (mcore)"}, "megatron",
          {"tensor": 4, "sequence_parallel": True}),
        ("nanotron-sweep", LLAMA, {"strategy": "DP8 TP2(SP, async) PP4 1F1B ZeRO-1", "tp": "2", "pp": "4",
         "software": "nanotron 2025-01", "notes": "hybrid{sp=1,tp_overlap=async,dist_opt=1,sched=1f1b}"},
         "megatron",
         {"tensor": 2, "sequence_parallel": True, "async_tensor": True, "pipeline": 4, "schedule": "1f1b",
          "layers_per_stage": (6, 5, 5, 0)}),
        ("nanotron-tp-scaling", LLAMA, {"strategy": "TP8 + SP (REDUCE_SCATTER, async)", "tp": "8",
         "software": "nanotron 2025-01"}, "megatron",
         {"tensor": 8, "sequence_parallel": True, "async_tensor": True}),
        ("nanotron-tp-scaling-ar", LLAMA, {"strategy": "TP8 ALL_REDUCE mode (no SP)", "tp": "8",
         "software": "nanotron 2025-01", "notes": "hybrid{sp=0,tp_overlap=0,sched=none}"}, "megatron",
         {"tensor": 8, "sequence_parallel": False}),
        ("internevo-a800", LLAMA, {"strategy": "ZeRO-1 optimizer states over 8 GPUs (hybrid ZeRO), TP2",
         "tp": "2",
         "zero_stage": "1", "shard_group": "8", "software": "InternEvo (InternLM) v0.2.x",
         "notes": "hybrid{sp=0,grad_overlap=1,dist_opt=1}"}, "megatron",
         {"tensor": 2, "sequence_parallel": False}),
        ("torchtitan-2025-06-asynctp", TITAN, {"strategy": "FSDP2 8 x TP 8 (AsyncTP)", "tp": "8"}, "fsdp2",
         {"tensor": 8, "async_tensor": True}),
        ("torchtitan-2025-06-asynctp", TITAN, {"strategy": "FSDP2 8 x TP 8 (vanilla TP)", "tp": "8"}, "fsdp2",
         {"tensor": 8}),
        ("kempnerforge-h200", TITAN, {"strategy": "FSDP2 16 x TP 4", "tp": "4", "software": "KempnerForge"},
         "fsdp2", {"tensor": 4, "gather_per_product": True, "loss_parallel": False}),
        ("torchtitan-2024-12", TITAN, {"strategy": "FSDP2 2 x CP 2 x TP 4 x PP 4 1F1B + AsyncTP", "tp": "4",
         "pp": "4", "cp": "2", "micro_batch": "8"}, "fsdp2",
         {"tensor": 4, "async_tensor": True, "pipeline": 4, "context": 2, "passes": 1}),
    ],
)  # fmt: skip
def test_a_row_of_each_source_has_its_parallelism(
    source: str, base: dict[str, str], cells: dict[str, str], kind: str, expected: dict[str, Any]
) -> None:
    row = experiment(source, base, **cells)
    assert row.experiment.strategy.kind == kind
    assert parallelism(row) == expected


def test_the_batch_is_of_the_replicas() -> None:
    """64 GPUs of 8 x 4 ranks are two replicas: 48 sequences in micro-batches of 2 are 12 each."""
    cells = {"strategy": "TP8 PP4 DP2 1F1B", "tp": "8", "pp": "4", "micro_batch": "2", "global_batch": "48"}
    row = experiment("somewhere", GPT, **cells)
    assert row.experiment.training.gradient_accumulation_steps == 12
    with pytest.raises(NotSimulatedError, match="global_batch 48 does not come from 64 GPUs"):
        experiment("somewhere", GPT, **cells, grad_accum="11")


def test_tokens_per_second_are_of_the_replicas_batch() -> None:
    """2 replicas x 3 micro-batches of 2 sequences of 2,048 tokens, at 12,288 tokens a second, last 2 s."""
    cells = {**GPT, "tp": "8", "pp": "4", "micro_batch": "2", "grad_accum": "3", "tokens_per_s": "12288"}
    assert measured_seconds(PublishedRun("r-1", "somewhere", "", cells, "")) == 2.0


def test_a_pipelines_batch_is_cut_into_as_many_micro_batches_as_ranks_by_torchtitan() -> None:
    cells = {"strategy": "FSDP2 16 x PP 4 1F1B", "pp": "4", "micro_batch": "8", "grad_accum": "2"}
    row = experiment("somewhere", TITAN, **cells)
    training = row.experiment.training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 8)
    assert row.experiment.parallelism.passes == 2
    assert "4 micro-batches in the pipeline" in row.assumptions
    with pytest.raises(NotSimulatedError, match="no whole micro-batches of 4 stages"):
        experiment("somewhere", TITAN, **{**cells, "micro_batch": "6"})


def test_embedding_and_loss_count_as_a_layer_each_where_nothing_else_divides() -> None:
    cells = {"strategy": "TP1 PP8 DP8 1F1B", "pp": "8"}
    assumption = "embedding and loss count as a layer each"
    assert assumption in experiment("somewhere", GPT, **cells, n_layers="94").assumptions
    assert assumption not in experiment("somewhere", GPT, **cells).assumptions


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "ranks", "expected"),
    [
        # A layer of 1.34B is a quarter of its LM head: 16 + 4 quarters on 2 ranks, of which the block that
        # exceeds 10 stays; of 3.57B (28 layers of 0.33 heads: 113.2M and 402.7M) 8 are beyond each quarter.
        ("16", "2048", "8192", 2, [11, 5]),
        ("16", "2048", "8192", 4, [6, 5, 5, 0]),
        ("28", "3072", "8192", 4, [8, 8, 8, 4]),
        ("28", "3072", "8192", 8, [4, 4, 4, 4, 4, 4, 4, 0]),
    ],
)
def test_nanotrons_stages_end_with_the_block_that_exceeds_their_part(
    layers: str, hidden: str, ffn: str, ranks: int, expected: list[int]
) -> None:
    cells = {**LLAMA, "n_layers": layers, "hidden": hidden, "ffn": ffn}
    assert nanotron_layers(PublishedRun("r-1", "nanotron-sweep", "", cells, ""), ranks) == expected


def test_grouped_queries_with_gelu_and_squared_relu_have_a_model() -> None:
    grouped = experiment(
        "megatron-ci", CORE, strategy="Megatron DDP TP1 PP1", mlp_type="gelu", n_kv_heads="8"
    )
    assert isinstance(grouped.experiment.model, dict)
    assert grouped.experiment.model["model_type"] == "starcoder2"
    squared = experiment("dgxc-megatron", CORE, strategy="Megatron-Core", mlp_type="relu2", n_kv_heads="8")
    assert isinstance(squared.experiment.model, dict)
    assert squared.experiment.model["model_type"] == "nemotron"


def test_a_stage_may_have_no_layer_of_its_own() -> None:
    cells = {"strategy": "DP8 TP2 PP4 1F1B", "tp": "2", "pp": "4", "software": "nanotron 2025-01"}
    job = resolve(experiment("nanotron-sweep", LLAMA, **cells).experiment)
    assert job.parallelism.layers_per_stage == (6, 5, 5, 0)


def test_flags_of_the_command_line_stand_in_the_note() -> None:
    """Megatron's functional tests name them."""
    note = (
        "hybrid{sp=0,dist_opt=1}; CI golden values; num-distributed-optimizer-instances=2; "
        "no-gradient-accumulation-fusion=True; cp-comm-type=a2a"
    )
    cells = {"strategy": "Megatron dist-opt (ZeRO-1) TP1 PP1 CP4", "cp": "4", "notes": note}
    row = experiment("megatron-ci", CORE, **cells)
    strategy = row.experiment.strategy.model_dump(exclude_unset=True)
    assert (strategy["optimizer_instances"], strategy["gradient_accumulation_fusion"]) == (2, False)
    assert parallelism(row) == {"context": 4, "context_method": "all-to-all"}


def test_alike_micro_batches_of_a_pipeline_do_not_make_a_step_too_large() -> None:
    """1,024 of 96 layers are 98,304 blocks, of which a row simulates 3 x 8 x 96; a file that asks for every
    micro-batch is refused."""
    row = experiment("somewhere", GPT, strategy="TP8 PP8 DP1 1F1B", tp="8", pp="8", grad_accum="1024")
    assert resolve(row.experiment).training.gradient_accumulation_steps == 1024
    data = row.experiment.model_dump(exclude_unset=True) | {"simulation": {"every_micro_batch": True}}
    with pytest.raises(InputError, match="more than zsim simulates"):
        resolve(Experiment(**data))


@pytest.mark.parametrize(
    ("software", "tensor", "vocab"),
    [
        ("Megatron-DeepSpeed (BigScience)", 4, 250368),  # 489 x 512
        ("Megatron-DeepSpeed (BigScience)", 8, 250880),  # 245 x 1,024
        ("Megatron-LM", 2, 250112),
        ("NeMo/Megatron-Core", 8, 250000),  # not said of NeMo: as the table has it
    ],
)
def test_megatron_pads_the_vocabulary_for_every_tensor_rank(software: str, tensor: int, vocab: int) -> None:
    strategy = "TP+PP+DP (PTD-P), no ZeRO"
    row = experiment("new-source", GPT, software=software, strategy=strategy, tp=str(tensor), vocab="250000")
    config = row.experiment.model
    assert isinstance(config, dict)
    assert config["vocab_size"] == vocab


def test_bigscience_adds_gradients_up_in_fp32_under_its_bf16_optimizer() -> None:
    cells = {"tp": "4", "pp": "8", "zero_stage": "1", "n_layers": "94", "precision": "bf16"}
    plain = experiment("bigscience-a100", GPT, strategy="TP4 x PP8 x DP2 + ZeRO-1", **cells)
    fp32 = experiment("bigscience-a100", GPT, strategy="TP4 x PP8 x DP2 + ZeRO-1 (BF16 optimizer)", **cells)
    configs = [row.experiment.strategy.model_dump()["config"] or {} for row in (plain, fp32)]
    assert [one.get("data_types") for one in configs] == [None, {"grad_accum_dtype": "fp32"}]
