"""Read tables of published runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zsim.errors import InputError
from zsim.study.measured.experiment_table import check_names, read_csv_rows

REQUIRED = ("row_id", "seq_len", "gpu", "n_gpus", "strategy")
_NOTHING = frozenset(("n/a", "na", "none", "-", "?", "unknown", "unstated", "not stated", "null"))
_COLUMNS = """
n_layers hidden n_heads micro_batch
source_group source_ref provenance arch_provenance date software model arch_type n_kv_heads ffn mlp_type
vocab tied_emb n_params n_params_kind gpu_mem_gb gpus_per_node intra_link inter_gbps_per_gpu inter_desc
zero_stage dp tp pp vp cp ep shard_group offload grad_accum global_batch precision reduce_dtype optimizer
act_ckpt attn_kernel compile tokens_per_s tokens_per_s_per_gpu samples_per_s step_time_s tflops_per_gpu
tflops_kind mfu hfu peak_tflops_used mem_alloc_gb mem_active_gb mem_reserved_gb mem_other_gb mem_kind
status simulatable assumed_fields flags notes calc_model_tflops_6N12LdS published_tflops check_flags tier
source role
head_dim n_experts top_k moe_ffn shared_ffn dense_layers dispatcher lora_rank lora_targets
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
    is_strangers: bool = False
    """Read as a stranger would: without what was found out of its source alone."""

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def number(self, column: str) -> float | None:
        """The cell as a number ("8,192" too), or None if it is empty or says that it is not known.

        Raises InputError for anything else."""
        text = self.text(column)
        if text.lower() in ("", *_NOTHING):
            return None
        try:
            value = float(re.sub(r"(?<=\d)[,_](?=\d{3}\b)", "", text))
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
    def check_columns(columns: list[str]) -> None:
        _check_columns(path, columns, table)

    for where, cells in read_csv_rows(path, check_columns):
        row_id = cells["row_id"] or where.removeprefix(f"{path.name}: ")
        source = cells.get("source") or cells.get("source_group") or path.stem
        known_cells = {column: " ".join(text.split()) for column, text in cells.items() if column in KNOWN}
        table.runs.append(PublishedRun(row_id, source, cells.get("role", ""), known_cells, where))


def _check_columns(path: Path, columns: list[str], table: RunTable) -> None:
    if not any(column in KNOWN for column in columns):
        raise InputError(
            f"{path.name}: line 1: found {', '.join(columns)[:60]!r}, expected a header line that names the "
            f"columns: {', '.join(REQUIRED)} ..."
        )
    check_names(path.name, columns)
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        raise InputError(
            f"{path.name}: no column {', '.join(missing)}; expected a CSV table of measured runs "
            "with a header line, in which every row has it"
        )
    unknown = [column for column in columns if column not in KNOWN]
    if unknown:
        table.notes.append(f"{path.name}: ignored columns: {', '.join(unknown)}")
