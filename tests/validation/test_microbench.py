"""The microbenchmarks: what they count, that they go on where they stopped. No time is tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from validation import fake_rank  # noqa: E402
from validation.microbench import __main__ as microbench  # noqa: E402
from validation.microbench import bench, kernels, movement  # noqa: E402

pytestmark = pytest.mark.torch


def counting(calls: list[str], name: str) -> Callable[[], Callable[[], Any]]:
    return lambda: lambda: calls.append(name)


def test_spread_is_median_percentiles_and_minimum() -> None:
    """Of 1 to 10: median 5.5; the element a tenth of the way up is 2, nine tenths 10."""
    seconds = [float(number) for number in range(10, 0, -1)]
    assert bench.spread(seconds) == {"median": 5.5, "p10": 2.0, "p90": 10.0, "min": 1.0, "repeats": 10}


def test_a_measurement_warms_up_and_repeats_at_least_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BUDGET_SECONDS", 0.0)
    calls: list[str] = []
    assert len(bench.time_repeats(lambda: calls.append("run"), "cpu")) == bench.MIN_REPEATS == 5
    assert len(calls) == 3 + 5


def test_what_the_file_has_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BUDGET_SECONDS", 0.0)
    path, calls = tmp_path / "out.json", []
    names = ["first", "second"]
    monkeypatch.setattr(
        microbench,
        "local_benchmarks",
        lambda *_: [
            bench.Benchmark("host", {"what": name}, counting(calls, name), {"bytes": 8.0}) for name in names
        ],
    )
    assert microbench.main(["--out", str(path), "--only", "host", "--device", "cpu"]) == 0
    assert calls == ["first"] * 8 + ["second"] * 8
    names.append("third")
    calls.clear()
    assert microbench.main(["--out", str(path), "--only", "host", "--device", "cpu"]) == 0
    assert calls == ["third"] * 8
    data = json.loads(path.read_text())
    assert list(data["measurements"]) == ["host what=first", "host what=second", "host what=third"]
    assert data["measurements"]["host what=third"]["work"] == {"bytes": 8.0}
    assert {"command", "date", "versions", "machine", "device"} <= set(data["provenance"])


def test_every_kernel_runs_and_has_a_key_of_its_own(tmp_path: Path) -> None:
    families = [name for name in microbench.FAMILIES if name != "collectives"]
    benchmarks = list(microbench.local_benchmarks(families, "cpu", True, tmp_path))
    assert len({benchmark.key for benchmark in benchmarks}) == len(benchmarks)
    for benchmark in benchmarks:
        if benchmark.family != "file":
            benchmark.prepare()()


def test_work_of_a_gemm_is_2mnk_flops_and_three_matrices() -> None:
    """256 x 512 times 512 x 512 in fp32."""
    first = next(kernels.gemm("cpu", True))
    assert first.work == {"flops": 2.0 * 256 * 512 * 512, "bytes": 4 * (256 * 512 + 512 * 512 + 256 * 512)}


def test_collectives_of_a_group_are_measured_in_one_start_of_its_ranks(tmp_path: Path) -> None:
    results = bench.ResultFile(tmp_path / "out.json", "test", "cpu")
    keep = [b for b in movement.collective_benchmarks(2, True) if b.parameters.get("bytes", 0) <= 4096]
    results.data["measurements"] = {
        b.key: {} for b in movement.collective_benchmarks(2, True) if b.key not in {k.key for k in keep}
    }
    microbench.measure_collectives(results, 2, quick=True)
    for benchmark in keep:
        entry = results.data["measurements"][benchmark.key]
        assert entry["seconds"]["repeats"] == 15
        assert entry["work"] == benchmark.work


@pytest.mark.parametrize("trainer", ["fsdp2", "engine"])
def test_one_rank_of_a_world_of_256_trains_here(trainer: str) -> None:
    words = ["--trainer", trainer, "--world-size", "256", "--device", "cpu", "--steps", "1"]
    result = fake_rank.measure(fake_rank.parser().parse_args(words))
    assert len(result["step_seconds"]["all"]) == 1
    assert result["cuda_memory"] == {}
