"""The report on a terminal: right at 80 columns, in colour or piped into a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.report.fit import allocated_bytes, allocator_sentences, fit_of, moment_notes
from zsim.report.offload import OffloadSection
from zsim.report.report import Report
from zsim.report.views.html.offload import range_sentence
from zsim.report.views.meanings import DATA_LOADING, EVIDENCE, MEMORY, WHOLE_STEP, span_meaning
from zsim.report.views.text.irregular import TextTable, irregular_tables
from zsim.report.views.text.pipeline import SKETCH, parallel_tables, schedule_sketch
from zsim.report.views.text.plain import WIDTH
from zsim.report.views.text.run_cost import HEADINGS, cost_rows
from zsim.report.views.text.sentences import headline
from zsim.units import GIGABYTES, format_bytes, format_flops, format_rate, format_seconds
from zsim.validated.validation import Validation, describe_unexplained, format_validation

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_BAR_CELLS = 28
_MAX_COLLECTIVE_ROWS = 12
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
    for section in _sections(report, is_plain) if is_full else _screen(report, is_plain):
        console.print(section)
        console.print()
    asked_notes = (*report.input_notes, *allocator_sentences(report))
    notes = [*(report.notes if is_full else asked_notes), *moment_notes(report)]
    for note in notes:
        console.print(Text.assemble(("note: ", "yellow"), note))
    if notes:
        console.print()
    if not is_full:
        console.print(Text(_rest_of(report), style="dim"))
        if files:
            console.print()
    for description, path in (files or {}).items():
        console.print(Text.assemble((f"{description:<8}", "bold"), str(path)), soft_wrap=True)


def report_lines(report: Report) -> Iterator[str]:
    """The lines of `print_report`, without colour and at 80 columns."""
    import io

    from rich.console import Console

    text = io.StringIO()
    print_report(report, Console(file=text, width=WIDTH, highlight=False, emoji=False, color_system=None))
    yield from (line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _screen(report: Report, is_plain: bool) -> Iterator[RenderableType]:
    """The sections of the short report."""
    yield from _answers(report)
    yield _breakdown(report, is_plain, is_full=False)
    for text_table in irregular_tables(report):
        yield _text_table(text_table)
    yield _memory(report, "gpu", is_plain)
    if report.cost is not None:
        yield _cost(report)


def _rest_of(report: Report) -> str:
    """The sentence that says what the full report has besides."""
    more_notes = len(report.notes) - len(report.input_notes) - len(allocator_sentences(report))
    notes_text = f", and {more_notes} notes on what is assumed" if more_notes else ""
    return f"--full adds collectives, traffic, other memory and the evidence{notes_text}."


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
    yield _breakdown(report, is_plain)
    for text_table in irregular_tables(report):
        yield _text_table(text_table)
    if report.pipeline is not None and (lines := schedule_sketch(report.pipeline)):
        yield Text("\n".join(("The schedule by pipeline rank", *lines)))
        yield Text(SKETCH, style="dim")
    for text_table in parallel_tables(report):
        yield _text_table(text_table)
    for device in report.peaks:
        if report.peaks[device].total > 0:
            yield _memory(report, device, is_plain)
    yield Text(f"{GIGABYTES}.", style="dim")
    if report.collectives:
        yield _collectives(report)
    if report.traffic:
        yield _traffic(report, is_plain)
    if any(row.inter_node_bytes_per_gpu for row in report.sent):
        yield _sent(report)
    if report.offload is not None:
        yield _offload(report, report.offload, is_plain)
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


def _speed(report: Report) -> Table:
    tokens, flops = report.tokens_per_second_per_gpu, report.model_flops_per_second_per_gpu
    table = _grid()
    mfu = f"{_percent(report.mfu_fraction)} {report.mfu_peak}".rstrip()
    hfu = _percent(report.hfu_fraction)
    if report.work.is_much_masked and report.mfu_fraction is not None:
        mfu += f" (unmasked {_percent(report.masked_mfu_fraction)})"
        hfu += f" (unmasked {_percent(report.masked_hfu_fraction)})"
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
        _percent(report.overlap_fraction),
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


def _breakdown(report: Report, is_plain: bool, *, is_full: bool = True) -> Table:
    table = _table("Where the step goes", "", "time", "share", "")
    for name, meaning in WHOLE_STEP.items():
        seconds = report.breakdown.seconds.get(name, 0.0)
        if not seconds and (not is_full or name in ("bubble", DATA_LOADING)):
            continue
        share = seconds / report.step_seconds
        bar = _bar(share, meaning.terminal, is_plain)
        table.add_row(meaning.label, format_seconds(seconds), _percent(share), bar)
    return table


def _text_table(text_table: TextTable) -> Table:
    table = _table(text_table.title, *text_table.headings)
    for row in text_table.rows:
        table.add_row(*row)
    return table


def _memory(report: Report, device: str, is_plain: bool) -> Table:
    peak, capacity = report.peaks[device], report.capacity_bytes.get(device)
    title = {"gpu": "GPU memory, fullest rank", "host": "Host memory, fullest node"}.get(
        device, "NVMe, fullest node"
    )
    table = _table(title, "", "own peak", "at the peak", "")
    scale = max(capacity or 0, peak.total)
    for category, highest in peak.by_category.items():
        if highest:
            meaning = MEMORY.get(category)
            peak_share = peak.at_total[category]
            bar = _bar(peak_share / scale, meaning.terminal if meaning else "white", is_plain)
            label = meaning.label if meaning else category
            table.add_row(label, format_bytes(highest), format_bytes(peak_share), bar)
    is_over = capacity is not None and peak.total > capacity
    bar = _bar(peak.total / scale, "red" if is_over else "default", is_plain)
    table.add_row("total", format_bytes(peak.total), format_bytes(peak.total), bar, style="bold")
    pinned = report.offload.pinned_bytes if report.offload is not None else 0
    if device == "host" and pinned:
        table.add_row("of it page-locked", format_bytes(pinned), "", "", style="dim")
    if capacity:
        bar = _bar(capacity / scale, "default", is_plain)
        table.add_row("capacity", "", format_bytes(capacity), bar, style="dim")
    if device == "gpu" and report.allocator is not None:
        row = report.allocator
        limit_text = f"of {format_bytes(row.limit_bytes)}"
        table.add_row("allocated by torch", "", format_bytes(allocated_bytes(report)), "", style="dim")
        table.add_row("reserved by torch", format_bytes(row.reserved_bytes), limit_text, "", style="dim")
    return table


def _collectives(report: Report) -> Table:
    table = _table("Collectives per rank and step", "", "calls", "tensor", "dtype", "busy", "bus bandwidth")
    rows = report.collectives
    if len(rows) > _MAX_COLLECTIVE_ROWS:
        busiest = sorted(rows, key=lambda row: -row.busy_seconds)[:_MAX_COLLECTIVE_ROWS]
        rows = tuple(row for row in rows if row in busiest)
    for row in rows:
        rate = row.bus_bytes_per_second
        table.add_row(
            f"{span_meaning(row.kind).label} ({row.group or 'world'}, {row.group_size})",
            f"{row.count:,}",
            format_bytes(row.bytes),
            row.dtype,
            format_seconds(row.busy_seconds),
            "-" if rate is None else format_rate(rate),
        )
    unlisted = report.collectives[len(rows) :]
    if unlisted:
        busy = sum(row.busy_seconds for row in report.collectives) - sum(row.busy_seconds for row in rows)
        table.add_row(
            f"{len(unlisted)} more kinds and sizes", "", "", "", format_seconds(busy), "", style="dim"
        )
    return _narrow_columns(table)


def _traffic(report: Report, is_plain: bool) -> Table:
    table = _table("Traffic per GPU and step", "", "bytes", "utilisation", "")
    for row in report.traffic:
        utilisation = row.utilisation_fraction
        bar = "" if utilisation is None else _bar(utilisation, "red", is_plain)
        table.add_row(row.link_class, format_bytes(row.bytes_per_gpu), _percent(utilisation), bar)
    return table


def _sent(report: Report) -> Table:
    table = _table("Sent per GPU and step", "", "within nodes", "between nodes")
    for row in report.sent:
        label = f"{row.phase} {span_meaning(row.kind).label} ({row.group}, {row.group_size})"
        sizes = row.intra_node_bytes_per_gpu, row.inter_node_bytes_per_gpu
        table.add_row(label, *(format_bytes(size) for size in sizes))
    return table


def _offload(report: Report, section: OffloadSection, is_plain: bool) -> Table:
    """The stall by cause, then each tier's traffic."""
    table = _table("Offloading per GPU and step", "", "stall, bytes", "of step, in use", "")
    for cause, seconds in section.stall_seconds.items():
        if seconds > 0:
            share = seconds / report.step_seconds
            table.add_row(
                f"stall: {cause}", format_seconds(seconds), _percent(share), _bar(share, "magenta", is_plain)
            )
    for row in section.tiers:
        moved = "" if row.bytes_per_rank is None else format_bytes(row.bytes_per_rank)
        utilisation = row.utilisation_fraction
        table.add_row(row.tier, moved, _percent(utilisation), _bar(utilisation, "red", is_plain))
    return table


def _cost(report: Report) -> Table:
    table = _table("What training costs", *HEADINGS[:-1], "")
    for row in cost_rows(report):
        table.add_row(*row)
    table.columns[0].no_wrap, table.columns[-1].style = True, "dim"
    return table


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


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction * 100:.1f} %"


def _table(title: str, *headers: str) -> Table:
    """A table without lines: the first column is text, the last one a bar, the rest are numbers."""
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for index, header in enumerate(headers):
        is_text = index == 0 or header == ""
        table.add_column(
            header, justify="left" if is_text else "right", no_wrap=index > 0, header_style="dim"
        )
    return table


def _narrow_columns(table: Table) -> Table:
    """The table with one blank between columns where two make it wider than the page."""
    cells = ([str(column.header), *map(str, column.cells)] for column in table.columns)
    if sum(2 + max(map(len, column)) for column in cells) > WIDTH:
        table.padding = (0, 1, 0, 0)
    return table


def _grid() -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 4, 0, 0))
    for style in ("dim", "bold", "dim", "bold"):
        table.add_column(style=style, no_wrap=True)
    return table
