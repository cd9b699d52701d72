"""The recorded runs, by what must hold for each of them; no torch needed."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from validation.provenance import checksums
from validation.record.__main__ import record_everything
from validation.record.cases import STRATEGIES, find, folder_name, recorded_cases
from zsim.comparison.plan_check import unfold

TRACES = Path(__file__).parents[2] / "traces"
GLOO = TRACES / "gloo"
SUMMARIES = {path.parent.name: json.loads(path.read_text()) for path in sorted(GLOO.glob("*/summary.json"))}
ALL = pytest.mark.parametrize("name", SUMMARIES)
ENGINE = pytest.mark.parametrize("name", [name for name in SUMMARIES if name.startswith("zero")])


def volume(summary: dict[str, Any]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for call in unfold(summary["calls"]):
        counted[call.kind] += call.bytes
    return counted


def events(name: str, rank: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = gzip.decompress((GLOO / name / f"rank{rank}.jsonl.gz").read_bytes()).decode().splitlines()
    header, *rest = map(json.loads, lines)
    return header, rest


def test_every_case_is_recorded() -> None:
    """DDP, ZeRO-1, 2, 3, both offloads, FSDP2 both ways, HSDP, DeepSpeed; two models, 2 and 4 ranks."""
    assert {folder_name(*case) for case in recorded_cases()} == set(SUMMARIES)
    assert {strategy.name for strategy in STRATEGIES} >= {
        "ddp", "zero1", "zero2", "zero3", "zero3-host", "zero3-nvme", "fsdp2-reshard", "fsdp2-keep", "hsdp"
    }  # fmt: skip


def test_everything_is_made_again_by_commands_that_exist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """3 says that a part was skipped; any other number is a failure, and the parts after it still run."""
    started: list[str] = []

    def start(words: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        assert importlib.util.find_spec(words[2]) is not None
        started.append(words[2])
        return subprocess.CompletedProcess(words, codes.get(words[2], 0))

    monkeypatch.setattr(subprocess, "run", start)
    codes = {"validation.gpu": 3}
    assert record_everything(tmp_path) == 0
    assert {path.partition("/")[0] for path in checksums(TRACES)} == {
        "checkpoints", "cpu-2core-epyc", "cpu-2core-epyc-25-1", "cpu-2core-epyc-26-2",
        "deepspeed", "gloo", "h100-80gb-hbm3", "oracle", "shaped",
    }  # fmt: skip
    assert started == [
        "validation.oracle", "validation.record", "validation.deepspeed_calls",
        "validation.deepspeed_calls.hooks", "validation.checkpoints", "validation.checkpoints.clock",
        "validation.overlap", "validation.microbench", "validation.predict", "validation.gpu",
    ]  # fmt: skip
    codes = {"validation.gpu": 3, "validation.oracle": 2}
    assert record_everything(tmp_path) == 2
    assert len(started) == 20


def test_who_does_not_ask_the_model_is_told_the_device(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")
    from validation.record.run import Order, options_of

    order = Order(str(tmp_path), device="cuda")
    devices = {strategy.name: options_of(strategy, order).get("device") for strategy in STRATEGIES}
    assert {name for name, device in devices.items() if device is None} == {
        "ddp", "deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3"
    }  # fmt: skip
    assert options_of(find("zero3-nvme-even")[0], order)["nvme_folder"] == tmp_path / "nvme"


@ALL
def test_all_ranks_made_the_same_calls_and_the_model_learned(name: str) -> None:
    summary = SUMMARIES[name]
    assert summary["same_calls_on_all_ranks"] is True
    assert summary["loss"]["last"] < 0.8 * summary["loss"]["first"]


@ALL
def test_gradients_are_reduced_once_and_whole(name: str) -> None:
    """4 bytes per parameter, up to padding; less than 1 % here."""
    counted, exact = volume(SUMMARIES[name]), 4 * SUMMARIES[name]["parameters"]
    reduced = counted["reduce_scatter"] or counted["all_reduce"]
    assert exact <= reduced <= 1.01 * exact


@ENGINE
def test_parameters_are_gathered_as_often_as_the_stage_says(name: str) -> None:
    """Stages 1 and 2 once, after the step. Stage 3 twice, but root and last block once."""
    calls = unfold(SUMMARIES[name]["calls"])
    gathers = [call for call in calls if call.kind == "all_gather"]
    reductions = [call for call in calls if call.kind == "reduce_scatter"]
    if name.startswith("zero3"):
        assert len(gathers) == 2 * len(reductions) - 2
        ends = reductions[-1].bytes + reductions[0].bytes  # the root's, the last block's
        total = sum(call.bytes for call in reductions)
        assert sum(call.bytes for call in gathers) == 2 * total - ends
    else:
        assert sorted(call.bytes for call in gathers) == sorted(call.bytes for call in reductions)


@ENGINE
def test_model_states_are_shared_out_by_the_stage(name: str) -> None:
    """fp32: parameters 4, gradients 4 (all of them on each rank in stage 1), moments 8 bytes per parameter;
    offloaded master weights 4 more, and files hold the gradients too."""
    summary = SUMMARIES[name]
    ranks = summary["world_size"]
    padded = sum(call.bytes for call in unfold(summary["calls"]) if call.kind == "reduce_scatter")
    held = summary["held_bytes_before_update"][0]
    device, host, nvme = held["device"], held["host"], held["nvme"]
    if name.startswith(("zero1", "zero2")):
        gradients = padded if name.startswith("zero1") else padded // ranks
        assert (device["parameters"], device["gradients"]) == (padded, gradients)
        assert device["optimizer_states"] == 2 * padded // ranks
    elif "host" in name:
        assert set(device) == {"buffers"}
        assert (host["parameters"], host["gradients"]) == (padded // ranks, padded // ranks)
        assert host["optimizer_states"] == 3 * padded // ranks
    elif "nvme" in name:
        assert set(device) == {"buffers"}
        assert 4 * padded // ranks <= nvme["optimizer_states"] < 1.2 * 4 * padded // ranks
    else:
        assert device["parameters"] == device["gradients"] == padded // ranks
        assert device["optimizer_states"] == 2 * padded // ranks


@ALL
def test_the_flight_recorder_saw_the_same_calls_as_gloo_runs_them(name: str) -> None:
    """gloo's reduce-scatter is an all-reduce; the engine's is an all-to-all. Sizes agree one by one."""
    summary = SUMMARIES[name]
    engine = name.startswith("zero")
    as_gloo = {"reduce_scatter": "gloo:all_to_all" if engine else "gloo:all_reduce"}
    calls = unfold(summary["calls"])
    rows = summary["flight_recorder"]
    assert [as_gloo.get(call.kind, f"gloo:{call.kind}") for call in calls] == [row[0] for row in rows]
    bytes_each = {"Float": 4, "Double": 8}
    for call, (_, inputs, outputs, dtype, _) in zip(calls, rows, strict=True):
        full = outputs[0] if call.kind == "all_gather" else inputs[0]
        count = 1
        for length in full:
            count *= length
        assert count * bytes_each[dtype] == call.bytes


@ALL
def test_the_span_log_has_two_whole_steps_of_each_rank(name: str) -> None:
    summary = SUMMARIES[name]
    calls = unfold(summary["calls"])
    for rank in range(summary["world_size"]):
        header, rows = events(name, rank)
        assert header["rank"] == rank
        assert header["provenance"]["command"] == summary["provenance"]["command"]
        collectives = [row for row in rows if row["kind"] == "coll"]
        steps = sorted({row["step"] for row in collectives})
        assert len(steps) == 2
        for step in steps:
            logged = [(row["op"], row["bytes"], row["group"]) for row in collectives if row["step"] == step]
            assert logged == [(call.kind, call.bytes, call.group_size) for call in calls]
        assert all(row["issue_ns"] <= row.get("done_ns", row["issue_ns"]) for row in rows)
        names = [row["op"] for row in rows if row["kind"] == "phase"]
        assert [names.count(phase) for phase in ("forward", "backward", "update")] == [2, 2, 2]


@pytest.mark.parametrize("name", [name for name in SUMMARIES if "nvme" in name])
def test_reads_and_writes_are_those_of_the_pipeline(name: str) -> None:
    """Per step and flat tensor: states and gradient are read together (4 sections), states written back (3);
    the gradient was written when it was reduced (1)."""
    summary = SUMMARIES[name]
    _, rows = events(name, 0)
    step = max(row["step"] for row in rows)
    io = [row for row in rows if row["kind"] == "io" and row["step"] == step]
    for unit in {row["unit"] for row in io}:
        written = sorted(row["bytes"] for row in io if row["op"] == "write" and row["unit"] == unit)
        read = max(row["bytes"] for row in io if row["op"] == "read" and row["unit"] == unit)
        section = read // 4
        assert {section, 3 * section} <= set(written), (summary["world_size"], unit)


def test_a_case_is_found_by_its_name_and_others_are_refused() -> None:
    assert find("zero3-nvme-uneven")[0].options["optimizer_place"] == "nvme"
    with pytest.raises(ValueError, match="no case 'zero4-even'; expected one of ddp-even, ddp-uneven"):
        find("zero4-even")
