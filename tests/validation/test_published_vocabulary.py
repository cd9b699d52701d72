"""Published tables are read in whatever words they have: known rows reworded in twenty ways are the same
experiments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from validation.published.cluster import cluster_preset, described_gbps
from validation.published.job import row_experiment
from validation.published.model import preset_of_name
from validation.published.predict import predict_row, shipped_tables
from validation.published.strangers import is_read_alike
from validation.published.table import PublishedRun, read_runs
from validation.published.vocabulary import read_words
from zsim.errors import NotSimulatedError

WORDED = ("strategy", "act_ckpt", "precision", "attn_kernel", "optimizer", "gpu", "offload", "compile")
Rewording = Callable[[dict[str, str]], dict[str, str]]


def _in(columns: tuple[str, ...], pattern: str, other: str) -> Rewording:
    """Texts of `columns` with a pattern, in any case, replaced."""
    return lambda cells: {
        name: re.sub(f"(?i){pattern}", other, text) if name in columns else text
        for name, text in cells.items()
    }


def _numbers(change: Callable[[str], str]) -> Rewording:
    return lambda cells: {
        name: change(text) if re.fullmatch(r"\d+(\.0)?", text) and name not in (*WORDED, "date") else text
        for name, text in cells.items()
    }


def _texts(change: Callable[[str], str], columns: tuple[str, ...] = WORDED) -> Rewording:
    return lambda cells: {name: change(text) if name in columns else text for name, text in cells.items()}


def _parts_reversed(text: str) -> str:
    """The parts of "FSDP1 FULL_SHARD (MP mode PURE)" the other way round."""
    parts = [part.strip() for part in re.split(r"[()]", text) if part.strip()]
    return "; ".join(reversed(parts))


def _degrees_in_words(cells: dict[str, str]) -> dict[str, str]:
    """The degrees behind the strategy's text and in no column."""
    said = " ".join(
        f"{name.upper()}={float(cells[name]):.0f}" for name in ("tp", "pp", "cp", "ep") if cells.get(name)
    )
    text = re.sub(r"\b(TP|PP|CP|EP|VP)\d+", "", cells["strategy"])
    other = {name: text for name, text in cells.items() if name not in ("tp", "pp", "cp", "ep")}
    return {**other, "strategy": f"{text} {said}"}


REWORDINGS: Mapping[str, Rewording] = {
    "upper case": _texts(str.upper),
    "lower case": _texts(str.lower),
    "slashes for commas": _texts(lambda text: text.replace(", ", "/")),
    "brackets": _texts(
        lambda text: text.replace("(", "[").replace(")", "]"), ("gpu", "strategy", "optimizer")
    ),
    "plus signs apart": _texts(
        lambda text: re.sub(r" ?(?<!\+)\+(?!\+) ?", " + ", text), ("strategy", "act_ckpt")
    ),
    "parts the other way round": _texts(_parts_reversed, ("strategy",)),
    "degrees in words alone": _degrees_in_words,
    "whole numbers": _numbers(lambda text: text.removesuffix(".0")),
    "decimal numbers": _numbers(lambda text: f"{float(text):.1f}"),
    "thousands apart": _numbers(lambda text: f"{float(text):,.0f}"),
    "n/a for nothing": lambda cells: {
        name: text or ("n/a" if name in ("vp", "cp", "ep", "shard_group", "n_kv_heads") else "")
        for name, text in cells.items()
    },
    "hyphens for spaces in GPUs": _in(("gpu",), " ", "-"),
    "NVIDIA's names": _in(("gpu",), r"^([AHBV]\d00)-(SXM\d?)-(\d+GB)", r"NVIDIA \1 \2 \3"),
    "no hyphens in GPUs": _in(("gpu",), "-", " "),
    "bfloat16": _in(("precision",), r"(?<![a-z_])bf16", "bfloat16"),
    "float16": _in(("precision",), r"(?<![a-z_])fp16", "float16"),
    "FA2": _in(("attn_kernel",), r"flash-attn 2", "FlashAttention-2"),
    "stages": _in(("strategy",), r"ZeRO-([0-3])(?![+\d])", r"zero stage \1"),
    "checkpoints": _in(("act_ckpt",), r"^full-block|^full-layer", "full recomputation, every layer"),
    "switched off": _in(("act_ckpt", "offload"), r"^none", "no"),
}


