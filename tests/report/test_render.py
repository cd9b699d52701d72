"""The terminal report: readable at 80 columns, without colour, without Unicode."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.expect import there
from zsim.report.memory import OutOfMemory
from zsim.report.report import Report, StepWork
from zsim.report.traffic import SentRow, TrafficRow
from zsim.report.views.html.report import tiles
from zsim.report.views.text.report import print_report
from zsim.report.views.text.sentences import format_trust, missing_memory
from zsim.trace.trace import SimulationStats, Trace
from zsim.validated.features import Features
from zsim.validated.validation import Validation


@pytest.fixture
def report(make_step_report: Callable[..., Report]) -> Callable[..., Report]:
    return make_step_report


def with_least_gpus(report: Report, count: int) -> Report:
    return replace(report, out_of_memory=replace(there(report.out_of_memory), least_gpus=count))


def printed(
    report: Report,
    width: int = 80,
    encoding: str = "utf-8",
    files: Mapping[str, str | Path] | None = None,
    **console: Any,
) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    print_report(report, Console(file=stream, width=width, highlight=False, **console), files)
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_it_says_what_was_simulated_and_that_it_fits(report: Callable[..., Report]) -> None:
    text = printed(report())
    assert text.startswith("llama-3-70b | FSDP2 | 2 x dgx-h100 | 16 GPUs\n")
    assert "reserved by torch" not in text
    assert "FITS  17.75 GB of 80.00 GB (22.2 %) in use on the fullest GPU." in text


def test_it_names_the_op_that_does_not_fit_and_what_would_do(report: Callable[..., Report]) -> None:
    """Capacity 12 GB: context, shards and two gathered blocks are 5.75 GB. A block adds 3 of activations,
    then frees 1 of parameters, then one more is gathered: 8.75 after block 0, 11.75 after block 1, 14.75
    with block 2's activations. At the peak it is 17.75."""
    text = " ".join(printed(with_least_gpus(report(capacity_bytes={"gpu": 12 * 10**9}), 64)).split())
    assert (
        "DOES NOT FIT GPU memory: the peak exceeds 12.00 GB by 5.75 GB; the first op without room is "
        "'blocks.2 forward'"
    ) in text
    assert "which lacks 2.75 GB. 64 GPUs would hold all" in text


