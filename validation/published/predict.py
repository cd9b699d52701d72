"""Predict the rows of tables of published runs, and compare with the measurements."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from validation.published.cluster import network_of
from validation.published.job import row_job
from validation.published.parallelism import kind_of_parallelism, model_ranks_of
from validation.published.sources import complete_run
from validation.published.table import PublishedRun, read_runs
from zsim.errors import InputError, ZsimError
from zsim.specs.experiment.job import Job
from zsim.study.measured.prediction import CheckResult, RowResult, iterate_predictions, predict_job

FOLDER = Path(__file__).resolve().parent
_MEMORY_KINDS = {"alloc": "allocated", "active": "active", "reserved": "reserved"}  # by column and word

Tweak = Callable[[Job], Job]


def shipped_tables() -> list[Path]:
    """The published tables of the checkout. Raises InputError if they are not there."""
    tables = sorted(FOLDER.glob("*_runs.csv"))
    if not tables:
        raise InputError(f"{FOLDER}: no table of published runs; expected RUNS.csv")
    return tables


def check_runs(paths: Iterable[Path], *, processes: int | None = None) -> CheckResult:
    """Predict every row of the tables.

    Raises InputError for a file that is not such a table, and for a text in a cell that should be a number.
    """
    table = read_runs(paths)
    results = predict_rows(table.runs, processes=processes)
    return CheckResult(tuple(results), tuple(table.notes))


def predict_rows(
    runs: Sequence[PublishedRun], *, processes: int | None = None, tweak: Tweak | None = None
) -> list[RowResult]:
    """`predict_row` of every run, on several processes if there are many. `tweak` changes each job first."""
    return list(iterate_predictions(runs, partial(predict_row, tweak=tweak), processes=processes))


def predict_row(run: PublishedRun, *, tweak: Tweak | None = None) -> RowResult:
    """zsim's prediction of one row, or the reason why the row is skipped. What is wrong with a row, or goes
    wrong with it in zsim, is that row's reason."""
    base = RowResult(run.row_id, run.source, "skipped", role=run.role, tier=run.text("tier"))
    try:
        base = _measured(run, base)
        if is_recomputation_assumed(run):
            result = _predict(replace(run, cells={**run.cells, "act_ckpt": ""}), base, tweak)
            if result.predicted_fits:
                return result
        return _predict(run, base, tweak)
    except ZsimError as error:
        return replace(base, reason=str(error))
    except Exception as error:  # of zsim, on what one row says
        return replace(base, reason=f"an error of zsim: {type(error).__name__}: {error}")


def is_recomputation_assumed(run: PublishedRun) -> bool:
    """Whether a stranger's row has recomputation only by its table's assumption (`assumed_fields`).

    By default frameworks recompute nothing, so that it counts where the run would not fit without."""
    assumed = re.search(r"(?i)recompute\b|ckpt|checkpointing", run.text("assumed_fields"))
    return run.is_strangers and assumed is not None and run.text("status") != "oom"


def _predict(run: PublishedRun, base: RowResult, tweak: Tweak | None) -> RowResult:
    row = row_job(run)
    if tweak is not None:
        row = replace(row, job=tweak(row.job))
    return predict_job(
        base,
        row.job,
        assumptions=row.assumptions,
        framework=complete_run(run).run.text("engine"),
        network=network_of(run),
        is_of_last_rank=row.is_of_last_rank,
    )


def _measured(run: PublishedRun, base: RowResult) -> RowResult:
    """`base` with what the row publishes."""
    measured = _measured_memory(run)
    kind = next(iter(measured), _memory_kind(run))
    return replace(
        base,
        measured_seconds=measured_seconds(run),
        measured_memory_bytes=measured.get(kind),
        memory_kind=kind,
        measured_fits=_measured_fits(run),
        measured_memory=measured,
        parallelism=kind_of_parallelism(run),
    )


def measured_seconds(run: PublishedRun) -> float | None:
    """Seconds of one optimizer step: published, or derived from tokens or samples per second. None without
    either, and for a row of role trend, whose absolute values compare with nothing."""
    if run.role == "trend":
        return None
    seconds = run.number("step_time_s")
    if seconds:
        return seconds
    gpus, length = run.count("n_gpus"), run.count("seq_len")
    micro_batch, steps = run.count("micro_batch"), run.count("grad_accum") or 1
    replicas = (gpus or 0) // model_ranks_of(run)
    total = run.count("global_batch") or replicas * (micro_batch or 0) * steps
    if not (gpus and length and total):
        return None
    per_gpu = run.number("tokens_per_s_per_gpu") or (run.number("tokens_per_s") or 0.0) / gpus
    if per_gpu:
        return total * length / gpus / per_gpu
    samples = run.number("samples_per_s")
    return total / samples if samples else None


def _measured_memory(run: PublishedRun) -> dict[str, int]:
    """Bytes by kind: torch's peak allocated, active, reserved, or the device's used memory."""
    columns = dict(_MEMORY_KINDS)
    if run.text("status") != "oom" and "nvidia-smi" in run.text("mem_kind"):
        columns["other"] = "device"
    values = {kind: run.number(f"mem_{column}_gb") for column, kind in columns.items()}
    return {kind: round(value * 1e9) for kind, value in values.items() if value}


def _memory_kind(run: PublishedRun) -> str:
    """The kind of memory figure for a row that publishes none: from `mem_kind`, or from the rules on its
    source."""
    text = complete_run(run).run.text("mem_kind")
    words = {**_MEMORY_KINDS, "nvidia-smi": "device"}
    return next((kind for word, kind in words.items() if word in text), "allocated")


def _measured_fits(run: PublishedRun) -> bool | None:
    return {"oom": False, "ok": True}.get(run.text("status"))