def known_rows() -> list[PublishedRun]:
    """A row of every wording of strategy, recomputation, GPU, precision and attention that can be read."""
    seen: dict[tuple[str, ...], PublishedRun] = {}
    for run in read_runs(shipped_tables()).runs:
        strategy = re.sub(r"\d+", "n", run.text("strategy"))
        key = (strategy, *(run.text(name) for name in ("act_ckpt", "gpu", "precision", "attn_kernel")))
        seen.setdefault(key, replace(run, source="someone else's"))
    return list(seen.values())


def experiment_of(run: PublishedRun) -> dict[str, Any] | None:
    try:
        return row_experiment(run).experiment.model_dump()
    except NotSimulatedError:
        return None


def test_twenty_ways_to_reword() -> None:
    assert len(REWORDINGS) == 20


def test_known_rows_reworded_are_the_same_experiments() -> None:
    """Whatever their source is called: rows of the checkout under the name of none."""
    rows = known_rows()
    assert len(rows) > 80
    changed = []
    for run in rows:
        known = experiment_of(run)
        for name, reword in REWORDINGS.items():
            found = experiment_of(replace(run, cells=reword(dict(run.cells))))
            if found != known:
                changed.append((name, run.row_id))
    assert not changed


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("H100-SXM-96GB-HBM2e-500W", "grand-teton-h100-500w"),
        ("GeForce RTX 4090", "rtx-4090-x8"),
        ("rtx4090 24 GB", "rtx-4090-x8"),
        ("AMD Instinct MI300X", "mi300x-x8"),
        ("MI355X-288GB", "mi355x-x8"),
        ("A100 40G", "dgx-a100-40gb"),
        ("Tesla V100-SXM2-32GB", "jean-zay-v100"),
        ("A100 PCIe", "a100-pcie-x8"),
        ("GB300 NVL72", "gb300-nvl72"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090-x8"),
        ("RTX A6000 48GB", "rtx-a6000-x8"),
    ],
)
def test_gpus_are_found_by_any_usual_spelling(text: str, preset: str) -> None:
    assert cluster_preset(PublishedRun("a", "s", "", {"gpu": text}, "x")) == preset


@pytest.mark.parametrize(
    ("network", "preset"),
    [("4x100Gb/s OmniPath per node (Jean Zay A100)", "jean-zay-a100"), ("InfiniBand", "dgx-a100-80gb")],
)
def test_a_machine_is_found_by_the_name_of_its_network(network: str, preset: str) -> None:
    run = PublishedRun("a", "s", "", {"gpu": "A100-SXM4-80GB", "inter_desc": network}, "x")
    assert cluster_preset(run) == preset


@pytest.mark.parametrize("text", ["Intel Max 1550", "H200-NVL-141GB-PCIe", "B200 (labelled H200)", "MI250X"])
def test_gpus_without_a_file_are_refused(text: str) -> None:
    with pytest.raises(NotSimulatedError, match="has no hardware file"):
        cluster_preset(PublishedRun("a", "s", "", {"gpu": text}, "x"))


@pytest.mark.parametrize(
    ("text", "gbps"),
    [
        ("8x400Gb/s NDR InfiniBand per node", 400.0),
        ("EFA 3.2 Tb/s", 400.0),
        ("400 Gb/s RoCE per GPU", 400.0),
        ("4x HDR", 100.0),
        ("NDR InfiniBand", 400.0),
        ("one EDR 100 Gbps port per node", 12.5),
        ("not stated", None),
        ("NOT STATED: GPU to PCIe 504 GB/s", None),
    ],
)
def test_networks_are_read_from_their_description(text: str, gbps: float | None) -> None:
    """On nodes of eight GPUs."""
    assert described_gbps(text, 8) == gbps


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama 2 70B", "llama-2-70b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("qwen2.5 7b", "qwen2-7b"),
        ("DeepSeek V3", "deepseek-v3"),
        ("Somebody-7B", None),
        ("", None),
    ],
)
def test_models_are_found_by_name(name: str, preset: str | None) -> None:
    assert preset_of_name(name) == preset


BARE = {
    "model": "meta-llama/Llama-3.1-8B", "seq_len": "4096", "gpu": "H100 80GB", "n_gpus": "16",
    "strategy": "FSDP2", "micro_batch": "1",
}  # fmt: skip