def test_no_line_is_wider_than_the_terminal(report: Callable[..., Report]) -> None:
    rows = [TrafficRow("InfiniBand", 4.1e9, 0.82), TrafficRow("NVLink", 4.1e9, None)]
    text = printed(report(traffic=rows, notes=["a note " * 30]), width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert "82.0 %" in text


JUDGED = Validation(
    0.95, 1.2, "FSDP, several nodes, H100, bound by kernels", 14, 4, 0.031, 0.22,
    ("GPU x without a validated run", "more GPUs than any validated run of FSDP (512)"),
    Features("FSDP", "FSDP2", "x", 2, 16, "RoCE", "kernels", 10**9),
)  # fmt: skip


def test_the_interval_of_the_step_and_what_it_comes_from_stand_below_it(
    report: Callable[..., Report],
) -> None:
    """The step of 10 s, times 0.95 and 1.2."""
    text = printed(replace(report(), step_seconds=10.0, validation=JUDGED))
    assert "9.50 to 12.0 s (80 %), from 14 similar runs" in text
    assert "GPU x without a validated run; more GPUs than any" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "(80 %)" not in printed(report())


def test_trust_is_one_paragraph_for_pages(report: Callable[..., Report]) -> None:
    """The interval is the only measure of error: that of a few runs far off would stand beside it."""
    judged = replace(JUDGED, worst_absolute_error=13.51)
    said = format_trust(replace(report(), step_seconds=10.0, validation=judged))
    assert said.startswith(
        "Step 9.50 to 12.0 s (80 %), from 14 similar runs (FSDP, several nodes, H100, bound by kernels). "
        "Extrapolates: "
    )
    assert "%" not in said.removeprefix("Step 9.50 to 12.0 s (80 %)")
    assert format_trust(report()) == ""


def test_every_part_of_the_step_has_its_time_and_share(report: Callable[..., Report]) -> None:
    """4 blocks: 24 ms computing of 30.1; 2.8 ms exposed, 3 ms optimizer, 0.3 ms before the first launch."""
    lines = {line[:22].strip(): line.split() for line in printed(report()).splitlines()}
    assert lines["compute"][1:5] == ["24.00", "ms", "79.7", "%"]
    assert lines["exposed communication"][2:6] == ["2.80", "ms", "9.3", "%"]
    assert lines["optimizer"][1:5] == ["3.00", "ms", "10.0", "%"]
    assert lines["host-bound"][1:5] == ["300.0", "us", "1.0", "%"]


def test_collectives_show_calls_sizes_and_bus_bandwidth(report: Callable[..., Report]) -> None:
    """8 gathers of 1 GB in 1 ms each on 16 ranks: 1000 GB/s * 15/16."""
    (line,) = [line for line in printed(report()).splitlines() if line.startswith("all-gather (shard, 16)")]
    assert line.split()[3:] == ["8", "1.00", "GB", "bf16", "8.00", "ms", "937.50", "GB/s"]


def test_what_is_sent_is_split_by_phase_where_it_leaves_nodes(report: Callable[..., Report]) -> None:
    (line,) = [line for line in printed(report()).splitlines() if line.startswith("backward all-gather")]
    assert line.split() == ["backward", "all-gather", "(world,", "16)", "3.00", "GB", "400.00", "MB"]
    inside = [SentRow("backward", "all_gather", "world", 8, 3e9, 0.0)]
    assert "Sent per GPU" not in printed(report(sent=inside))


def test_a_long_list_of_collectives_is_cut_to_the_busiest(
    make_trace: Callable[..., Trace], build_report: Callable[..., Report]
) -> None:
    spans = [
        {
            "kind": "all_gather",
            "stream": "s",
            "start": i,
            "end": i + 1 + i / 100,
            "bytes": i,
            "group": "shard",
        }
        for i in range(20)
    ]
    text = printed(
        build_report(
            make_trace(spans),
            SimulationStats(0.0, 1, 1, 1),
            zsim_version="0",
            experiment={},
            work=StepWork(1, 1.0, 1.0, None, ""),
            capacity_bytes={},
            evidence={},
        )
    )
    assert "8 more kinds and sizes" in text
    assert " 19 B " in text
    assert " 7 B " not in text


def test_piped_output_has_no_escape_codes_and_a_narrow_encoding_gets_plain_bars(
    report: Callable[..., Report],
) -> None:
    text = printed(report(), encoding="ascii")
    assert "\x1b" not in text
    assert "######" in text
    assert "\x1b[" in printed(report(), force_terminal=True, color_system="standard", legacy_windows=False)


def test_notes_and_files_are_listed_last_and_paths_stay_whole(report: Callable[..., Report]) -> None:
    path = "out/" + "a" * 90 + "/report.html"
    text = printed(report(notes=["compute is slowed by 4 %"]), files={"report": path})
    assert "note: compute is slowed by 4 %" in text
    assert text.splitlines()[-1] == f"report  {path}"


def test_states_that_never_fit_are_called_so() -> None:
    """Nothing ran yet: there is no op to blame."""
    finding = OutOfMemory("start", "gpu", 0, 0.0, 750_000_000, 14_750_000_000, 3 * 10**9)
    finding = replace(finding, tried=("sharding", "offloading", "LoRA"))
    assert missing_memory(finding) == (
        "GPU memory: the peak exceeds 3.00 GB by 14.75 GB, and what is held from the start by 750.00 MB. "
        "None of these makes it fit on these GPUs: sharding, offloading, LoRA. More GPUs alone, up to "
        "65,536, would not help."
    )


def test_what_the_host_issued_in_the_step_before_has_no_time_in_this_one() -> None:
    finding = OutOfMemory("blocks.24 forward", "gpu", 0, 0.0, 10**9, 2 * 10**9, 80 * 10**9)
    assert "the first op without room is 'blocks.24 forward', which lacks 1.00 GB" in missing_memory(finding)


def test_fp8s_mfu_says_that_it_is_of_fp8s_peak(report: Callable[..., Report]) -> None:
    """Twice that of 16 bits; another type's goes without saying."""
    bf16 = report()
    fp8 = replace(bf16, work=replace(bf16.work, peak_dtype="fp8"))
    assert "of fp8's peak" in printed(fp8)
    assert "peak" not in next(line for line in printed(bf16).splitlines() if "MFU" in line)
    assert any("of fp8's peak" in small for label, _, small in tiles(fp8) if label == "MFU")
    assert fp8.to_dict()["mfu_peak"] == {"dtype": "fp8", "flops_per_second": bf16.work.peak_flops_per_second}
