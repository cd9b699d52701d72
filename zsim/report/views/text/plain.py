"""Tables, paragraphs and sentences as plain text of at most 80 columns, and tables in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from zsim.report.framework import report_role
from zsim.report.memory import START_UP, OutOfMemory, Remedy
from zsim.report.report import Report
from zsim.report.views.meanings import Meaning
from zsim.report.views.result import Bar, Cell, Column, ResultTable
from zsim.units import format_bytes, format_gpus, format_seconds
from zsim.validated.validation import describe_unexplained, format_validation

WIDTH = 80
_GAP = "  "
_LEAST = 20


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The heading, then one line per row, with columns as wide as needed. A row may lack its last cells.

    Where that is more than WIDTH, the first column shrinks down to 20 characters: its longest cells lose
    their beginnings, since the end of a name says most.
    """
    first, *other_widths = _widths(columns, rows)
    room = WIDTH - sum(other_widths) - len(_GAP) * len(other_widths)
    widths = [min(first, max(room, _LEAST)), *other_widths]
    lines = []
    for row in ([column.title for column in columns], *rows):
        cells = [
            f"{cell:<{width}}" if column.is_left else f"{cell:>{width}}"
            for column, cell, width in zip(columns, [cut(row[0], widths[0]), *row[1:]], widths, strict=False)
        ]
        lines.append(_GAP.join(cells).rstrip())
    return lines


def text_table(values: ResultTable, *, is_split: bool = False) -> list[str]:
    """The lines of a table, below its title if it has one.

    If it `is_split`, columns without room follow below. Bars are left out.
    """
    rows = [[_text_of(cell) for cell in row] for row in values.rows]
    lines = tables(values.columns, rows) if is_split else table(values.columns, rows)
    return [*([values.title] if values.title else []), *lines]


def _text_of(cell: Cell) -> str:
    if isinstance(cell, Bar):
        return ""
    return cell.label if isinstance(cell, Meaning) else cell


def tables(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table in parts: columns beyond WIDTH follow below, with the first column repeated."""
    first, *other_widths = _widths(columns, rows)
    column_groups: list[list[int]] = []
    room = 0
    for number, width in enumerate(other_widths, 1):
        room -= width + len(_GAP)
        if room < 0:
            column_groups.append([0])
            room = WIDTH - first - width - len(_GAP)
        column_groups[-1].append(number)
    return [
        line
        for column_group in column_groups
        for line in table(
            [columns[n] for n in column_group], [[row[n] for n in column_group] for row in rows]
        )
    ]


def named_columns(first: str, *other_titles: str, min_width: int = 0) -> list[Column]:
    """The first column, left-aligned and at least `min_width` wide, and the others, right-aligned."""
    return [Column(first, is_left=True, min_width=min_width), *(Column(title) for title in other_titles)]


def markdown(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of the table in Markdown, with cells as they are."""
    lines = ([column.title for column in columns], *rows)
    heading, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return [heading, f"|{'|'.join('---' if column.is_left else '---:' for column in columns)}|", *body]


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    lines = ([column.title for column in columns], *rows)
    return [
        max(column.min_width, *(len(line[number]) for line in lines if number < len(line)))
        for number, column in enumerate(columns)
    ]


def cut(text: str, width: int) -> str:
    """The last characters of `text`, at most `width`."""
    return text if len(text) <= width else "..." + text[len(text) - width + 3 :]


def paragraph(text: str, *, first: int | str = 0, indent: int | None = None) -> list[str]:
    """The lines of a paragraph: the first begins with `first` (text, or a number of blanks), the others with
    `indent` blanks, by default as many as `first` is wide."""
    begin = " " * first if isinstance(first, int) else first
    indentation = " " * (len(begin) if indent is None else indent)
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=begin,
        subsequent_indent=indentation,
        break_long_words=False,
        break_on_hyphens=False,
    )


def shell(command: str, indent: int = 4) -> list[str]:
    """A command to copy, continued with backslashes where it is wider than 80 columns."""
    lines = textwrap.wrap(command, WIDTH - indent - 4, break_long_words=False, break_on_hyphens=False)
    first, *continuations = lines if len(command) > WIDTH - indent else [command]
    indented = [" " * indent + first, *(" " * (indent + 2) + line for line in continuations)]
    return [*(f"{line} \\" for line in indented[:-1]), indented[-1]]


_POOLS = {
    "gpu": "GPU memory", "host": "host memory of a node", "nvme": "NVMe of a node",
    "pinned": "page-locked memory of a node",
}  # fmt: skip


