"""The report on a terminal: right at 80 columns, in colour or piped into a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from zsim.report.energy import bill, run_length_text
from zsim.report.fit import allocator_sentences, breaking_sentence, fit_of, moment_notes
from zsim.report.report import Report
from zsim.report.views.html.figures import range_sentence
from zsim.report.views.meanings import EVIDENCE, Meaning
from zsim.report.views.result import Bar, Cell, ResultTable
from zsim.report.views.tables import (
    breakdown_table,
    collective_table,
    cost_table,
    irregular_tables,
    memory_table,
    offload_table,
    sent_table,
    traffic_table,
)
from zsim.report.views.text.pipeline import SKETCH, parallel_tables, schedule_sketch
from zsim.report.views.text.plain import WIDTH, paragraph
from zsim.report.views.text.sentences import headline
from zsim.units import GIGABYTES, format_bytes, format_flops, format_percent, format_seconds
from zsim.validated.validation import Validation, describe_unexplained, format_validation

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as RichTable
    from rich.text import Text


_BAR_CELLS = 28
_STYLES = {"total": "bold", "aside": "dim", None: None}
_SCREEN_LINES = 40
_FEWEST_NOTES = 3
_EIGHTHS = " ▏▎▍▌▋▊▉"


def print_report(
    report: Report,
    console: Console | None = None,
    files: Mapping[str, str | Path] | None = None,
    *,
    is_full: bool = True,
) -> None:
    """Print `report`. `files` are the paths of the other files written, by their description.

    Unless it `is_full`, it fits on a screen: whether the job fits, its time, and where time and memory go,
    with the notes on what was asked and those that the verdict refers to.
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False, emoji=False)
    is_plain = not (console.encoding or "ascii").lower().startswith("utf")
    files = files or {}
    if is_full:
        sections, notes, rest = list(_sections(report, is_plain)), [*report.notes, *moment_notes(report)], ""
    else:
        sections, notes, rest = _screen(report, console, is_plain, num_files=len(files))
    for section in sections:
        console.print(section)
        console.print()
    for note in notes:
        console.print(_note(note))
    if notes:
        console.print()
    if rest:
        console.print(Text(rest, style="dim"))
        if files:
            console.print()
    for description, path in files.items():
        console.print(Text.assemble((f"{description:<8}", "bold"), str(path)), soft_wrap=True)


def _note(text: str) -> Text:
    from rich.text import Text

    return Text.assemble(("note: ", "yellow"), text)


