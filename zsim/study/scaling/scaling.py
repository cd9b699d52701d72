"""One experiment on a growing number of GPUs: how far from linear, where efficiency breaks, and why.

Weak scaling keeps the batch per GPU, strong scaling the global batch. Fill mode gives every GPU the largest
micro-batch that fits without being held up by torch's allocator, which grows as sharding leaves more room.

Degrees of tensor, pipeline and context parallelism stay, and the replicas of the model grow in number. With
`grow` one of the degrees grows instead, and the replicas stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, ZsimError, check_choice
from zsim.files import check_folder
from zsim.report.framework import report_role
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import ExperimentSource, change_experiment, experiment_of
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import ModelSpec
from zsim.study.differences import is_shared, range_of_row, verdict_of_row
from zsim.study.rollouts import drop_rollout, resize_rollout
from zsim.study.scaling.result import MODES, Mode, ScalingPoint, ScalingResult, best_of
from zsim.study.search import largest_fitting
from zsim.study.sweep.points import Point
from zsim.study.sweep.records import RUN_COLUMNS, Record, points_folder
from zsim.study.sweep.sweep import run_points

GROWN = ("tensor", "pipeline", "context")
_MAX_COUNTS = 200
_COLUMNS = (
    "nodes", "step_seconds", "step_tokens", "mfu_fraction", "fits", "gpu_peak_bytes", "gpu_capacity_bytes",
)  # fmt: skip


def scaling(
    experiment: ExperimentSource = None,
    gpus: str | Iterable[int] = "8..1024",
    *,
    mode: str = "weak",
    overrides: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    grow: str | None = None,
    jobs: int | None = None,
    cache: str | Path | None = None,
) -> ScalingResult:
    """Simulate an experiment on a growing number of GPUs, as `zsim scaling` does.

    `gpus` is "8..1024" (doubling), "8..4096:4", or numbers. `mode` "weak" keeps the batch of a GPU, "strong"
    that of all GPUs (`global_batch` sequences, else the experiment's), and "fill" takes the largest
    micro-batch that fits. `grow` is "tensor", "pipeline" or "context", the degree that grows in place of the
    replicas. `cache` is a folder of simulated points.

        found = zsim.scaling("experiment.toml", [8, 16, 32, 64])
        found.figure("efficiency"), [knee.cause for knee in found.knees()]

    Raises InputError where no count can be simulated.
    """
    check_choice(f"scaling: mode: found {mode!r}, ", mode, MODES)
    parsed_mode = next(name for name in MODES if name == mode)
    text = gpus if isinstance(gpus, str) else ",".join(str(count) for count in gpus)
    resolved_experiment, counts = experiment_of(experiment, overrides), parse_counts(text)
    with points_folder(None if cache is None else Path(cache)) as folder:
        return run_scaling(
            resolved_experiment, counts, parsed_mode, folder, global_batch=global_batch, grow=grow,
            jobs=jobs or os.cpu_count() or 1,
        )  # fmt: skip


def parse_counts(text: str) -> list[int]:
    """The GPU counts of "8..1024" (doubling), "8..4096:4" (times four) or "8,24,64", ascending."""
    if ".." in text:
        span, _, factor = text.partition(":")
        first, last = (_count(part, text) for part in span.split("..", 1))
        step = _count(factor, text) if factor else 2
        if step < 2 or last < first:
            raise InputError(f"--gpus {text}: expected FIRST..LAST upwards, times at least 2")
        counts = [first]
        while counts[-1] * step <= last:
            counts.append(counts[-1] * step)
    else:
        counts = sorted({_count(part, text) for part in text.split(",")})
    if len(counts) > _MAX_COUNTS:
        raise InputError(f"--gpus {text}: {len(counts)} counts, expected at most {_MAX_COUNTS}")
    return counts


def _count(part: str, text: str) -> int:
    try:
        count = int(part)
    except ValueError:
        count = 0
    if count < 1:
        raise InputError(f"--gpus {text}: expected counts as in 8..1024, 8..4096:4 or 8,24,64")
    return count


def run_scaling(
    experiment: Experiment,
    counts: Sequence[int],
    mode: Mode,
    folder: Path,
    *,
    global_batch: int | None = None,
    grow: str | None = None,
    jobs: int = 1,
    is_quiet: bool = False,
) -> ScalingResult:
    """Simulate the experiment on each number of GPUs. Results are kept in `folder` by content.

    `global_batch` is in sequences (strong only), by default the experiment's. `grow` is the degree of `GROWN`
    that grows with the GPUs, from the experiment's on its GPUs (None: all stay). Raises InputError where no
    count can be simulated, or `folder` cannot be made.
    """
    if grow is not None:
        check_choice(f"--grow {grow}: ", grow, GROWN)
    if global_batch is not None and mode != "strong":
        raise InputError("--global-batch: only strong scaling has one batch for all; add --strong")
    check_folder(folder)
    if experiment.rl is not None and (grow is not None or global_batch is not None):
        option = "--global-batch" if grow is None else "--grow"
        raise InputError(f"{option}: does nothing for an experiment with [rl]; expected it left out")
    job, total = _try_resolve(experiment), experiment.training.global_batch_size
    is_of_all = mode == "strong" and (global_batch or total) is not None
    if (
        experiment.rl is None
        and job is None
        and (grow is not None or ((mode == "strong" or total is not None) and not is_of_all))
    ):
        resolve(experiment)  # raises with the reason why there is no batch to keep, or no degree
    batch = global_batch or total or (job and round(job.sequences_per_step)) or 1
    largest: dict[int, int | None] = {}

    def resize(count: int) -> Experiment:
        resized, largest[count] = _resize(experiment, job, count, mode, batch, grow)
        return resized

    points = [
        Point.of(number, {"gpus": count}, partial(resize, count)) for number, count in enumerate(counts)
    ]
    run = run_points(points, folder, jobs=jobs, is_quiet=is_quiet)
    empty: Record = {"status": "error", "error": "not run", "row": {}}
    scaling_points = tuple(
        _scaling_point(point, run.records.get(point.number, empty), largest.get(point.values["gpus"]))
        for point in points
    )
    runs = [candidate for candidate in scaling_points if candidate.error is None]
    if not runs and not run.is_stopped:
        raise InputError(f"none of {len(counts)} counts of GPUs can be simulated: {scaling_points[0].error}")
    base = best_of(runs) if runs else scaling_points[0]
    first = next((p.experiment for p, s in zip(points, scaling_points, strict=True) if s is base), None)
    return ScalingResult(_title(first or experiment), mode, scaling_points, base, run.is_stopped, grow)


def _try_resolve(experiment: Experiment) -> Job | None:
    try:
        return resolve(experiment)
    except ZsimError:
        return None


def _resize(
    experiment: Experiment, job: Job | None, gpus: int, mode: Mode, batch: int, grow: str | None = None
) -> tuple[Experiment, int | None]:
    """(the experiment on `gpus` GPUs with the mode's batch and shard groups of the same size, the largest
    micro-batch that fits in mode "fill", else None)."""
    if experiment.rl is not None:
        return resize_rollout(experiment, gpus, mode), None
    overrides: dict[str, Any] = {"gpus": gpus, "nodes": None}
    ranks = 1 if job is None else job.parallelism.model_ranks
    if grow is not None and job is not None:
        overrides[f"parallelism.{grow}"] = degree = _grow_degree(job, gpus, grow)
        ranks = ranks // getattr(job.parallelism, grow) * degree
    replicate = getattr(experiment.strategy, "replicate", None)
    if replicate and replicate > 1 and job is not None:
        shard = job.world_size * ranks // job.parallelism.model_ranks // replicate
        if gpus % shard:
            raise InputError(f"gpus: found {gpus}, expected a multiple of the shard group's {shard}")
        overrides["strategy.replicate"] = gpus // shard
    micro = job.training.micro_batch_size if job is not None else experiment.training.micro_batch_size or 1
    steps = job.training.gradient_accumulation_steps if job is not None else 1
    largest = None
    if mode == "strong":
        micro, steps = _split_batch(batch, gpus, micro, ranks)
    elif mode == "fill":
        micro, largest = _fill(lambda size: _set_batch(experiment, overrides, size, steps, gpus // ranks))
    return _set_batch(experiment, overrides, micro, steps, gpus // ranks), largest


def _grow_degree(job: Job, gpus: int, axis: str) -> int:
    """The degree that keeps the number of replicas on `gpus` GPUs."""
    degree: int = getattr(job.parallelism, axis)
    grown_degree, remainder = divmod(degree * gpus, job.world_size)
    if remainder or not grown_degree:
        gpus_per_degree = job.world_size // degree
        raise InputError(
            f"gpus: found {gpus:,}, expected a multiple of {gpus_per_degree:,}: {axis} grows from {degree:,} "
            f"on {job.world_size:,} GPUs"
        )
    return grown_degree


def _fill(resize: Callable[[int], Experiment]) -> tuple[int, int]:
    """(micro-batch to use, largest micro-batch that fits). If torch's allocator slows the step with the
    largest one, smaller ones are tried as long as that reduces the time per sequence.
    """
    largest = largest_fitting(resize) or 1
    size, best, cheapest = largest, 1, inf
    while size >= 1:
        outcome = simulate_job(resolve(resize(size)))
        seconds = outcome.trace.step_seconds / size
        if seconds >= cheapest:
            break
        best, cheapest = size, seconds
        if outcome.allocation is None or not outcome.allocation.extra_seconds:
            break
        size -= max(1, size // 16)
    return best, largest


def _split_batch(batch: int, gpus: int, micro: int, gpus_per_replica: int) -> tuple[int, int]:
    """(micro-batch, steps) of a replica, whose micro-batch only shrinks to divide the replica's batch."""
    replicas = gpus // gpus_per_replica
    if gpus % gpus_per_replica or batch % replicas:
        replica_phrase = f", {gpus_per_replica:,} to a replica" if gpus_per_replica > 1 else ""
        raise InputError(f"a batch of {batch:,} sequences does not divide over {gpus:,} GPUs{replica_phrase}")
    replica_batch = batch // replicas
    size = max(divisor for divisor in range(1, min(micro, replica_batch) + 1) if replica_batch % divisor == 0)
    return size, replica_batch // size


def _set_batch(
    experiment: Experiment, overrides: Mapping[str, Any], micro: int, steps: int, replicas: int
) -> Experiment:
    changes = {**overrides, "training.global_batch_size": None}
    changes |= experiment.strategy.batch_overrides(micro, steps, replicas)
    return change_experiment(experiment, changes)


def _scaling_point(point: Point, record: Record, largest: int | None) -> ScalingPoint:
    gpus = point.values["gpus"]
    if record["status"] != "ok":
        return ScalingPoint(gpus, record["error"])
    row = record["row"]
    prefix, per_token = "critical_path_seconds.", gpus / row["step_tokens"]
    costs = {
        name.removeprefix(prefix): seconds * per_token
        for name, seconds in row.items()
        if name.startswith(prefix)
    }
    return ScalingPoint(
        gpus,
        micro_batch_size=row["training.micro_batch_size"],
        gradient_accumulation_steps=row["training.gradient_accumulation_steps"],
        costs=costs,
        allocator_retries=row.get("allocator_retries"),
        largest_micro_batch=largest,
        step_seconds_range=range_of_row(row),
        is_shared=is_shared(row),
        whole_run={name: row.get(name) for name in RUN_COLUMNS} if "run_error" in row else None,
        verdict=verdict_of_row(row),
        **{name: row[name] for name in _COLUMNS},
    )


def _title(experiment: Experiment) -> str:
    job = _try_resolve(drop_rollout(experiment))
    if job is None:
        model = experiment.model
        return model.name if isinstance(model, ModelSpec) else str(model)
    label = report_role(job.kind).headline(job, job.strategy)
    return f"{job.model.name} | {label} | {job.cluster.name}"
