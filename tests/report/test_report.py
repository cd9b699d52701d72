"""The report object and the dictionary that `--json` writes."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import zsim
from zsim.errors import InputError
from zsim.report.limiting_sentence import limiting_sentence, overlap_doubt_sentence
from zsim.report.report import Report, StepWork, plain
from zsim.report.traffic import TrafficRow
from zsim.report.views.html.report import sections
from zsim.report.views.text.report import brief_lines, print_report, report_lines
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.tables import Experiment
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
    assert "120.0 % (causal 60.0 %)" in shown[0]
    assert "causal" not in shown[1]


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
        " Without overlap the step would take 12.500 s; most published runs of DeepSpeed on several nodes "
        "are closer to that."
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


# -- The report in three lines, and the length of a run in samples and epochs ------------------------------


SMALL: dict[str, Any] = {
    "model": "gpt2", "cluster": "dgx-h100", "gpus": 8,
    "training": {"sequence_length": 1024, "micro_batch_size": 2, "gradient_accumulation_steps": 3},
}  # fmt: skip


def test_three_lines_answer_fit_time_and_money() -> None:
    """1e9 tokens at the step's rate; the money is the GPU-hours times the price."""
    report = zsim.simulate(Experiment(**SMALL, cost={"tokens": 1e9, "gpu_hour_price": 2.0})).report
    fit, step, run = brief_lines(report)
    assert fit.startswith("FITS  ")
    assert "% likely: gpt2, " in fit
    assert " ".join(fit.split()).endswith("8 GPUs, 2 x 1,024 tokens x 3 micro-batches")
    low, high = report.step_seconds_range or (0.0, 0.0)
    assert step.startswith("step ")
    assert low < report.step_seconds < high
    assert f"{report.tokens_per_second_per_gpu:,.0f} tokens/s/GPU" in step
    minutes = 1e9 / report.step_tokens * report.step_seconds / 60
    assert 2 < minutes < 120
    assert run.startswith(f"1B tokens: {minutes:,.1f} min (")
    assert run.endswith("USD")


def test_less_than_one_step_takes_one() -> None:
    """10 sequences of the step's 48, or 10,240 tokens of 49,152."""
    report = zsim.simulate(Experiment(**SMALL, cost={"samples": 10, "gpu_hour_price": 2.0})).report
    assert report.cost is not None
    assert report.cost.days == pytest.approx(report.step_seconds / 86400)
    assert report.cost.money == report.cost.step_money
    *_, run = brief_lines(report)
    seconds = f"{report.step_seconds:,.1f} s"
    assert run.startswith(f"10,240 tokens, less than one step, which takes {seconds} (")


def test_a_verdict_in_doubt_says_its_odds() -> None:
    report = zsim.simulate(Experiment(**SMALL)).report
    assert report.allocator is not None
    short = replace(report, allocator=replace(report.allocator, retries=2))
    assert short.verdict.word == "runs short"
    fit, *_ = brief_lines(short)
    assert f"{short.verdict.probability * 100:.0f} % that it fits" in " ".join(fit.split())


def test_a_run_without_a_length_is_answered_for_a_billion_tokens() -> None:
    *_, run = brief_lines(zsim.simulate(Experiment(**SMALL)).report)
    assert run.startswith("1B tokens: ")
    assert " ".join(run.split()).endswith("; --tokens N or --samples N")


def test_samples_and_epochs_are_tokens_of_full_sequences() -> None:
    """8 ranks with 2 sequences of 1,024 tokens, 3 times: 48 sequences a step. 4,800 of them, twice: 200
    steps."""
    report = zsim.simulate(Experiment(**SMALL, cost={"samples": 4800, "epochs": 2})).report
    assert report.cost is not None
    assert report.cost.tokens == 2 * 4800 * 1024
    assert report.cost.days == pytest.approx(200 * report.step_seconds / 86400)


