"""The page and the trace of a step: its phases as a waterfall, and both sets of GPUs over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.html.page import page
from zsim.report.views.result import Column, ResultTable, Section, columns_of
from zsim.units import format_bytes, format_seconds
from zsim.workflows.rl.result import RlResult
from zsim.workflows.rollout.limits import BLOCK_TOKENS

_COLORS: Mapping[str, str] = {
    "rollout": "#2F7FBF", "old_logprobs": "#7BC8FE", "reference": "#35E8D5", "values": "#5DBA70",
    "training": "#D55E00", "weight_sync": "#F88805", "offload": "#D8A1B7", "reward": "#922862",
    "other": "#8A8F98",
}  # fmt: skip
_MEMORY = "a GPU", "a node's host", Column("verdict", is_left=True), Column("what a GPU has", is_left=True)
_MICROSECONDS = 1e6
_TRAINING, _ROLLOUT = 1, 2  # processes of the trace


def step_page(result: RlResult) -> str:
    """The HTML of a step."""
    rows = [
        [name.replace("_", " "), format_seconds(seconds), format_seconds(result.exposed_seconds[name])]
        for name, seconds in result.phases_seconds.items()
        if seconds
    ]
    memory = [
        [name.replace("_", " "), format_bytes(phase.total),
         format_bytes(result.host_memory[name].total), result.verdicts[name].word,
         ", ".join(f"{what.replace('_', ' ')} {format_bytes(size)}"
                   for what, size in phase.by_category.items() if size)]
        for name, phase in result.memory.items()
    ]  # fmt: skip
    sections = [
        Section(
            "Phases",
            [("phases", "What the step waits for, one phase after the other.", _waterfall(result))],
            ResultTable("", columns_of("phase", "time", "exposed"), rows),
        ),
        Section(
            "Both sides over time",
            [
                ("timeline", "Phases of the trainer. A rollout there is its wait for samples.",
                 _timeline(result)),
                ("running", "Sequences that each simulated replica runs.", _running(result)),
                ("cache", "Caches of these replicas: GB in use on a GPU.", _caches(result)),
            ],
        ),
        Section("Memory", table=ResultTable("", columns_of("phase", *_MEMORY), memory)),
    ]  # fmt: skip
    low, high = map(format_seconds, result.step_seconds_range)
    step = f"A step takes {format_seconds(result.step.seconds)}, {low} to {high} in 80 %."
    summary = " ".join((step, *result.loop_sentences()))
    return page(result.headline(), "A step of reinforcement learning", sections, summary)


def _waterfall(result: RlResult) -> Figure:
    """Bars of what is exposed, each from where the one before it ends. Their sum is the step."""
    figure = Figure(layout(360, barmode="overlay"))
    start = 0.0
    for name, seconds in result.exposed_seconds.items():
        if not seconds:
            continue
        figure.add_bar(
            name=name.replace("_", " "),
            x=[seconds],
            y=[name.replace("_", " ")],
            base=[start],
            orientation="h",
            marker={"color": _COLORS[name]},
            hovertemplate="%{y}: %{x:.3g} s<extra></extra>",
            showlegend=False,
        )
        start += seconds
    figure.update_xaxes(title_text="seconds")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def _timeline(result: RlResult) -> Figure:
    figure = Figure(layout(220, barmode="overlay"))
    begin = _begin(result)
    shown: set[str] = set()
    for name, start, end in result.step.marks:
        figure.add_bar(
            name=name.replace("_", " "),
            x=[end - start],
            y=["trainer"],
            base=[start - begin],
            orientation="h",
            marker={"color": _COLORS[name]},
            hovertemplate=f"{name.replace('_', ' ')}: %{{x:.3g}} s<extra></extra>",
            showlegend=name not in shown,
            legendgroup=name,
        )
        shown.add(name)
    figure.update_xaxes(title_text="seconds")
    return figure


def _running(result: RlResult) -> Figure:
    return _steps(result, [(log.times, log.running) for log in result.step.logs], "sequences")


def _caches(result: RlResult) -> Figure:
    model = result.job.model
    size = BLOCK_TOKENS * model.cache_bytes_per_token / model.layout.data / 1e9
    curves = [(log.times, [blocks * size for blocks in log.blocks]) for log in result.step.logs]
    return _steps(result, curves, "GB")


def _steps(result: RlResult, curves: list[tuple[list[float], list[Any]]], unit: str) -> Figure:
    figure = Figure(layout(300))
    begin = _begin(result)
    for number, (times, values) in enumerate(curves):
        figure.add_scatter(
            name=f"replica {number}",
            x=[time - begin for time in times if time >= begin],
            y=[value for time, value in zip(times, values, strict=True) if time >= begin],
            mode="lines",
            line={"shape": "hv", "width": 1},
            showlegend=False,
        )
    figure.update_xaxes(title_text="seconds")
    figure.update_yaxes(title_text=unit, rangemode="tozero")
    return figure


def _begin(result: RlResult) -> float:
    """Seconds at which the first of the steps that are shown begins."""
    return min((start for _, start, _ in result.step.marks), default=0.0)


def step_trace(result: RlResult) -> dict[str, Any]:
    """Both sides as Chrome JSON, for Perfetto: phases of the trainer, and counters of each replica."""
    begin = _begin(result)
    job = result.job
    sides = {
        _TRAINING: f"training, {job.training_gpus:,} GPUs",
        _ROLLOUT: f"rollout, {job.rollout_gpus:,} GPUs, {len(result.step.logs)} of {job.replicas} replicas",
    }
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0.0, "args": {"name": name}}
        for pid, name in sides.items()
    ]
    for name, start, end in result.step.marks:
        events.append(
            {"ph": "X", "name": name.replace("_", " "), "cat": "phase", "pid": _TRAINING, "tid": 0,
             "ts": (start - begin) * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}
        )  # fmt: skip
    events += _counters(result, begin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _counters(result: RlResult, begin: float) -> Iterator[dict[str, Any]]:
    for number, log in enumerate(result.step.logs):
        for time, running, blocks in zip(log.times, log.running, log.blocks, strict=True):
            if time >= begin:
                yield {
                    "ph": "C", "name": f"replica {number}", "pid": _ROLLOUT, "tid": number,
                    "ts": (time - begin) * _MICROSECONDS, "args": {"running": running, "blocks": blocks},
                }  # fmt: skip
