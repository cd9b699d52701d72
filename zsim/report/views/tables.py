"""The tables of a report, as every view of it shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zsim.report.energy import run_length_text
from zsim.report.fit import allocated_bytes
from zsim.report.irregular import GpuTypeRow, JobRow, RankRow, StepSpread
from zsim.report.offload import OffloadSection
from zsim.report.report import Report
from zsim.report.traffic import CollectiveRow
from zsim.report.views.meanings import DATA_LOADING, MEMORY, WHOLE_STEP, Meaning, span_meaning
from zsim.report.views.result import Bar, Cell, ItemColumn, Medium, ResultTable, Tone, columns_of, table_of
from zsim.units import format_amount, format_bytes, format_percent, format_rate, format_seconds

Row = tuple[str, ...]
_MAX_COLLECTIVE_ROWS = 12
_SHORT_RANKS = 3
_DEVICES = {"gpu": "GPU memory, fullest rank", "host": "Host memory, fullest node"}
_MOVED = {
    "h2d": "host to GPU", "d2h": "GPU to host", "cpu": "CPU work on memory", "nvme_read": "read from NVMe",
    "nvme_write": "written to NVMe",
}  # fmt: skip


def breakdown_table(report: Report, *, is_full: bool = True) -> ResultTable:
    """Where the step goes. Unless it `is_full`, without the causes that took nothing."""
    rows = []
    for name, meaning in WHOLE_STEP.items():
        seconds = report.breakdown.seconds.get(name, 0.0)
        if not seconds and (not is_full or name in ("bubble", DATA_LOADING)):
            continue
        share = seconds / report.step_seconds
        rows.append((meaning, format_seconds(seconds), format_percent(share), Bar(share, meaning.terminal)))
    return ResultTable("Where the step goes", columns_of("", "time", "share", ""), rows)


def memory_table(report: Report, device: str, *, has_allocator: bool = True) -> ResultTable:
    """The memory of a kind of device by category: each one's own maximum, and what it holds at the peak.

    `has_allocator` says whether torch's own two figures stand below it, which the verdict has as well.
    """
    peak, capacity = report.peaks[device], report.capacity_bytes.get(device)
    scale = max(capacity or 0, peak.total)
    rows: list[tuple[Cell, ...]] = []
    tones: dict[int, Tone] = {}

    def add(tone: Tone, *cells: Cell) -> None:
        tones[len(rows)] = tone
        rows.append(cells)

    for category, highest in peak.by_category.items():
        if highest:
            meaning = MEMORY.get(category) or Meaning(category, "", "white")
            peak_bytes = peak.at_total[category]
            rows.append(
                (
                    meaning,
                    format_bytes(highest),
                    format_bytes(peak_bytes),
                    Bar(peak_bytes / scale, meaning.terminal),
                )
            )
    is_over = capacity is not None and peak.total > capacity
    total = format_bytes(peak.total)
    add("total", "total", total, total, Bar(peak.total / scale, "red" if is_over else "default"))
    pinned = report.offload.pinned_bytes if report.offload is not None else 0
    if device == "host" and pinned:
        add("aside", "of it page-locked", format_bytes(pinned), "", "")
    if capacity:
        add("aside", "capacity", "", format_bytes(capacity), Bar(capacity / scale))
    if device == "gpu" and report.allocator is not None and has_allocator:
        row = report.allocator
        limit_text = f"of {format_bytes(row.limit_bytes)}"
        add("aside", "allocated by torch", "", format_bytes(allocated_bytes(report)), "")
        add("aside", "reserved by torch", format_bytes(row.reserved_bytes), limit_text, "")
    columns = columns_of("", "own peak", "at the peak", "")
    return ResultTable(_DEVICES.get(device, "NVMe, fullest node"), columns, rows, tones)


_COLLECTIVES: tuple[ItemColumn[CollectiveRow], ...] = (
    ItemColumn(
        "", lambda row: f"{span_meaning(row.kind).label} ({row.group or 'world'}, {row.group_size})",
        is_left=True,
    ),
    ItemColumn("calls", lambda row: f"{row.count:,}"),
    ItemColumn("tensor", lambda row: format_bytes(row.bytes)),
    ItemColumn("dtype", lambda row: row.dtype),
    ItemColumn("busy", lambda row: format_seconds(row.busy_seconds)),
    ItemColumn("exposed", lambda row: format_seconds(row.exposed_seconds), where="page"),
    ItemColumn("algorithm bandwidth", lambda row: _rate(row.algorithm_bytes_per_second), where="page"),
    ItemColumn("bus bandwidth", lambda row: _rate(row.bus_bytes_per_second)),
)  # fmt: skip


def collective_table(report: Report, medium: Medium) -> ResultTable:
    """The collectives of a rank and step. In text the busiest kinds stand for themselves, the others are one
    row.
    """
    rows = report.collectives
    if medium == "text" and len(rows) > _MAX_COLLECTIVE_ROWS:
        busiest = sorted(rows, key=lambda row: -row.busy_seconds)[:_MAX_COLLECTIVE_ROWS]
        rows = tuple(row for row in rows if row in busiest)
    table = table_of("Collectives per rank and step", _COLLECTIVES, rows, medium)
    num_unlisted = len(report.collectives) - len(rows)
    if not num_unlisted:
        return table
    busy = sum(row.busy_seconds for row in report.collectives) - sum(row.busy_seconds for row in rows)
    rest = (f"{num_unlisted} more kinds and sizes", "", "", "", format_seconds(busy), "")
    return replace(table, rows=[*table.rows, rest], tones={len(rows): "aside"})


def _rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else format_rate(bytes_per_second)


def traffic_table(report: Report) -> ResultTable:
    """Bytes that a GPU sends over each class of links, and how busy the fullest link of it is."""
    rows = [
        (
            row.link_class,
            format_bytes(row.bytes_per_gpu),
            format_percent(row.utilisation_fraction),
            "" if row.utilisation_fraction is None else Bar(row.utilisation_fraction, "red"),
        )
        for row in report.traffic
    ]
    return ResultTable("Traffic per GPU and step", columns_of("", "bytes", "utilisation", ""), rows)


def sent_table(report: Report) -> ResultTable:
    """Bytes that a GPU sends by phase and collective, within nodes and between them."""
    rows = [
        (
            f"{row.phase} {span_meaning(row.kind).label} ({row.group}, {row.group_size})",
            format_bytes(row.intra_node_bytes_per_gpu),
            format_bytes(row.inter_node_bytes_per_gpu),
        )
        for row in report.sent
    ]
    return ResultTable("Sent per GPU and step", columns_of("", "within nodes", "between nodes"), rows)


def offload_table(report: Report, section: OffloadSection) -> ResultTable:
    """The stall by cause, then each tier's traffic."""
    rows: list[tuple[Cell, ...]] = []
    for cause, seconds in section.stall_seconds.items():
        if seconds > 0:
            share = seconds / report.step_seconds
            rows.append(
                (f"stall: {cause}", format_seconds(seconds), format_percent(share), Bar(share, "magenta"))
            )
    for row in section.tiers:
        moved = "" if row.bytes_per_rank is None else format_bytes(row.bytes_per_rank)
        used = row.utilisation_fraction
        rows.append((row.tier, moved, format_percent(used), Bar(used, "red")))
    columns = columns_of("", "stall, bytes", "of step, in use", "")
    return ResultTable("Offloading per GPU and step", columns, rows)