def test_what_a_row_leaves_open_is_named_with_what_was_taken() -> None:
    """A network, a precision and recomputation that nobody stated."""
    row = row_experiment(PublishedRun("a", "someone", "", BARE, "runs.csv: line 2"))
    assert "checkpointing: not published, taken as none" in row.assumptions
    assert any(text.startswith("network: not published, taken as the dgx-h100") for text in row.assumptions)
    assert "model: taken as the preset llama-3.1-8b" in row.assumptions


def test_words_that_are_not_understood_are_named() -> None:
    cells = {**BARE, "strategy": "FSDP2 with wobbly prefetching"}
    row = row_experiment(PublishedRun("a", "someone", "", cells, "runs.csv: line 2"))
    assert "strategy: not understood: wobbly, prefetching" in row.assumptions
    assert read_words("strategy", "FSDP2").unknown == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"strategy": "DDP, LoRA r=16 on q,v"}, {"rank": 16, "targets": ("q_proj", "v_proj")}),
        ({"strategy": "FSDP2", "lora_rank": "64", "lora_targets": "all-linear"},
         {"rank": 64, "targets": "all-linear"}),
        ({"strategy": "single GPU", "notes": "QLoRA rank 32, all linear layers"},
         {"rank": 32, "targets": "all-linear", "quantized": "nf4"}),
    ],
)  # fmt: skip
def test_rows_of_lora_are_lora(changes: dict[str, str], expected: dict[str, Any]) -> None:
    cells = {**BARE, "n_gpus": "1" if "single" in changes["strategy"] else "8", **changes}
    lora = row_experiment(PublishedRun("a", "someone", "", cells, "x")).experiment.training.lora
    assert lora is not None
    assert {name: getattr(lora, name) for name in expected} == expected


def test_the_width_of_heads_can_be_said() -> None:
    cells = {
        **BARE, "model": "x", "n_layers": "28", "hidden": "3072", "n_heads": "24", "n_kv_heads": "8",
        "head_dim": "64", "ffn": "8192", "mlp_type": "swiglu", "vocab": "128256",
    }  # fmt: skip
    model = row_experiment(PublishedRun("a", "someone", "", cells, "x")).experiment.model
    assert isinstance(model, Mapping)
    assert model["head_dim"] == 64


def test_an_experts_degree_may_be_that_of_tensor_parallelism() -> None:
    """`ETP=TP` of Megatron's launch scripts."""
    cells = {
        **BARE, "model": "qwen3-30b-a3b", "strategy": "Megatron TP2 EP4", "arch_type": "decoder-moe",
        "n_layers": "48", "hidden": "2048", "n_heads": "32", "n_kv_heads": "4", "vocab": "151936",
        "notes": "hybrid{etp=TP}; moe{experts=128,topk=8,moe_ffn=768,head_dim=128}",
    }  # fmt: skip
    parallelism = row_experiment(PublishedRun("a", "someone", "", cells, "x")).experiment.parallelism
    assert (parallelism.tensor, parallelism.expert, parallelism.expert_tensor) == (2, 4, 2)


def test_an_error_in_one_row_is_that_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PublishedRun("a", "someone", "", {**BARE, "hidden": "wide"}, "runs.csv: line 2")
    skipped = predict_row(replace(run, cells={**BARE, "n_gpus": "eight"}))
    assert (skipped.status, skipped.reason) == (
        "skipped",
        "runs.csv: line 2: column 'n_gpus': found 'eight', expected a number or nothing",
    )

    def fails(_run: PublishedRun) -> None:
        raise KeyError("etp")

    monkeypatch.setattr("validation.published.predict.row_job", fails)
    assert predict_row(run).reason == "an error of zsim: KeyError: 'etp'"


def test_what_was_found_out_of_a_source_is_no_strangers() -> None:
    """vTrain's runs recomputed nothing, against its table; a stranger believes the table. What software and
    date tell is known to everybody."""
    row = next(run for run in read_runs(shipped_tables()).runs if run.source == "vtrain-single")
    studied, strangers, renamed = (
        row_experiment(run).experiment
        for run in (row, replace(row, is_strangers=True), replace(row, source="someone else's"))
    )
    assert studied.training.activation_checkpointing == "none"
    assert strangers.training.activation_checkpointing == "full"
    assert strangers.training.layer_kernels != studied.training.layer_kernels
    assert strangers == renamed
    composer = next(run for run in read_runs(shipped_tables()).runs if run.source == "mosaic-2024-01")
    assert is_read_alike(composer)