def report_lines(report: Report) -> Iterator[str]:
    """The lines of `print_report`, without colour and at 80 columns."""
    import io

    from rich.console import Console

    text = io.StringIO()
    print_report(report, Console(file=text, width=WIDTH, highlight=False, emoji=False, color_system=None))
    yield from (line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _screen(
    report: Report, console: Console, is_plain: bool, *, num_files: int
) -> tuple[list[RenderableType], list[str], str]:
    """(the sections of the short report, its notes, the sentence on what the full report has besides).

    Notes that make it longer than a screen are cut to a line each. The last of those without room even then
    are left to the full report.
    """
    from rich.segment import SegmentLines

    referred_notes = allocator_sentences(report)
    notes = [*referred_notes, *report.input_notes, *moment_notes(report)]
    num_assumed = len(report.notes) - len(report.input_notes) - len(referred_notes)
    blocks = [
        console.render_lines(block, pad=False) for block in (*_answers(report), *_tables(report, is_plain))
    ]
    room = _SCREEN_LINES - 4 - (num_files + 1 if num_files else 0)
    room -= sum(len(lines) + 1 for lines in blocks)
    num_left, whole_notes = 0, notes
    if sum(len(console.render_lines(_note(note), pad=False)) for note in notes) > room:
        whole_notes = notes[: max(room, _FEWEST_NOTES)]
        num_left = len(notes) - len(whole_notes)
        notes = [shorten(note, WIDTH - len("note: "), placeholder=" ...") for note in whole_notes]
    additions = [
        "collectives, traffic, other memory",
        "the evidence",
        *(["these notes whole"] if notes != whole_notes else []),
        *([f"{num_left} more on what was asked"] if num_left else []),
        *([f"{num_assumed} notes on what is assumed"] if num_assumed else []),
    ]
    rest = f"--full adds {', '.join(additions[:-1])} and {additions[-1]}."
    return [SegmentLines(lines, new_lines=True) for lines in blocks], notes, rest


def _tables(report: Report, is_plain: bool) -> Iterator[RenderableType]:
    """The tables of the short report."""
    yield _table(breakdown_table(report, is_full=False), is_plain)
    for table in irregular_tables(report, is_full=False):
        yield _table(table, is_plain)
    yield _table(memory_table(report, "gpu", has_allocator=False), is_plain)
    if report.cost is not None:
        yield _cost(report)


def _answers(report: Report) -> Iterator[RenderableType]:
    """Whether the job fits, how fast it is, and why."""
    from rich.text import Text

    training = report.labels.get("training")
    yield Text.assemble((headline(report), "bold"), f"\n{training}" if training else "")
    yield _fit(report)
    yield _speed(report)
    if report.validation is not None:
        yield _range(report, report.validation)
    yield Text(report.limit)


def _sections(report: Report, is_plain: bool) -> Iterator[RenderableType]:
    from rich.text import Text

    yield from _answers(report)
    yield _table(breakdown_table(report), is_plain)
    for table in irregular_tables(report):
        yield _table(table, is_plain)
    if report.pipeline is not None and (lines := schedule_sketch(report.pipeline)):
        yield Text("\n".join(("The schedule by pipeline rank", *lines)))
        yield Text(SKETCH, style="dim")
    for table in parallel_tables(report):
        yield _table(table, is_plain)
    for device in report.peaks:
        if report.peaks[device].total > 0:
            yield _table(memory_table(report, device), is_plain)
    yield Text(f"{GIGABYTES}.", style="dim")
    if report.collectives:
        yield _narrow_columns(_table(collective_table(report, "text"), is_plain))
    if report.traffic:
        yield _table(traffic_table(report), is_plain)
    if any(row.inter_node_bytes_per_gpu for row in report.sent):
        yield _table(sent_table(report), is_plain)
    if report.offload is not None:
        yield _table(offload_table(report, report.offload), is_plain)
        if report.offload.range_seconds is not None:
            yield Text(range_sentence(report, report.offload))
    if report.cost is not None:
        yield _cost(report)
    yield _evidence(report)


def _fit(report: Report) -> Text:
    from rich.text import Text

    fit = fit_of(report)
    style = {"fits": "bold green", "tight": "bold yellow", "broken": "bold red"}[fit.tone]
    return Text.assemble((f"{fit.verdict.word.upper()}  ", style), fit.words)


def _speed(report: Report) -> RichTable:
    tokens, flops = report.tokens_per_second_per_gpu, report.model_flops_per_second_per_gpu
    table = _grid()
    mfu = f"{format_percent(report.mfu_fraction)} {report.mfu_peak}".rstrip()
    hfu = format_percent(report.hfu_fraction)
    if report.work.is_much_masked and report.mfu_fraction is not None:
        mfu += f" (causal {format_percent(report.masked_mfu_fraction)})"
        hfu += f" (causal {format_percent(report.masked_hfu_fraction)})"
    table.add_row("step", format_seconds(report.step_seconds), "MFU", mfu)
    table.add_row("tokens/s/GPU", "-" if tokens is None else f"{tokens:,.0f}", "HFU", hfu)
    if report.allocator is not None and report.allocator.retries:
        table.add_row(
            "without retries", format_seconds(report.allocator.step_seconds_without_retries), "", ""
        )
    padding = report.work.padding
    if padding is not None:
        lengths = padding.to_dict(report.step_seconds, report.work.gpus_per_replica)
        slowest = f"{padding.slowest_over_mean:.3f} x mean"
        padded_rate = f"{lengths['padded_tokens_per_second_per_gpu']:,.0f}"
        table.add_row("with padding", padded_rate, "slowest rank", slowest)
    table.add_row(
        "model FLOP/s/GPU",
        "-" if flops is None else format_flops(flops),
        "overlap",
        format_percent(report.overlap_fraction),
    )
    return _narrow_columns(table)


def _range(report: Report, validation: Validation) -> Text:
    from rich.text import Text

    text = Text.assemble(("step range  ", "dim"), format_validation(validation, report.step_seconds))
    if unexplained := describe_unexplained(validation):
        text.append(f"\n{unexplained}", style="yellow")
    if validation.extrapolates:
        text.append(f"\nextrapolates: {'; '.join(validation.extrapolates)}", style="yellow")
    return text


def _evidence(report: Report) -> Text:
    from rich.text import Text

    text = Text("evidence: ")
    for index, (floor, grade) in enumerate(report.evidence.items()):
        style = EVIDENCE[grade].terminal if grade in EVIDENCE else ""
        text.append(", " if index else "").append(f"{floor} ").append(grade, style=style)
    stats = report.simulation
    text.append(
        f"\nsimulated {stats.rank_classes:,} of {stats.world_size:,} ranks, {stats.events:,} events in "
        f"{format_seconds(stats.wall_seconds)}",
        style="dim",
    )
    return text


def _bar(fraction: float, style: str, is_plain: bool) -> Text:
    from rich.text import Text

    fraction = min(max(fraction, 0.0), 1.0)
    if is_plain:
        return Text("#" * round(fraction * _BAR_CELLS))
    eighths = round(fraction * _BAR_CELLS * 8)
    return Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip(), style=style)


