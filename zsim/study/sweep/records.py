"""Simulated points as flat rows of settings and results, kept by a hash of all that a result depends on.

The hash is of the experiment, the files it names, and zsim.
"""

from __future__ import annotations

import hashlib
import json
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zsim.api import Result, simulate
from zsim.engine.simulator import Simulator
from zsim.errors import InputError, ZsimError
from zsim.files import PACKAGE, make_folder, write_atomically
from zsim.goodput.goodput import SimulatedRun, simulate_prepared
from zsim.goodput.prepared import prepare
from zsim.report.framework import report_role
from zsim.report.report import Report
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.tables import Experiment
from zsim.specs.library import Library
from zsim.specs.model.huggingface import read_model_config
from zsim.specs.model.spec import ModelSpec
from zsim.study.rollouts import OF_UPDATES, rollout_columns
from zsim.version import __version__
from zsim.workflows.rl.result import simulate_rl


class Identities:
    """Hashes experiments by content. Each file is read once per study."""

    def __init__(self) -> None:
        self._zsim = {"version": __version__, "source": source_digest()}
        self._models: dict[str, Any] = {}
        self._captured: dict[int, tuple[ModelSpec, str]] = {}
        self._clusters: dict[str, Any] = {}
        self._files: dict[str, str] = {}
        self._library = Library()

    def identify(self, experiment: Experiment) -> str:
        """The hash of everything that decides the result. Raises InputError where a file cannot be read."""
        settings = experiment.model_dump(mode="json", exclude={"model", "cluster", "program"})
        content = {
            "zsim": self._zsim,
            "experiment": settings,
            "files": {name: self._file(name) for name in sorted(_file_names(settings))},
            "model": self._model(experiment.model),
            "cluster": self._cluster(experiment.cluster),
            "config": experiment.strategy.file_content(),
        }
        return hashlib.sha256(_canonical(content).encode()).hexdigest()

    def _file(self, name: str) -> str:
        if name not in self._files:
            try:
                with open(name, "rb") as file:
                    self._files[name] = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise InputError(f"{name}: cannot be read: {error.strerror}") from None
        return self._files[name]

    def _model(self, model: str | Mapping[str, Any] | ModelSpec) -> Any:
        if isinstance(model, ModelSpec):
            if id(model) not in self._captured:
                self._captured[id(model)] = model, repr(model)
            return self._captured[id(model)][1]
        if not isinstance(model, str):
            return model
        if model not in self._models:
            config, name, _ = read_model_config(model)
            self._models[model] = [name, config]
        return self._models[model]

    def _cluster(self, cluster: str | Mapping[str, Any]) -> Any:
        key = cluster if isinstance(cluster, str) else _canonical(cluster)
        if key not in self._clusters:
            self._clusters[key] = self._library.cluster(cluster).model_dump(mode="json", by_alias=True)
        return self._clusters[key]


def _file_names(settings: Any) -> set[str]:
    """The files that settings name: lengths of documents, an adapter's file, a pipeline's order."""
    if isinstance(settings, Mapping):
        return set().union(*map(_file_names, settings.values()))
    if isinstance(settings, list | tuple):
        return set().union(*map(_file_names, settings))
    return {settings} if isinstance(settings, str) and os.path.isfile(settings) else set()


def source_digest() -> str:
    """A hash of zsim's code and of the data it computes with, except for models and clusters, which are part
    of each identity."""
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.glob("presets/*.toml")]):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)


# -- Finished points on disk: one file per identity, written atomically, with a checksum of its content ----


Record = dict[str, Any]
_CHECKSUM = "sha256"


