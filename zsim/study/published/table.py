"""Read tables of published runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path

from zsim.dataclass import dataclass
from zsim.errors import InputError, unreadable_reason
from zsim.reading import read_bytes

REQUIRED = ("row_id", "n_layers", "hidden", "n_heads", "seq_len", "gpu", "n_gpus", "strategy", "micro_batch")
_COLUMNS = """
source_group source_ref provenance arch_provenance date software model arch_type n_kv_heads ffn mlp_type
vocab tied_emb n_params n_params_kind gpu_mem_gb gpus_per_node intra_link inter_gbps_per_gpu inter_desc
zero_stage dp tp pp vp cp ep shard_group offload grad_accum global_batch precision reduce_dtype optimizer
act_ckpt attn_kernel compile tokens_per_s tokens_per_s_per_gpu samples_per_s step_time_s tflops_per_gpu
tflops_kind mfu hfu peak_tflops_used mem_alloc_gb mem_active_gb mem_reserved_gb mem_other_gb mem_kind
status simulatable assumed_fields flags notes calc_model_tflops_6N12LdS published_tflops check_flags tier
source role
"""
KNOWN = frozenset((*REQUIRED, *_COLUMNS.split()))


@dataclass(frozen=True)
class PublishedRun:
    """One row of a table."""

    row_id: str
    source: str
    role: str
    cells: Mapping[str, str]
    """The cells by column, as text."""
    where: str
    """The row's position, for messages."""

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def number(self, column: str) -> float | None:
        """The cell as a number, or None if empty. Raises InputError for anything else."""
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise InputError(
                f"{self.where}: column '{column}': found {text!r}, expected a number or nothing"
            ) from None
        if not math.isfinite(value) or value < 0:
            raise InputError(
                f"{self.where}: column '{column}': found {text}, expected a finite number of at least 0, or "
                "nothing"
            )
        return value

    def count(self, column: str) -> int | None:
        """The cell as a whole number, or None if empty."""
        value = self.number(column)
        if value is None:
            return None
        if value != int(value):
            raise InputError(
                f"{self.where}: column '{column}': found {self.text(column)}, expected a whole number"
            )
        return int(value)


@dataclass
class RunTable:
    """All rows of the files."""

    runs: list[PublishedRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was ignored."""


def read_runs(paths: Iterable[Path]) -> RunTable:
    """The rows of CSV files, in order.

    Raises InputError for a file that is missing, empty, not a table, without rows, or without a required
    column."""
    table = RunTable()
    for path in paths:
        _read_file(path, table)
    return table


def _read_file(path: Path, table: RunTable) -> None:
    lines, before = _text(path).splitlines(), len(table.runs)
    reader = csv.DictReader(lines, strict=True)
    try:
        columns = [column.strip() for column in reader.fieldnames or ()]
        reader.fieldnames = columns
        _check_columns(path, columns, table)
        for cells in reader:
            _add_row(path, reader.line_num, cells, table)
        if len(table.runs) == before:
            raise InputError(f"{path.name}: no row below the header line; expected one per measured run")
    except csv.Error as error:
        raise InputError(f"{path.name}: line {reader.line_num}: not a CSV file: {error}") from None


def _text(path: Path) -> str:
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a CSV table of measured runs") from None
    except OSError as error:
        raise InputError(f"{path}: {unreadable_reason(error)}") from None
    if not content.strip():
        raise InputError(f"{path.name}: the file is empty; expected a CSV table of measured runs")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path.name}: not a CSV file: not UTF-8 text") from None


def _check_columns(path: Path, columns: list[str], table: RunTable) -> None:
    if not any(column in KNOWN for column in columns):
        raise InputError(
            f"{path.name}: line 1: found {', '.join(columns)[:60]!r}, expected a header line that names the "
            f"columns: {', '.join(REQUIRED)} ..."
        )
    if columns.count("") > 1:
        raise InputError(f"{path.name}: line 1: {columns.count('')} columns have no name")
    repeated = sorted({column for column in columns if columns.count(column) > 1})
    if repeated:
        raise InputError(f"{path.name}: the column '{repeated[0]}' stands there twice")
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        raise InputError(
            f"{path.name}: no column {', '.join(missing)}; expected a CSV table of measured runs "
            "with a header line, in which every row has it"
        )
    unknown = [column for column in columns if column not in KNOWN]
    if unknown:
        table.notes.append(f"{path.name}: ignored columns: {', '.join(unknown)}")


def _add_row(path: Path, line: int, cells: Mapping[str | None, str | None], table: RunTable) -> None:
    where = f"{path.name}: line {line}"
    if None in cells:
        raise InputError(f"{where}: more cells than the header has columns")
    if None in cells.values():
        raise InputError(f"{where}: fewer cells than the header has columns; is the file whole?")
    clean = {str(column): str(value).strip() for column, value in cells.items()}
    if not any(clean.values()):
        return
    row_id = clean["row_id"] or f"line {line}"
    source = clean.get("source") or clean.get("source_group") or path.stem
    known_cells = {column: text for column, text in clean.items() if column in KNOWN}
    table.runs.append(PublishedRun(row_id, source, clean.get("role", ""), known_cells, where))