def moved_table(section: OffloadSection) -> ResultTable:
    """Bytes of one rank and step by kind of work, then page-locked bytes of a node."""
    rows = [(_MOVED[kind], format_bytes(size)) for kind, size in section.moved_bytes.items()]
    if section.pinned_bytes:
        rows.append(("page-locked on each node", format_bytes(section.pinned_bytes)))
    return ResultTable("Bytes", columns_of("work", "bytes"), rows)


def cost_table(report: Report) -> ResultTable:
    """The costs of training, as `[cost]` asks for it. It has no rows without `[cost]`."""
    rows = list(cost_rows(report))
    if report.cost is None or report.cost.gpu_hour_price is None:
        columns = columns_of("", "run", "per 1e9 tokens", "")
        return ResultTable("What training costs", columns, [(*row[:3], row[4]) for row in rows])
    return ResultTable(
        "What training costs", columns_of("", "run", "per 1e9 tokens", "per parameter", ""), rows
    )


def cost_rows(report: Report) -> Iterator[tuple[str, ...]]:
    """A row for each figure that `[cost]` asks for. There are none without `[cost]`."""
    energy, cost = report.energy, report.cost
    if cost is None:
        return
    billion_seconds = 1e9 / report.step_tokens * report.step_seconds
    gpu_hours = billion_seconds * report.simulation.world_size / 3600
    tokens = "" if cost.tokens is None else run_length_text(cost.tokens, cost.epochs)
    yield "days", _format_optional(cost.days, "{:,.1f}"), format_amount(billion_seconds / 86400), "", tokens
    unpriced = "no price: cost.gpu_hour_price" if cost.gpu_hour_price is None else ""
    yield "GPU-hours", format_amount(cost.gpu_hours), f"{gpu_hours:,.1f}", "", unpriced
    if cost.gpu_hour_price is not None:
        yield (
            cost.currency,
            format_amount(cost.money),
            _format_optional(cost.money_per_billion_tokens, "{:,.2f}"),
            _format_optional(cost.money_per_parameter, "{:.3g}"),
            f"{cost.gpu_hour_price:g} per GPU-hour",
        )
    if energy is not None:
        servers = f"+ {cost.node_power_watts:,.0f} W/node" if cost.node_power_watts else "GPUs alone"
        yield (
            "MWh",
            format_amount(cost.megawatt_hours),
            _format_optional(cost.megawatt_hours_per_billion_tokens, "{:,.3g}"),
            "",
            f"{servers}, PUE {cost.pue:g}",
        )
        yield "W per GPU", f"{energy.watts:.0f}", "", "", f"mean of the step; {energy.evidence}"