def _checksum(record: Record) -> str:
    """The checksum of a record as JSON, in which a number has one spelling."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class Store:
    """A folder of records by identity. Several processes may write to it concurrently."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, identity: str) -> Record | None:
        """The record, or None if it is missing, damaged, or not as it was saved."""
        try:
            record = json.loads(self._path(identity).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(record, dict) or record.get("identity") != identity:
            return None
        checksum = record.pop(_CHECKSUM, None)
        return record if checksum == _checksum(record) else None

    def save(self, record: Record) -> None:
        """Write the record. Raises InputError where the folder cannot be written."""
        path = self._path(record["identity"])
        make_folder(path.parent)
        write_atomically(path, json.dumps({**record, _CHECKSUM: _checksum(record)}))

    def mark(self, identity: str) -> None:
        """Mark the point that this process is working on. Raises InputError where the folder cannot be
        written."""
        folder = self.folder / "running"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / identity).touch()
        except OSError as error:
            raise InputError(f"{folder}: cannot be written: {error.strerror}") from None

    def unmark(self, identity: str) -> None:
        (self.folder / "running" / identity).unlink(missing_ok=True)

    def running(self) -> frozenset[str]:
        """The points that processes are working on, or died at."""
        folder = self.folder / "running"
        return frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()

    def _path(self, identity: str) -> Path:
        return self.folder / identity[:2] / f"{identity}.json"


@contextmanager
def points_folder(cache: Path | None) -> Iterator[Path]:
    """The folder of finished points: `cache`, or a temporary one that is removed afterwards."""
    if cache is not None:
        yield cache
        return
    with TemporaryDirectory(prefix="zsim-") as folder:
        yield Path(folder)


# Of a run, what studies show.
RUN_COLUMNS = (
    "run_error", "ideal_days", "expected_days", "days_low", "days_high", "goodput_fraction", "failures",
    "interval_seconds", "run_gpu_hours", "run_money",
)  # fmt: skip


def run_columns(experiment: Experiment, result: Result) -> dict[str, Any]:
    """Columns of the run, named as in the JSON of `zsim goodput`. A step that makes no run, such as one that
    can never finish, has the reason in `run_error`.
    """
    try:
        run = simulate_prepared(prepare(experiment, result), jobs=1, compares=False)
        return {"run_error": None, **answer_columns(run)}
    except ZsimError as error:
        return {"run_error": str(error)}


def answer_columns(run: SimulatedRun) -> dict[str, Any]:
    """The answer as plain values: days, fractions, seconds, bytes, GPU-hours."""
    low, high = run.days_range
    checkpoint, bill, runs = run.checkpoint, run.bill, run.runs
    return {
        "run_steps": run.steps,
        "ideal_days": run.ideal_days,
        "expected_days": run.expected_days,
        "days_low": low,
        "days_high": high,
        "goodput_fraction": None if run.is_diverging else run.goodput_fraction,
        "failures": runs.mean_of(lambda ledger: ledger.num_failures),
        "startup_seconds": run.prepared.startup_seconds,
        "interval_seconds": None if checkpoint is None else run.work_seconds,
        "best_interval_seconds": None if run.curve is None else run.curve.best_seconds,
        **{f"lost_seconds.{name}": seconds for name, seconds in runs.lost_seconds().items()},
        **{f"checkpoint.{name}": value for name, value in (asdict(checkpoint) if checkpoint else {}).items()},
        "run_gpu_hours": bill.gpu_hours,
        "run_money": bill.money,
        "run_megawatt_hours": bill.megawatt_hours,
        "seeds": len(runs.ledgers),
        "unfinished_seeds": runs.num_unfinished,
    }


def point_record(identity: str, experiment: Experiment, simulator: Simulator | None = None) -> Record:
    """Simulate the experiment with the study's `simulator`. Any error becomes part of the record, so that one
    point never ends a study."""
    simulator = simulator or Simulator()
    try:
        if experiment.rl is not None:
            row = rollout_row(experiment, simulator)
            return {"identity": identity, "status": "ok", "error": None, "row": row}
        result = simulate(experiment, simulator=simulator, variants=None)
        row = report_row(result.report, result.job)
        if experiment.run is not None:
            row |= run_columns(experiment, result)
    except (ZsimError, MemoryError, RecursionError, OverflowError) as error:
        return failed_record(identity, type(error).__name__, str(error) or type(error).__name__)
    except Exception as error:  # a bug in zsim must cost one row, not the whole study
        message = f"internal error: {type(error).__name__}: {error}"
        record = failed_record(identity, type(error).__name__, message)
        return record | {"traceback": traceback.format_exc(), "is_kept": False}
    return {"identity": identity, "status": "ok", "error": None, "row": row}