def test_samples_of_padded_documents_are_the_documents_own_tokens() -> None:
    """Lengths 256 and 768 equally often: a sample has 512 tokens, whatever the padding."""
    lengths = {"documents": [256, 768], "batching": "padded"}
    training = {**SMALL["training"], "lengths": lengths}
    report = zsim.simulate(Experiment(**{**SMALL, "training": training}, cost={"samples": 1000})).report
    assert report.cost is not None
    assert report.cost.tokens == pytest.approx(512_000, rel=0.05)


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({"tokens": 1e9, "samples": 10}, "found both tokens and samples"),
        ({"epochs": 3}, "found epochs of no data set"),
        ({"samples": 0}, "cost.samples: found 0, expected greater than or equal to 1"),
        ({"samples": 2.5}, "cost.samples: found 2.5, expected a whole number"),
    ],
)
def test_lengths_that_contradict_are_refused(cost: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_experiment({**SMALL, "cost": cost}, {}, origin="test")


def test_of_many_notes_the_first_is_told_and_the_others_are_counted() -> None:
    report = zsim.simulate(Experiment(**SMALL)).report
    *_, last = brief_lines(replace(report, input_notes=("one",)))
    assert last == "note: one"
    *_, last = brief_lines(replace(report, input_notes=("one", "two", "three")))
    assert last == "note: one (and 2 more with --full)"


def test_the_short_report_is_a_screen() -> None:
    """40 lines of 80 columns: what does not fit is counted and told with --full."""
    report = zsim.simulate(Experiment(**SMALL)).report
    notes = tuple(f"note {number} " + "of some length " * 8 for number in range(8))
    report = replace(report, input_notes=notes, notes=(*notes, *report.notes))

    def shown(*, is_full: bool) -> list[str]:
        text = io.StringIO()
        console = Console(file=text, width=80, highlight=False, emoji=False, color_system=None)
        print_report(report, console, is_full=is_full)
        return text.getvalue().splitlines()

    short = shown(is_full=False)
    assert len(short) <= 40
    assert any(line.startswith("note: note 0 ") for line in short)
    told = sum(line.startswith("note: note ") for line in short)
    assert told >= 3
    assert f"these notes whole, {8 - told} more on what was asked" in " ".join(" ".join(short).split())
    assert sum(line.startswith("note: note ") for line in shown(is_full=True)) == 8
    assert report.limit.split(":")[0] in " ".join(short)


def test_what_the_verdict_refers_to_is_in_the_short_report() -> None:
    """An allocator that runs short: its notes come first, and what limits the step stays."""
    job = Experiment(
        model="llama-3-8b",
        cluster="dgx-a100-40gb",
        nodes=4,
        training={"sequence_length": 4096},
        strategy={"kind": "fsdp2"},
    )
    report = zsim.simulate(job).report
    text = io.StringIO()
    print_report(report, Console(file=text, width=80, color_system=None), is_full=False)
    words = " ".join(text.getvalue().split())
    assert "see the notes" in words
    assert "note: torch's allocator" in words
    assert report.limit.split(":")[0] in words


# -- The experiment as sections with readable values -------------------------------------------------------


def test_tables_become_sections_with_their_source_and_grade() -> None:
    experiment = {"nodes": 2, "link": {"source": "a data sheet", "evidence": "measured", "bandwidth": 450e9}}
    top = sections(experiment)
    assert top.rows == [("nodes", "2")]
    (link,) = top.children
    assert (link.title, link.source, link.evidence) == ("link", "a data sheet", "measured")
    assert link.rows == [("bandwidth", "450.00 GB/s")]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("latency", 5e-7, "0.5 us"),
        ("seconds_per_launch", 2e-6, "2.0 us"),
        ("capacity", 80 * 10**9, "80.00 GB"),
        ("bytes_per_second", 1e9, "1.00 GB/s"),
        ("efficiency", 0.81, "81 %"),
        ("max_fraction", 0.645, "64.5 %"),
        ("sequence_length", 8192, "8,192"),
        ("compile", False, "no"),
        ("mesh", [2, 8], "2, 8"),
        ("gradient_clipping", 1.0, "1"),
    ],
)
def test_values_are_shown_with_the_unit_of_their_key(
    key: str, value: bool | float | list[int], words: str
) -> None:
    assert sections({key: value}).rows == [(key.replace("_", " "), words)]


def test_peaks_are_flops_per_second() -> None:
    (peak,) = sections({"peak": {"bf16": 989.4e12}}).children
    assert peak.rows == [("bf16", "989.40 TFLOP/s")]


def test_what_is_not_set_is_left_out_and_lists_of_tables_are_numbered() -> None:
    top = sections({"nvme": None, "extra": {}, "links": [{"kind": "switch"}, {"kind": "none"}]})
    assert top.rows == []
    assert [child.title for child in top.children] == ["links 1", "links 2"]


def test_a_users_own_dotted_key_stays_as_written() -> None:
    assert sections({"zero_optimization.stage": 3}).rows == [("zero_optimization.stage", "3")]


def test_long_values_ask_for_a_line_of_their_own() -> None:
    assert sections({"effect": "x" * 41}).has_long_values
    assert not sections({"effect": "x" * 40}).has_long_values


def test_a_run_of_several_epochs_says_so() -> None:
    """1e9 tokens read twice are 2e9, which two epochs of a training file would make of --tokens 1B."""
    report = zsim.simulate(Experiment(**SMALL, cost={"tokens": 1e9, "epochs": 2})).report
    *_, run = brief_lines(report)
    assert run.startswith("2B tokens in 2 epochs: ")
