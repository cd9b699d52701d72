"""The microbenchmarks: what they count, that they go on where they stopped. No time is tested."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from validation import fake_rank, library_step  # noqa: E402
from validation.machine_load import foreign_fraction  # noqa: E402
from validation.microbench import __main__ as microbench  # noqa: E402
from validation.microbench import bench, kernels, ranks  # noqa: E402

pytestmark = pytest.mark.torch


def counting(calls: list[str], name: str) -> Callable[[], Callable[[], Any]]:
    return lambda: lambda: calls.append(name)


def test_spread_is_median_mean_percentiles_and_minimum() -> None:
    """Of 1 to 9 and 20: median 5.5, mean 6.5; the element a tenth of the way up is 2, nine tenths 20."""
    seconds = [20.0, *(float(number) for number in range(9, 0, -1))]
    expected = {"median": 5.5, "mean": 6.5, "p10": 2.0, "p90": 20.0, "min": 1.0, "repeats": 10}
    assert bench.spread(seconds) == expected
    assert bench.spread([]) is None


def test_a_measurement_warms_up_and_repeats_at_least_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BUDGET_SECONDS", 0.0)
    calls: list[str] = []
    wall, cpu = bench.time_on_host(lambda: calls.append("run"))
    assert len(wall) == len(cpu) == bench.MIN_REPEATS == 5
    assert len(calls) == 3 + 5


def test_the_processor_time_of_a_sleep_is_none_of_its_time() -> None:
    """Twenty milliseconds on the clock, next to none on the processor."""
    benchmark = bench.Benchmark("sleep", {}, lambda: lambda: time.sleep(0.02))
    times = bench.measure(benchmark)
    assert min(times.wall) >= 0.02 > 10 * min(times.cpu)


def test_the_share_of_others_is_busy_less_own_of_all_ticks() -> None:
    """Of 200 ticks 150 were busy and 100 of those this process's: others had a quarter."""
    assert foreign_fraction(150, 200, 100) == 0.25
    assert foreign_fraction(100, 200, 101) == foreign_fraction(0, 0, 0) == 0.0


def test_what_the_file_has_is_measured_again_only_if_others_disturbed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    path, foreign = tmp_path / "out.json", {"first": 0.05, "second": 0.3, "third": 0.0}
    names = ["first", "second"]

    def measure(benchmark: bench.Benchmark) -> bench.Times:
        benchmark.prepare()()
        return bench.Times([1.0, 3.0], [0.5, 0.5], foreign[benchmark.parameters["what"]])

    monkeypatch.setattr(microbench, "measure", measure)
    monkeypatch.setattr(
        microbench,
        "local_benchmarks",
        lambda *_: [
            bench.Benchmark("host", {"what": name}, counting(calls, name), {"calls": 8.0}) for name in names
        ],
    )
    words = ["--out", str(path), "--only", "host", "--device", "cpu"]
    assert microbench.main(words) == 0
    assert calls == ["first", "second"]
    names.append("third")
    assert microbench.main(words) == 0
    assert calls == ["first", "second", "third"]
    assert microbench.main([*words, "--again-above", "0.1"]) == 0
    assert calls == ["first", "second", "third", "second"]
    data = json.loads(path.read_text())
    assert [row["parameters"]["what"] for row in data["measurements"]] == ["first", "second", "third"]
    spread = {"median": 2.0, "mean": 2.0, "p10": 1.0, "p90": 3.0, "min": 1.0, "repeats": 2}
    assert data["measurements"][2] == {
        "family": "host",
        "parameters": {"what": "third"},
        "work": {"calls": 8.0},
        "timed_on": "host",
        "threads": 1,
        "seconds": spread,
        "cpu_seconds": {**spread, "median": 0.5, "mean": 0.5, "p10": 0.5, "p90": 0.5, "min": 0.5},
        "foreign_cpu_fraction": 0.0,
    }
    assert {"command", "date", "versions", "machine", "device"} <= set(data["provenance"])


def test_every_kernel_runs_and_has_a_key_of_its_own(tmp_path: Path) -> None:
    families = [name for name in microbench.FAMILIES if name != "collectives"]
    benchmarks = list(microbench.local_benchmarks(families, "cpu", True, tmp_path))
    assert len({benchmark.key for benchmark in benchmarks}) == len(benchmarks)
    for benchmark in benchmarks:
        if benchmark.family != "file" and benchmark.parameters.get("bytes", 0) < 2**26:
            benchmark.prepare()()