def _table(table: ResultTable, is_plain: bool) -> RichTable:
    """The table without lines. Only its first column wraps."""
    from rich.table import Table as RichTable

    shown = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for index, column in enumerate(table.columns):
        shown.add_column(
            column.title, justify="left" if column.is_left else "right", no_wrap=index > 0, header_style="dim"
        )
    for index, row in enumerate(table.rows):
        style = _STYLES.get(table.tones.get(index))
        shown.add_row(*(_cell(cell, is_plain) for cell in row), style=style)
    return shown


def _cell(cell: Cell, is_plain: bool) -> Text | str:
    if isinstance(cell, Bar):
        return _bar(cell.fraction, cell.color, is_plain)
    return cell.label if isinstance(cell, Meaning) else cell


def _cost(report: Report) -> RichTable:
    table = _table(cost_table(report), is_plain=True)
    table.columns[0].no_wrap, table.columns[-1].style = True, "dim"
    return table


def _narrow_columns(table: RichTable) -> RichTable:
    """The table with one blank between columns where two make it wider than the page."""
    cells = ([str(column.header), *map(str, column.cells)] for column in table.columns)
    if sum(2 + max(map(len, column)) for column in cells) > WIDTH:
        table.padding = (0, 1, 0, 0)
    return table


def _grid() -> RichTable:
    from rich.table import Table as RichTable

    table = RichTable.grid(padding=(0, 4, 0, 0))
    for style in ("dim", "bold", "dim", "bold"):
        table.add_column(style=style, no_wrap=True)
    return table


_BILLION = 1e9
_UNITS = (("days", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_LEAST = 2.0  # of a unit, of which smaller amounts are told in the next one


def brief_lines(report: Report) -> Iterator[str]:
    """Whether the job fits, its step with the range of 80 %, and hours and money to the end.

    Each is a line of 80 columns, and goes on in a second one where it is longer. The first note on what was
    asked follows, such as keys of a file that are not read, with the number of others.
    """
    num_others = len(report.input_notes) - 1
    more = f" (and {num_others} more with --full)" if num_others > 0 else ""
    notes = [f"note: {note}{more}" for note in report.input_notes[:1]]
    for text in (_fit_text(report), _step_text(report), _run_text(report), *notes):
        yield "\n".join(paragraph(text, indent=2))


def _fit_text(report: Report) -> str:
    peak, capacity = report.peaks["gpu"].total, report.capacity_bytes.get("gpu")
    verdict = fit_of(report).verdict
    used = format_bytes(peak) + (f" of {format_bytes(capacity)}" if capacity else "")
    breaking = breaking_sentence(report)
    phrases = (f"{used}, {verdict.odds}", breaking[:1].lower() + breaking[1:])
    labels = (report.labels.get(name) for name in ("model", "strategy", "cluster", "gpus", "batch"))
    job = ", ".join(label for label in labels if label)
    return f"{verdict.word.upper()}  {'; '.join(filter(None, phrases))}: {job}"


def _step_text(report: Report) -> str:
    text = f"step {format_seconds(report.step_seconds)}"
    if report.step_seconds_range is not None:
        low, high = report.step_seconds_range
        text += f" ({format_seconds(low)} to {format_seconds(high)})"
    if report.tokens_per_second_per_gpu is not None:
        text += f", {report.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    if report.mfu_fraction is not None:
        text += f", MFU {report.mfu_fraction * 100:.1f} %"
    return text


def _run_text(report: Report) -> str:
    """Time, GPU-hours and money of the run, or of a billion tokens where the run has no length.

    A run of less than one step takes one.
    """
    cost = report.cost
    has_length = cost is not None and cost.tokens is not None
    tokens = cost.tokens if cost is not None and cost.tokens is not None else _BILLION
    seconds = max(tokens / report.step_tokens, 1.0) * report.step_seconds
    unit, unit_seconds = next((row for row in _UNITS if seconds >= _LEAST * row[1]), _UNITS[-1])
    gpu_hours = seconds * report.simulation.world_size / 3600.0
    steps = ", less than one step, which takes" if tokens < report.step_tokens else ":"
    length = run_length_text(tokens, 1 if cost is None or not has_length else cost.epochs)
    text = f"{length}{steps} {seconds / unit_seconds:,.1f} {unit}"
    if report.step_seconds_range is not None:
        low, high = (seconds / unit_seconds * end / report.step_seconds for end in report.step_seconds_range)
        text += f" ({low:,.1f} to {high:,.1f} {unit})"
    text += f", {bill(gpu_hours, cost)}"
    return text if has_length else f"{text}; --tokens N or --samples N"
