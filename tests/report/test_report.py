"""The report object and the dictionary that `--json` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from zsim.report.limiting_sentence import limiting_sentence, overlap_doubt_sentence
from zsim.report.report import Report
from zsim.report.settings import plain
from zsim.report.step_work import StepWork
from zsim.report.traffic import TrafficRow
from zsim.report.views.text.report import report_lines
from zsim.trace.trace import SimulationStats, Trace

KEYS = [
    "zsim_version", "experiment", "step_seconds", "tokens_per_second_per_gpu",
    "model_flops_per_second_per_gpu", "mfu_fraction", "hfu_fraction", "flops_convention", "fits",
    "out_of_memory", "peak_bytes", "breakdown_seconds", "collectives", "evidence", "simulation",
]  # fmt: skip


@pytest.fixture
def trace(make_trace: Callable[..., Trace]) -> Trace:
    """8 s: 6 computing, 1 waiting for an all-gather of 1000 bytes, 1 optimizer; 50 bytes on the GPU."""
    gather = {"kind": "all_gather", "stream": "all_gather", "name": "embed", "bytes": 1000, "dtype": "bf16"}
    return make_trace(
        [
            {**gather, "group": "shard", "group_size": 8, "start": 0, "end": 1},
            {"start": 1, "end": 7, "issue": 0, "phase": "forward"},
            {"kind": "optimizer", "start": 7, "end": 8, "phase": "optimizer"},
        ],
        memory=[(0, 0.0, "gpu", "parameters", 30, "start"), (0, 2.0, "gpu", "buffers", 20, "gather")],
        metadata={"model": "tiny", "world_size": 8},
    )


@pytest.fixture
def report_of(build_report: Callable[..., Report]) -> Callable[..., Report]:
    def build(trace: Trace, **changes: Any) -> Report:
        values = {
            "zsim_version": "0.1.0",
            "experiment": {"model": "tiny"},
            "work": StepWork(4096, 3.2e12, 4e12, 1e12, "6N per token"),
            "capacity_bytes": {"gpu": 80, "host": None, "nvme": None},
            "evidence": {"compute": "calibrated", "network": "data sheet"},
            **changes,
        }
        return build_report(trace, SimulationStats(0.1, 1234, 1, 8), **values)

    return build


def test_the_dictionary_has_the_promised_keys_first(trace: Trace, report_of: Callable[..., Report]) -> None:
    result = report_of(trace).to_dict()
    assert list(result)[: len(KEYS)] == KEYS
    assert set(result["peak_bytes"]["nvme"]) == {
        "total", "parameters", "gradients", "optimizer_states", "activations", "buffers", "framework",
    }  # fmt: skip
    assert list(result["breakdown_seconds"]) == [
        "compute", "exposed_communication", "bubble", "offload_stall", "optimizer", "allocator", "host_bound",
    ]  # fmt: skip
    assert result["collectives"][0].items() >= {
        "kind": "all_gather", "group": "shard", "count": 1, "bytes": 1000, "dtype": "bf16",
        "busy_seconds": 1.0,
    }.items()  # fmt: skip
    assert result["simulation"] == {
        "wall_seconds": 0.1, "events": 1234, "rank_classes": 1, "world_size": 8, "steps": 1,
    }  # fmt: skip


def test_rates_are_work_over_the_step(trace: Trace, report_of: Callable[..., Report]) -> None:
    """4096 tokens, 3.2 TFLOP of the model and 4 TFLOP in all, in 8 s, on a GPU of 1 TFLOP/s."""
    result = report_of(trace).to_dict()
    assert result["tokens_per_second_per_gpu"] == 512.0
    assert result["model_flops_per_second_per_gpu"] == 4e11
    assert result["mfu_fraction"] == pytest.approx(0.4)
    assert result["hfu_fraction"] == pytest.approx(0.5)


def test_utilisation_of_what_a_mask_leaves_stands_beside_the_convention(
    trace: Trace, report_of: Callable[..., Report]
) -> None:
    """9.6 of 8 TFLOP that the peak allows in 8 s, 120 %; less the 4.8 that are masked 60 %. With 0.9 masked,
    less than a tenth, the line has the convention alone."""
    shown = []
    for masked in (4.8e12, 0.9e12):
        work = StepWork(4096, 9.6e12, 9.6e12, 1e12, "6N + 12LdS", masked_flops=(masked, masked))
        report = report_of(trace, work=work)
        shown.append("\n".join(report_lines(report)))
        assert report.to_dict()["mfu_fraction"] == pytest.approx(1.2)
        assert report.to_dict()["masked_mfu_fraction"] == pytest.approx((9.6e12 - masked) / 8e12)
        assert report.to_dict()["masked_hfu_fraction"] == pytest.approx((9.6e12 - masked) / 8e12)
    assert "120.0 % (unmasked 60.0 %)" in shown[0]
    assert "unmasked" not in shown[1]


def test_utilisation_is_null_where_the_peak_is_unknown(
    trace: Trace, report_of: Callable[..., Report]
) -> None:
    work = StepWork(4096, 3.2e12, 4e12, None, "6N per token")
    result = report_of(trace, work=work).to_dict()
    assert result["mfu_fraction"] is None
    assert result["hfu_fraction"] is None


def test_a_job_that_does_not_fit_is_reported_in_full(trace: Trace, report_of: Callable[..., Report]) -> None:
    """50 bytes on 45: 5 missing when the gather buffer came at 2 s."""
    result = report_of(trace, capacity_bytes={"gpu": 45}).to_dict()
    assert result["fits"] is False
    assert result["out_of_memory"].items() >= {
        "op": "gather", "pool": "gpu", "seconds": 2.0, "missing_bytes": 5, "least_gpus": None,
    }.items()  # fmt: skip
    assert result["breakdown_seconds"]["compute"] == 6.0


def test_the_dictionary_is_strict_json_and_the_same_every_time(
    trace: Trace, report_of: Callable[..., Report]
) -> None:
    row = TrafficRow("nvlink", 5e9, 0.25)
    first, second = (
        json.dumps(report_of(trace, traffic=[row], notes=["a note"]).to_dict(), allow_nan=False)
        for _ in range(2)
    )
    assert first == second
    assert json.loads(first)["traffic"] == [
        {"link_class": "nvlink", "bytes_per_gpu": 5e9, "utilisation_fraction": 0.25}
    ]


def test_labels_come_from_the_trace_unless_given(trace: Trace, report_of: Callable[..., Report]) -> None:
    labels = report_of(trace, labels={"cluster": "box"}).labels
    assert (labels["model"], labels["cluster"], labels["world_size"]) == ("tiny", "box", "8")


def test_what_is_not_finite_becomes_null() -> None:
    assert plain({"a": math.nan, "b": (1, math.inf), 3: {"c"}}) == {"a": None, "b": [1, None], "3": ["c"]}


def test_a_step_without_duration_is_refused(
    make_trace: Callable[..., Trace], report_of: Callable[..., Report]
) -> None:
    with pytest.raises(ValueError, match="step of 0"):
        report_of(make_trace([], step_seconds=0.0))


def test_the_sentence_says_what_limits_the_step_and_what_it_waits_for(
    trace: Trace, report_of: Callable[..., Report]
) -> None:
    """6 of 8 s compute, 1 s waiting for the one all-gather, 1 s optimizer; nothing runs under the gather;
    4 TFLOP in 6 s are 2/3 of the peak of 1 TFLOP/s."""
    assert report_of(trace).limit == (
        "Compute-bound: 75 % compute; exposed communication 12 %, mostly the all-gather of embed; "
        "optimizer 12 %; 0 % of communication is hidden; kernels reach 67 % of the peak."
    )


def test_the_sentence_says_that_the_peak_is_fp8s(trace: Trace, report_of: Callable[..., Report]) -> None:
    breakdown = report_of(trace).breakdown
    assert limiting_sentence(trace, breakdown, 0.0, 0.24, "fp8").endswith("kernels reach 24 % of fp8's peak.")
    assert limiting_sentence(trace, breakdown, 0.0, 0.24, "bf16").endswith("kernels reach 24 % of the peak.")


def test_what_a_step_becomes_without_overlap_is_said_where_it_is_longer() -> None:
    assert overlap_doubt_sentence("DeepSpeed", 10.0, 12.5) == (
        " If no communication were hidden, the step would be 12.500 s; most published runs of DeepSpeed "
        "over several nodes are nearer to that."
    )
    assert overlap_doubt_sentence("DeepSpeed", 10.0, 10.01) == ""
    assert overlap_doubt_sentence("DeepSpeed", 10.0, None) == ""


def test_a_step_that_mostly_waits_is_communication_bound(
    make_trace: Callable[..., Trace], report_of: Callable[..., Report]
) -> None:
    """Ten seconds: one computing, nine waiting for three different reduce-scatters."""
    reduce = {"kind": "reduce_scatter", "stream": "reduce_scatter"}
    spans = [
        {"start": 0, "end": 1},
        *({**reduce, "name": f"b{i}", "start": i, "end": i + 3} for i in (1, 4, 7)),
    ]
    trace = make_trace(spans)
    sentence = limiting_sentence(trace, report_of(trace).breakdown)
    assert sentence == (
        "Communication-bound: 90 % exposed communication, mostly reduce-scatter (100 % of it); compute 10 %."
    )