def test_a_gpu_is_asked_for_copies_both_ways_and_products_of_llamas_widths() -> None:
    """What one would measure there, without preparing any of it."""
    asked = [b for make in microbench.LOCAL.values() for b in make("cuda", False)]
    assert len({benchmark.key for benchmark in asked}) == len(asked)
    assert all(b.timed_on == "device" for b in asked if b.family not in ("host", "adamw"))
    copies = [b for b in asked if b.family == "host_copy"]
    ways = {(b.parameters["way"], b.parameters["pinned"]) for b in copies}
    assert ways == {(way, pinned) for way in ("h2d", "d2h", "both") for pinned in (True, False)}
    assert {b.parameters["place"] for b in asked if b.family == "adamw"} == {"cpu", "cuda"}
    head = {"m": 8192, "n": 128_256, "k": 4096, "layout": "nt", "dtype": "bf16"}
    assert [b.work["flops"] for b in asked if b.parameters == head] == [2.0 * 8192 * 128_256 * 4096]


def test_work_of_a_gemm_is_2mnk_flops_and_three_matrices() -> None:
    """128 x 128 times 128 x 128 in fp32; in fp8 the product is written in bf16."""
    first = next(kernels.gemm("cpu", True))
    assert first.work == {"flops": 2.0 * 128**3, "bytes": 4.0 * 3 * 128**2}
    assert kernels.product("cpu", "fp8", 128, 128, 128, "nt").work["bytes"] == 2 * 128**2 + 2 * 128**2


def test_cross_entropy_of_bf16_logits_casts_them_twice() -> None:
    """Per logit: 6 accesses of 4 bytes in fp32, and a cast there and back of 2 + 4 bytes each."""
    (fp32,) = [b for b in kernels.pieces("cpu", "fp32", 3, 8, 5) if b.work.get("bytes") == 24.0 * 15]
    (bf16,) = [b for b in kernels.pieces("cpu", "bf16", 3, 8, 5) if b.work.get("bytes") == 36.0 * 15]
    assert fp32.family == bf16.family == "cross_entropy"


def test_collectives_and_interference_of_a_group_are_measured_in_one_start_of_its_ranks(
    tmp_path: Path,
) -> None:
    results = bench.ResultFile(tmp_path / "machine" / "out.json", "test", "cpu")
    every = list(ranks.collective_benchmarks(2, "gloo", True))
    keep = [b for b in every if b.parameters.get("bytes", 0) <= 4096 and not b.parameters.get("beside")]
    assert {b.family for b in keep} == {"collective", "interference"}
    microbench.measure_collectives(microbench.Progress(results, len(keep)), keep)
    rows = json.loads(results.path.read_text())["measurements"]
    assert len(rows) == len(keep) == 6 + 2
    for benchmark, row in zip(keep, rows, strict=True):
        assert row["parameters"] == benchmark.parameters
        assert row["work"] == benchmark.work
        assert row["seconds"]["repeats"] == row["cpu_seconds"]["repeats"] == 15


RECORDED = sorted((Path(__file__).parents[2] / "traces").glob("cpu-*/microbench.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_the_recorded_file_has_every_measurement_and_few_were_disturbed(path: Path) -> None:
    data = json.loads(path.read_text())
    families = {row["family"] for row in data["measurements"]}
    assert families >= {
        "gemm", "attention", "rms_norm", "silu_times", "embedding", "cross_entropy", "copy", "fill", "adamw",
        "host", "file", "collective", "interference",
    }  # fmt: skip
    kinds = {
        (row["parameters"]["kind"], row["parameters"]["ranks"])
        for row in data["measurements"]
        if row["family"] == "collective"
    }
    assert kinds == {(kind, size) for kind in ranks.KINDS for size in (2, 4)}
    disturbed = [row for row in data["measurements"] if row["foreign_cpu_fraction"] > 0.1]
    assert len(disturbed) < 0.02 * len(data["measurements"])


def test_a_machine_is_recorded() -> None:
    assert RECORDED


@pytest.mark.parametrize("words", [[], ["--activation-checkpointing=full"]])
def test_a_step_of_a_library_model_runs_here(words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install zsim[transformers]")
    config = {
        "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ["--model", f"{tmp_path / 'config.json'}@2", "--sequence-length", "16"]
    asked = library_step.parser().parse_args([*model, "--device=cpu", "--steps=1", *words])
    assert library_step.make_config(asked.model).num_hidden_layers == 2
    assert library_step.measure(asked)["step_seconds"]["median"] > 0


@pytest.mark.parametrize("trainer", ["fsdp2", "engine"])
def test_one_rank_of_a_world_of_256_trains_here(trainer: str) -> None:
    words = ["--trainer", trainer, "--world-size", "256", "--device", "cpu", "--steps", "1"]
    result = fake_rank.measure(fake_rank.parser().parse_args(words))
    assert len(result["step_seconds"]["all"]) == 1
    assert result["cuda_memory"] == {}