def headline(report: Report) -> str:
    """Model, strategy, cluster, world size and each GPU's batch, where the labels have them."""
    labels = report.labels
    strategy = labels.get("strategy") or labels.get("framework")
    words = [labels.get("model"), strategy, labels.get("parallelism"), labels.get("cluster")]
    gpus = labels.get("gpus") or format_gpus(report.simulation.world_size)
    words += [gpus, labels.get("batch")]
    return " | ".join(word for word in words if word)


def format_trust(report: Report) -> str:
    """How far to trust the step: its interval, what the validated runs behind it have in common, and where
    the job is beyond them.

    Empty where the step is not judged.
    """
    validation = report.validation
    if validation is None:
        return ""
    sentence = f"Step {format_validation(validation, report.step_seconds)}"
    sentence += f" ({validation.regime})" if validation.runs else ""
    unexplained = describe_unexplained(validation)
    sentence += f". {unexplained[0].upper()}{unexplained[1:]}" if unexplained else ""
    beyond = f" Extrapolates: {'; '.join(validation.extrapolates)}." if validation.extrapolates else ""
    return f"{sentence}.{beyond}"


SHARDING = "sharding"  # among the changes that were tried
NO_GPUS = "More GPUs alone, up to 65,536, would not help"
NO_REMEDY = "None of these makes it fit on these GPUs"
NO_CHANGE = "No change that was tried makes it fit on these GPUs"


def missing_memory(finding: OutOfMemory, kind: str = "") -> str:
    """The first op that does not fit, when, by how much, and what would make the job of a `kind` of strategy
    fit.
    """
    missing, at_peak = format_bytes(finding.missing_bytes), format_bytes(finding.peak_missing_bytes)
    pool = _POOLS.get(finding.pool, finding.pool)
    # A host that runs ahead has issued some of a step's ops before the step begins.
    time_text = f", issued at {format_seconds(finding.seconds)}" if finding.seconds else ""
    capacity = format_bytes(finding.capacity_bytes)
    if finding.op == START_UP:
        text = (
            f"{pool}: the whole model, on every GPU before it is sharded, exceeds {capacity} by {missing}; "
            f"{_built_sharded(kind)} it would never be whole"
        )
    elif finding.seconds == 0 and finding.op in ("", "start"):
        text = (
            f"{pool}: the peak exceeds {capacity} by {at_peak}, and what is held from the start by {missing}"
        )
    else:
        op = f"'{finding.op}'" if finding.op else "an op"
        text = (
            f"{pool}: the peak exceeds {capacity} by {at_peak}; the first op without room is "
            f"{op}{time_text}, which lacks {missing}"
        )
    remedy = "" if finding.remedy is None else f" {format_remedy(finding.remedy)}"
    if finding.least_gpus is not None:
        return f"{text}. {format_gpus(finding.least_gpus)} would hold all tensors.{remedy}"
    if finding.pool == "gpu" and finding.tried:
        untried = (
            "" if SHARDING in finding.tried else " Strategies that shard were not tried (strategy.kind)."
        )
        remedy = remedy or f" {NO_REMEDY}: {', '.join(finding.tried)}.{untried}"
        return f"{text}.{remedy} {NO_GPUS}."
    return f"{text}.{remedy}"


def _built_sharded(kind: str) -> str:
    framework = report_role(kind)
    return f"built under {framework.sharded_builder} ({framework.sharded_builder_key} = true)"


def format_remedy(remedy: Remedy) -> str:
    """E.g. "training.activation_checkpointing = full would fit: 37.18 GB, step 9.500 s."."""
    step = format_seconds(remedy.step_seconds)
    text = f"{remedy.words} would fit: {format_bytes(remedy.gpu_peak_bytes)}, step {step}"
    if remedy.script_changes:
        text += f" (needs a change of the script: {'; '.join(_format_script_changes(remedy))})"
    return f"{text}."


def _format_script_changes(remedy: Remedy) -> Iterator[str]:
    """Changes of the script, without repeating the remedy's words: for a single switch only the change, for
    several the key too.
    """
    switches = remedy.words.split(" and ")
    for change in remedy.script_changes:
        known_switch = next((switch for switch in switches if change.startswith(f"{switch}: ")), None)
        description = change if known_switch is None else change.removeprefix(f"{known_switch}: ")
        yield (
            description
            if known_switch is None or len(switches) == 1
            else f"{known_switch.partition(' = ')[0]}: {description}"
        )