def rollout_row(experiment: Experiment, simulator: Simulator) -> dict[str, Any]:
    """A step of reinforcement learning as one row."""
    result = simulate_rl(experiment, simulator)
    update = result.times.update
    row = report_row(update.report, update.job)
    row = {key: value for key, value in row.items() if not key.startswith("critical_path_seconds.")}
    return row | dict.fromkeys(OF_UPDATES) | rollout_columns(result)


def failed_record(identity: str, kind: str, message: str) -> Record:
    """The record of a point without a result."""
    return {"identity": identity, "status": "error", "error": message, "error_kind": kind, "row": {}}


def report_row(report: Report, job: Job) -> dict[str, Any]:
    """A report as one row of plain values: the resolved settings under the experiment's keys, then the
    results. Units are part of the names, as in the JSON.
    """
    content = report.to_dict()
    experiment = content["experiment"]
    row: dict[str, Any] = {
        "model": experiment["model"]["name"],
        "parameters": experiment["model"]["parameters"],
        "cluster": experiment["cluster"]["name"],
        "gpu": experiment["cluster"]["gpu"]["name"],
        "nodes": experiment["nodes"],
        "gpus": experiment["gpus"],
    }
    row |= {f"training.{key}": _flatten_value(value) for key, value in experiment["training"].items()}
    row |= {f"strategy.{key}": value for key, value in experiment["strategy"].items()}
    settings = report_role(job.kind).file_settings(job, job.strategy)
    if settings is not None:
        row["strategy.settings"] = json.dumps(settings)
    row["strategy"] = content["labels"].get("strategy")
    row |= {
        f"parallelism.{key}": _flatten_value(value)
        for key, value in content["parallelism"].items()
        if key != "schedule_text"  # a file's, of a line per action
    }
    row |= {
        key: content[key]
        for key in (
            "step_seconds", "tokens_per_second_per_gpu", "model_flops_per_second_per_gpu", "mfu_fraction",
            "hfu_fraction", "overlap_fraction", "fits", "verdict",
            "fits_probability",
        )
    }  # fmt: skip
    row |= _step_interval(report)
    tokens = content["tokens_per_second_per_gpu"]
    row["tokens_per_second"] = None if tokens is None else tokens * experiment["gpus"]
    row["step_tokens"] = report.step_tokens
    row["missing_bytes"] = None if report.out_of_memory is None else report.out_of_memory.missing_bytes
    for name, seconds in content["breakdown_seconds"].items():
        row[f"{name}_seconds"] = seconds
    row["bubble_fraction"] = content["bubble_fraction"]
    for cause, seconds in (content["critical_path_seconds"] or {}).items():
        row[f"critical_path_seconds.{cause}"] = seconds
    for device, peak in content["peak_bytes"].items():
        for category, size in peak.items():
            row[f"{device}_peak_bytes" + ("" if category == "total" else f".{category}")] = size
    allocator = report.allocator
    row["allocator_reserved_bytes"] = None if allocator is None else allocator.reserved_bytes
    row["allocator_retries"] = None if allocator is None else allocator.retries
    row["allocator_failures"] = None if allocator is None else allocator.failures
    row["gpu_capacity_bytes"] = content["capacity_bytes"].get("gpu")
    energy = content["energy"] or {}
    row["gpu_watts"], row["gpu_joules_per_step"] = energy.get("watts"), energy.get("joules")
    row |= {f"cost.{key}": value for key, value in (content["cost"] or {}).items()}
    row["rank_classes"] = content["simulation"]["rank_classes"]
    row["limit"] = content["limit"]
    return row


def _step_interval(report: Report) -> dict[str, Any]:
    """The step's interval and the validation regime that it is derived from."""
    validation = report.validation
    low, high = (None, None) if validation is None else validation.range_of(report.step_seconds)
    return {
        "step_seconds_low": low,
        "step_seconds_high": high,
        "validation.regime": None if validation is None else validation.regime,
        "validation.runs": None if validation is None else validation.runs,
        "validation.extrapolates": None if validation is None else "; ".join(validation.extrapolates) or None,
    }


def _flatten_value(value: Any) -> Any:
    """A list or a table as JSON, so that the column has one type, and None for an empty one. Other values are
    unchanged.
    """
    if isinstance(value, list | tuple | dict):
        return json.dumps(value) if value else None
    return value
