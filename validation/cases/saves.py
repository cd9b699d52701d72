"""Recorded saves (`traces/checkpoints`) against zsim's checkpoints: files and bytes exactly, seconds from the
machine's own rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from zsim.api import simulate
from zsim.comparison.verdict import judge
from zsim.goodput.checkpoints.cost import cost_of
from zsim.goodput.checkpoints.machine import PlanningRates, SavingRates, overlapped_step
from zsim.goodput.checkpoints.saved import SavedFiles, saved_files
from zsim.goodput.scenario import Checkpoint
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.run.checkpoint import CheckpointTable
from zsim.specs.experiment.run.run import StorageTable
from zsim.specs.experiment.tables import Experiment
from zsim.study.check.baseline import CheckRow, Outcome, row_of_metric

CPU_CLUSTER = "cpu-gloo"
BLOCKING = 0.30
_IN_FILE_RATE = 1e15  # a file that is not synced is in the page cache when it is written
_OPTIONS = ("format", "threads", "single_file_per_rank", "saves_16bit_model")


def recorded_job(entry: Mapping[str, Any], models: Mapping[str, Any], cluster: str = CPU_CLUSTER) -> Job:
    """The job of a recorded save."""
    described = dict(entry["experiment"])
    return resolve(Experiment.of_data({**described, "model": models[described["model"]], "cluster": cluster}))


def recorded_saved(job: Job, entry: Mapping[str, Any]) -> SavedFiles:
    """What zsim says that it writes."""
    how = entry["checkpoint"]
    options = {key: how[key] for key in _OPTIONS if key in how}
    return saved_files(job, CheckpointTable().model_copy(update=options))


def files_rows(name: str, path: Path, content: Mapping[str, Any]) -> Iterator[CheckRow]:
    """A row per configuration: the tensors' bytes in every file."""
    for configuration, entry in content["configurations"].items():
        saved = recorded_saved(recorded_job(entry, content["models"], "dgx-h100"), entry)
        mine = {file.name: file.tensors for file in saved.converted or saved.files}
        there = {file: size for file, (_, size) in entry["files"].items()}
        wrong = sorted(file for file in {*mine, *there} if mine.get(file) != there.get(file))
        text = "; ".join(
            f"{file}: {mine.get(file)} predicted, {there.get(file)} written" for file in wrong[:3]
        )
        verdict: Outcome = "fail" if wrong else "pass"
        yield CheckRow(f"{name} {configuration}", "files", verdict, text, len(mine), len(there))


def clock_rows(name: str, path: Path, content: Mapping[str, Any]) -> Iterator[CheckRow]:
    """A row per save and load: processor seconds of the main thread, from the rates beside it in the file."""
    for case, entry in content["saves"].items():
        found = predicted(entry, content)
        for phase, seconds in (("blocking", found.blocking_seconds), ("load", found.load_seconds)):
            there = entry["seconds"].get(f"{phase}_processor")
            if there is not None:
                text = f"{seconds:.3f} s predicted, {there:.3f} s measured"
                metric = judge(phase, seconds, there, unit="seconds", total=there, tolerance=BLOCKING)
                yield row_of_metric(f"{name} {case}", metric, text)


def predicted(entry: Mapping[str, Any], content: Mapping[str, Any]) -> Checkpoint:
    """The cost of a recorded save on the machine whose rates were measured."""
    experiment = {**entry["experiment"], "model": content["models"][entry["experiment"]["model"]]}
    result = simulate(Experiment.of_data({**experiment, "cluster": CPU_CLUSTER}))
    saved, rates = recorded_saved(result.job, entry), entry["rates"]
    return cost_of(
        result.job,
        saved,
        CheckpointTable(mode=entry["checkpoint"].get("mode", "sync")),
        _store(rates, saved, entry["experiment"]["gpus"]),
        replace(overlapped_step(result), copying_seconds=0.0),
        _rates(rates, content["plans"], content["own_plans"]),
    )


def _store(rates: Mapping[str, float], saved: SavedFiles, ranks: int) -> StorageTable:
    """The machine's disk, whose rate is of each rank while all write."""
    written = rates["write_bytes_per_second"] if saved.is_synced else _IN_FILE_RATE
    return StorageTable(
        write_bandwidth_per_node=f"{written * ranks} B/s",
        read_bandwidth_per_node=f"{rates['read_bytes_per_second'] * ranks} B/s",
    )


def _rates(
    rates: Mapping[str, float], plans: Sequence[Mapping[str, Any]], own_plans: Sequence[Mapping[str, float]]
) -> SavingRates:
    return SavingRates(
        archive_bandwidth=f"{rates['archive_bytes_per_second']} B/s",
        unarchive_bandwidth=f"{rates['unarchive_bytes_per_second']} B/s",
        archive_seconds=f"{rates['archive_seconds']} s",
        unarchive_seconds=f"{rates['unarchive_seconds']} s",
        file_bandwidth=f"{rates['file_bytes_per_second']} B/s",
        staging_seconds=f"{rates['staging_seconds']} s",
        own_load_plan_seconds_per_item=f"{median(one['load'] / one['items'] for one in own_plans)} s",
        state_dict_seconds=f"{rates['state_dict_seconds']} s",
        planning_wait="0 s",  # what blocks is compared, and no step beside
        archiving_wait="0 s",
        copy_bandwidth=f"{rates['copy_bytes_per_second']} B/s",
        planning=_planning(plans),
        planning_uncollected=_planning(plans),  # the recorded runs look for cycles
        source="traces/checkpoints/clock.json",
        evidence="measured",
    )


def _planning(plans: Sequence[Mapping[str, Any]]) -> PlanningRates:
    """Medians per item."""
    recorded = [plan for plan in plans if plan["collects"]]

    def each(*keys: str) -> str:
        return (
            f"{median(sum(plan[key] for key in keys) / plan['ranks'] / plan['items'] for plan in recorded)} s"
        )

    return PlanningRates(
        read_item=each("read"),
        plan_item=each("plan"),
        answer_item=each("write"),
        commit_item=each("results_read", "metadata_write"),
        load_item=each("load_read", "load_write"),
        metadata_item=each("metadata_read", "metadata_search"),
    )