def _format_optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def irregular_tables(report: Report, *, is_full: bool = True) -> Iterator[ResultTable]:
    """The tables for which the report has rows. Unless it `is_full`, with a few of the ranks that differ."""
    if report.jobs:
        rows = [_job(row) for row in report.jobs]
        yield ResultTable(
            "Jobs on this fabric", columns_of("", "GPUs", "alone", "together", "longer", ""), rows
        )
    if report.gpu_types:
        yield _gpu_types(report.gpu_types)
    jitter = report.jitter
    if jitter is not None:
        title = f"{jitter.steps:,} steps with jitter, seed {jitter.seed}"
        has_bubbles = report.pipeline is not None
        yield ResultTable(
            title,
            columns_of("", *jitter.step_seconds, "without"),
            _jitter_rows(jitter, has_bubbles=has_bubbles),
        )
    if report.ranks:
        columns = columns_of("", "ranks", "kernels", "exposed communication", "slowed")
        rows = _rank_rows(report.ranks)
        if not is_full and len(rows) > _SHORT_RANKS + 1:
            rows = [*rows[:_SHORT_RANKS], (f"{len(rows) - _SHORT_RANKS} more rows", "", "", "", "")]
        yield ResultTable("Ranks that differ", columns, rows)


def _gpu_types(types: Sequence[GpuTypeRow]) -> ResultTable:
    is_uneven = len({row.micro_batch_size for row in types}) > 1
    columns = columns_of("", "GPUs", "kernels", "waits", "lost", "GPU-h/day", "GPU memory")
    return ResultTable("Types of GPUs", columns, [_gpu_type(row, is_uneven=is_uneven) for row in types])


def _gpu_type(row: GpuTypeRow, *, is_uneven: bool) -> Row:
    return (
        row.name,
        f"{row.gpus:,} x {row.micro_batch_size:,}" if is_uneven else f"{row.gpus:,}",
        format_seconds(row.busy_seconds),
        format_seconds(row.waiting_seconds),
        format_seconds(row.lost_seconds),
        f"{row.lost_gpu_hours_per_day:,.1f}",
        f"{format_bytes(row.peak_bytes)}{'' if row.fits else ', does not fit'}",
    )


def _job(row: JobRow) -> Row:
    times = format_seconds(row.step_seconds_alone), format_seconds(row.step_seconds_together)
    return row.name, f"{row.gpus:,}", *times, f"{row.slowdown:.2f} times", f"{row.model}, {row.strategy}"


def _jitter_rows(jitter: StepSpread, *, has_bubbles: bool) -> list[Row]:
    steps = [format_seconds(seconds) for seconds in jitter.step_seconds.values()]
    waits = [format_seconds(seconds) for seconds in jitter.exposed_communication_seconds.values()]
    plain_step = format_seconds(jitter.step_seconds_without)
    return [
        ("step", *steps, plain_step),
        (f"exposed communication{' and bubbles' if has_bubbles else ''}", *waits, ""),
    ]


def _rank_rows(ranks: Sequence[RankRow]) -> list[Row]:
    """A row for the ranks whose figures are equal as they are shown, named by the first of them."""
    classes: dict[tuple[str, str, str], list[RankRow]] = {}
    for row in ranks:
        shown = (
            format_seconds(row.kernel_seconds),
            format_seconds(row.exposed_communication_seconds),
            f"{row.kernel_slowdown:g} times" if row.kernel_slowdown > 1 else "-",
        )
        classes.setdefault(shown, []).append(row)
    rows: list[Row] = []
    for shown, members in classes.items():
        size = sum(row.ranks for row in members)
        name = f"rank {members[0].rank}"
        rows.append((name if size == 1 else f"like {name}", f"{size:,}", *shown))
    return rows
