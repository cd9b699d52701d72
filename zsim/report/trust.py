"""Should I believe this? The validated runs nearest to a job, the evidence behind its step, and the
measurements to make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import lcm
from typing import Any

from zsim.errors import InputError
from zsim.report.critical.causes import cause_meaning
from zsim.report.report import Report
from zsim.report.views.displayable import Displayable, Figures
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import CAPACITY, EVIDENCE, TOTAL
from zsim.report.views.result import Column, ItemColumn, ResultTable, table_of
from zsim.report.views.text.plain import paragraph, shell, table, text_table
from zsim.report.views.text.sentences import headline
from zsim.specs.cluster.files import load_power_law
from zsim.specs.lazy_model import EVIDENCE_ORDER, Evidence
from zsim.units import format_count, format_seconds
from zsim.validated.features import Features
from zsim.validated.runs import NearRun, nearest_runs
from zsim.validated.validation import Validation, format_range
from zsim.validated.width import (
    WidthStage,
    describe_cell,
    input_stages,
    ratio_bound,
    uncounted_respects,
    width_stages,
)

MICROBENCH = "python -m validation.microbench --out microbench.json"
NCCL_TESTS = "mpirun -np {ranks} -N {per_node} ./build/all_gather_perf -b 1M -e 4G -f 4 -g 1 > all_gather.txt"
FIO = (
    "fio --name=read --rw=read --bs=1M --iodepth=32 --direct=1 --ioengine=libaio --size=32G "
    "--directory=/nvme --output-format=json > read.json"
)

_PROGRAMS = {
    MICROBENCH: "in a checkout of zsim's source, with torch: the wheel has no package `validation`",
    NCCL_TESTS: "of NVIDIA's nccl-tests, built with MPI=1",
    FIO: "with fio, from your system's packages",
}

# Table -> (what to run where, the file it writes), of those that `zsim calibrate` fits.
_RUNS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("gpu.peak", "gpu.gemm", "gpu.attention", "gpu.memory", "gpu.memory_bound", "gpu.launch",
         "gpu.interference", "host", "pcie", "c2c", "offload"),
        (MICROBENCH, "microbench.json"),
    ),
    **dict.fromkeys(("node_link", "nic", "network", "collectives"), (NCCL_TESTS, "all_gather.txt")),
    "nvme": (FIO, "read.json"),
}  # fmt: skip

KNOWN = frozenset({"measured", "calibrated"})
_LEAST_FRACTION = 0.01  # of the step; below it a better number does not show


@dataclass(frozen=True, slots=True)
class ProposedMeasurement:
    """A command that measures numbers which nobody has measured, and on which the step rests."""

    command: str
    calibrate: str
    """The command that makes a cluster file of what `command` writes."""
    tables: tuple[str, ...]
    """The tables whose numbers are measured."""
    step_fraction: float
    """The fraction of the step that rests on them."""
    program: str
    """Which program `command` runs, and where that comes from."""


def propose_measurements(
    items: Sequence[EvidenceItem], cluster: str, nodes: int, gpus_per_node: int
) -> tuple[ProposedMeasurement, ...]:
    """The measurements that replace numbers which are neither measured nor calibrated, the largest part of
    the step first.

    Links are measured on at most 2 of the job's `nodes`. Parts below 1 % of the step are left out.
    """
    nodes = min(nodes, 2)
    ranks = nodes * gpus_per_node
    by_file: dict[str, ProposedMeasurement] = {}
    for name, fraction in _unmeasured_tables(items):
        command, file = _RUNS[name]
        previous = by_file.get(file)
        log = f" --ranks {ranks} --nodes {nodes}" if command is NCCL_TESTS else ""
        tables = (*previous.tables, name) if previous and name not in previous.tables else (name,)
        by_file[file] = ProposedMeasurement(
            command.format(ranks=ranks, per_node=gpus_per_node),
            f"zsim calibrate {file} --base {cluster}{log} --name ours --out ours.toml",
            previous.tables if previous and name in previous.tables else tables,
            (previous.step_fraction if previous else 0.0) + fraction,
            _PROGRAMS[command],
        )
    return tuple(sorted(by_file.values(), key=lambda measurement: -measurement.step_fraction))


def _unmeasured_tables(items: Sequence[EvidenceItem]) -> Iterator[tuple[str, float]]:
    """The tables to measure. A part with several weak tables counts once, with the first."""
    for item in items:
        if item.evidence in KNOWN or item.step_fraction < _LEAST_FRACTION:
            continue
        fraction = item.step_fraction
        for name in item.weakest:
            if name in _RUNS:
                yield name, fraction
                fraction = 0.0


_ORDER = tuple(reversed(EVIDENCE_ORDER))
NOTHING = "follows"  # a part without numbers of its own: what it waits for has them

# Cause of the critical path (`zsim.report.critical.causes`) -> the cluster's tables whose numbers it is
# computed from. A tier of links that is not here is one of the network's.
_TABLES: Mapping[str, tuple[str, ...]] = {
    "compute": ("gpu.peak", "gpu.gemm", "gpu.attention"),
    "hbm": ("gpu.memory", "gpu.memory_bound"),
    "launch": ("gpu.launch",),
    "interference": ("gpu.interference",),
    "latency": ("collectives",),
    "nvlink": ("node_link", "collectives"),
    "pcie": ("pcie",),
    "c2c": ("c2c",),
    "network": ("nic", "collectives"),
    "allocator": ("host",),
    "host": ("host",),
    "host memory": ("host", "offload"),
    "cpu": ("offload", "host"),
    "drives": ("nvme",),
    "others": (),
}
_OTHER_TIER = ("network", "collectives")


@dataclass(frozen=True, slots=True)
class EvidenceItem:
    """A part of the critical path, and the tables of numbers behind it."""

    cause: str
    seconds: float
    step_fraction: float
    evidence: str
    """The weakest grade of the tables."""
    tables: Mapping[str, str]
    """The grade of each table."""
    source: str
    """The source of the first table with the weakest grade."""

    @property
    def label(self) -> str:
        return cause_meaning(self.cause).label

    @property
    def weakest(self) -> tuple[str, ...]:
        """The tables with the weakest grade."""
        return tuple(name for name, grade in self.tables.items() if grade == self.evidence)

    @property
    def words(self) -> str:
        """The tables by grade, the weakest first, such as "data sheet: peak; calibrated: gemm, attention"."""
        by_grade = {
            grade: [name for name, table_grade in self.tables.items() if table_grade == grade]
            for grade in _ORDER
        }
        clauses = [
            f"{grade}: {', '.join(name.removeprefix('gpu.') for name in names)}"
            for grade, names in by_grade.items()
            if names
        ]
        return "; ".join(clauses)


def evidence_items(report: Report) -> tuple[EvidenceItem, ...]:
    """The parts of the step's critical path, longest first. None where the chain is not known (a recording's
    replay).
    """
    cluster = report.experiment.get("cluster")
    if not report.critical_path_seconds or not isinstance(cluster, Mapping):
        return ()
    items = [
        _evidence_item(cause, seconds, report.step_seconds, cluster)
        for cause, seconds in report.critical_path_seconds.items()
        if seconds > 0
    ]
    return tuple(sorted(items, key=lambda item: -item.seconds))


def _evidence_item(
    cause: str, seconds: float, step_seconds: float, cluster: Mapping[str, Any]
) -> EvidenceItem:
    tables_of_cause = [(name, _table(cluster, name)) for name in _TABLES.get(cause, _OTHER_TIER)]
    tables = {name: table for name, table in tables_of_cause if table is not None}
    grades = {name: str(table["evidence"]) for name, table in tables.items()}
    grade = weakest_grade(grades.values())
    first = next((table for name, table in tables.items() if grades[name] == grade), {})
    return EvidenceItem(cause, seconds, seconds / step_seconds, grade, grades, str(first.get("source", "")))


def _table(cluster: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    table: Any = cluster
    for part in name.split("."):
        table = table.get(part) if isinstance(table, Mapping) else None
    return table if isinstance(table, Mapping) and "evidence" in table else None


def weakest_grade(grades: Iterable[str]) -> str:
    """The weakest of the grades. `NOTHING` without any."""
    distinct_grades = set(grades)
    ordered_grades: list[Evidence] = [grade for grade in EVIDENCE_ORDER if grade in distinct_grades]
    return ordered_grades[-1] if ordered_grades else NOTHING


def fraction_by_grade(items: Iterable[EvidenceItem]) -> dict[str, float]:
    """The fraction of the step that rests on each grade, best known first. Zeros are left out."""
    totals = dict.fromkeys((*EVIDENCE_ORDER, NOTHING), 0.0)
    for item in items:
        totals[item.evidence] += item.step_fraction
    return {grade: fraction for grade, fraction in totals.items() if fraction > 0}


TITLE = "Should I believe this?"
MEASURE = "measured step over predicted"  # of intervals and of runs beside them
_CLOSE, _ROUGH = 0.1, 0.3  # half widths of the interval, by which it is put into words
_SHOWN_MORE = 3
_DEGREES = ("pipeline", "expert", "expert_tensor")


@dataclass(frozen=True, repr=False)
class Trust(Displayable):
    """How far to trust one simulated step."""

    job: str
    step_seconds: float
    validation: Validation
    nearest: tuple[NearRun, ...]
    """Validated runs like the job, with their signed errors."""
    stages: tuple[WidthStage, ...]
    """Why the interval is as wide as it is."""
    uncounted: tuple[str, ...]
    """In what else no run vouches for the job."""
    out_of_range: tuple[str, ...]
    """Notes on work beyond the range of what was measured."""
    grounds: tuple[EvidenceItem, ...]
    """What the step rests on."""
    measure: tuple[ProposedMeasurement, ...]
    """What to run to know more."""
    smaller: str
    """The settings of a step to measure, by which this one is known to `smaller_bound`."""
    smaller_bound: float
    """A fraction, with 80 %."""

    @property
    def step_seconds_range(self) -> tuple[float, float]:
        """(low, high) of the 80 % interval."""
        return self.validation.range_of(self.step_seconds)

    @property
    def fraction_by_grade(self) -> dict[str, float]:
        """The fraction of the step that rests on each grade of evidence, by its weakest number."""
        return fraction_by_grade(self.grounds)

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        validation = self.validation
        half = (validation.high - validation.low) / 2
        if half <= _CLOSE:
            begin = "Yes, closely"
        elif half <= _ROUGH:
            begin = "Roughly"
        else:
            begin = "As an order of size, and to compare settings"
        ends = f"{validation.low - 1:+.0%} to {validation.high - 1:+.0%}"
        count = format_count(validation.runs, "validated run") if validation.runs else "no validated run"
        verb = "is" if validation.runs <= 1 else "are"
        return (
            f"{begin}: with 80 % the step is measured at {ends} of what is predicted; {count} {verb} like it."
        )

    def headline(self) -> str:
        return f"{TITLE} {self.verdict}"

    def records(self) -> Sequence[Mapping[str, Any]]:
        """The nearest validated runs, nearest first."""
        return [
            {
                "row_id": near_run.run.row_id,
                "source": near_run.run.source,
                "model": near_run.run.settings.model,
                "strategy": near_run.run.features.strategy,
                "gpu": near_run.run.features.gpu,
                "gpus": near_run.run.features.gpus,
                "error_fraction": near_run.error,
                "measured_over_predicted": near_run.measured_over_predicted,
                "in_common": describe_cell(self.validation.features, near_run.cell),
                "more_runs": near_run.more,
            }
            for near_run in self.nearest
        ]

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim trust --json` writes."""
        return {
            "verdict": self.verdict,
            "step_seconds": self.step_seconds,
            "step_seconds_range": list(self.step_seconds_range),
            "validation": self.validation.to_dict(),
            "nearest": [dict(row) for row in self.records()],
            "interval": [{"low": stage.low, "high": stage.high, "why": stage.why} for stage in self.stages],
            "not_counted": list(self.uncounted),
            "out_of_measured_range": list(self.out_of_range),
            "step_fraction_by_evidence": self.fraction_by_grade,
            "grounds": [
                {
                    "part": item.label,
                    "seconds": item.seconds,
                    "step_fraction": item.step_fraction,
                    "evidence": item.evidence,
                    "tables": dict(item.tables),
                    "source": item.source,
                }
                for item in self.grounds
            ],
            "measure": [asdict(measurement) for measurement in self.measure],
            "measure_smaller": {"settings": self.smaller, "error_fraction": self.smaller_bound},
        }

    def plots(self) -> Figures:
        return {"errors": lambda: errors_figure(self)}

    def lines(self) -> Iterator[str]:
        yield self.job
        yield ""
        yield from paragraph(self.headline())
        yield ""
        words = f"{format_seconds(self.step_seconds)}, with 80 % {format_range(self.step_seconds_range)}"
        yield f"step  {words}"
        yield from ["", f"Nearest validated runs ({MEASURE})", *self._nearest_lines()]
        yield from ["", f"Why the interval is that wide ({MEASURE})"]
        for stage in self.stages:
            yield from paragraph(stage.why, first=f"{stage.low:6.2f} to {stage.high:5.2f}  ")
        if self.beyond:
            yield from ["", "What is extrapolated"]
            for sentence in self.beyond:
                yield from paragraph(sentence, first="- ")
        if self.grounds:
            yield from ["", *self._evidence_lines()]
        yield from ["", "What to measure"]
        for sentence in self.advice:
            yield from paragraph(sentence, first="- ")
        for measurement in self.measure:
            yield from paragraph(self.format_measurement(measurement), first="- ")
            yield from [*shell(measurement.command), *shell(measurement.calibrate)]

    @property
    def beyond(self) -> tuple[str, ...]:
        """Respects in which no validated run vouches for the job, and work beyond the measured range, one
        sentence each."""
        return (
            *self.validation.extrapolates,
            *(f"{sentence} (does not widen the interval)" for sentence in self.uncounted),
            *self.out_of_range,
        )

    @property
    def advice(self) -> tuple[str, ...]:
        """The measured steps that would say most."""
        smaller = (
            f"one measured step of this job with {self.smaller}, if torch's allocator does not run short "
            f"there: the ratio of the two steps is known to {self.smaller_bound:.0%} (80 % of published "
            f"pairs). Then zsim trust with --at {self.smaller} --measured SECONDS"
        )
        recorded = (
            "two steps of it under torch.profiler: zsim compare EXPERIMENT.toml RECORDED.json says which "
            "part is off"
        )
        return smaller, recorded

    def format_measurement(self, measurement: ProposedMeasurement) -> str:
        """Why to run a measurement."""
        return (
            f"{', '.join(measurement.tables)}: {measurement.step_fraction:.0%} of the step rests on their "
            f"numbers, assumed or from a data sheet. Measure them {measurement.program}"
        )

    def _nearest_lines(self) -> Iterator[str]:
        yield from text_table(near_table(self.nearest))
        for label, words in self._common_features():
            yield from paragraph(words, first=f"{label}  ")

    def _common_features(self) -> Iterator[tuple[str, str]]:
        for cell in sorted({near_run.cell for near_run in self.nearest}):
            row_ids = [near_run.run.row_id for near_run in self.nearest if near_run.cell == cell]
            shown = ", ".join(row_ids[:_SHOWN_MORE])
            yield "in common:", f"{describe_cell(self.validation.features, cell)} ({shown})"

    def _evidence_lines(self) -> Iterator[str]:
        fractions = ", ".join(f"{fraction:.0%} {grade}" for grade, fraction in self.fraction_by_grade.items())
        yield from paragraph(f"What the step rests on, by the weakest number of each part: {fractions}")
        columns = [
            Column("critical path", is_left=True), Column("of step"), Column("its numbers", is_left=True),
        ]  # fmt: skip
        yield from table(
            columns, [(item.label, f"{item.step_fraction:.1%}", item.words) for item in self.grounds]
        )


_NEAREST: tuple[ItemColumn[NearRun], ...] = (
    ItemColumn("run", lambda near_run: near_run.run.row_id, is_left=True),
    ItemColumn("ratio", lambda near_run: _format_ratio(near_run)),
    ItemColumn("GPUs", lambda near_run: f"{near_run.run.features.gpus:,}"),
    ItemColumn("GPU", lambda near_run: near_run.run.features.gpu, is_left=True),
    ItemColumn("strategy", lambda near_run: near_run.run.features.strategy, is_left=True),
)


def _format_ratio(near_run: NearRun) -> str:
    return f"{near_run.measured_over_predicted:.2f}"


def near_table(runs: Sequence[NearRun]) -> ResultTable:
    """A row for each validated run, the nearest first."""
    return table_of("", _NEAREST, runs, "text")


def trust_of(report: Report) -> Trust:
    """The trust that a report's step deserves.

    Raises InputError for a step that is not judged (a replayed recording).
    """
    validation = report.validation
    if validation is None:
        raise InputError("the step of a recording is not a prediction: there is nothing to believe")
    training = report.experiment.get("training") or {}
    length, precision = training.get("sequence_length"), training.get("precision")
    items = evidence_items(report)
    cluster = report.experiment.get("cluster") or {}
    name, per_node = str(cluster.get("name", "CLUSTER")), int(cluster.get("gpus_per_node", 1))
    smaller, kinds = _cheaper_step(report, validation.features, length)
    return Trust(
        job=headline(report),
        step_seconds=report.step_seconds,
        validation=validation,
        nearest=nearest_runs(validation.features, length),
        stages=(*width_stages(validation.features), *input_stages(validation)),
        uncounted=(*uncounted_respects(validation.features, length, precision), *_lower_limits(cluster)),
        out_of_range=tuple(note for note in report.notes if note.startswith("extrapolated: ")),
        grounds=items,
        measure=propose_measurements(items, name, validation.features.nodes, per_node),
        smaller=smaller,
        smaller_bound=ratio_bound(kinds, is_shared=report.is_shared),
    )


def _lower_limits(cluster: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence on the lowest limit of power at which servers run the cluster's GPUs, if its file knows any.

    A GPU whose limit is stated has none."""
    power = (gpu := cluster.get("gpu") or {}).get("power") or {}
    limits = [watts for watts in power.get("lower_limits") or () if watts < power["maximum"]]
    if not limits or gpu.get("power_limit"):
        return ()
    exponent = load_power_law().exponent if power["exponent"] is None else power["exponent"]
    name, limit = gpu["name"], f"{min(limits):.0f} W"
    times = (power["maximum"] / min(limits)) ** exponent
    return (
        f"a power limit of {power['maximum']:.0f} W: some servers run {name} at {limit}, where products take "
        f"{times:.2f} times as long (nvidia-smi -q -d POWER shows it, and a cluster's file says it by "
        f'gpu = {{ extends = "{name}", power_limit = "{limit}" }})',
    )


def _cheaper_step(report: Report, job: Features, sequence_length: float | None) -> tuple[str, list[str]]:
    """A cheaper step to measure, as a setting, and the settings in which it differs.

    It has fewer nodes that hold complete replicas and complete groups of experts, if there are such nodes, or
    half of the sequence.
    """
    degrees = {name: int(report.parallelism.get(name) or 1) for name in _DEGREES}
    experts = degrees["pipeline"] * degrees["expert"] * degrees["expert_tensor"]
    replica_ranks, per_node = lcm(job.model_ranks, experts), job.gpus // job.nodes
    for nodes in range(max(job.nodes // 4, 1), job.nodes):
        if nodes * per_node % replica_ranks == 0:
            return f"nodes={nodes}", ["GPUs"]
    return f"training.sequence_length={max(int(sequence_length or 2) // 2, 1)}", ["sequence length"]


def errors_figure(trust: Trust) -> Figure:
    """Measured over predicted: the nearest runs as marks, the stages of the interval as lines."""
    figure = Figure(layout(120 + 28 * (len(trust.nearest) + len(trust.stages)), hovermode="closest"))
    names = [
        "80 % interval" if len(trust.stages) == 1 else f"interval {number}"
        for number, _ in enumerate(trust.stages, 1)
    ]
    for name, stage in zip(names, trust.stages, strict=True):
        figure.add_scatter(
            x=[stage.low, stage.high], y=[name, name], mode="lines+markers", showlegend=False,
            line={"color": EVIDENCE["calibrated"].color, "width": 4},
            hovertemplate="%{x:.2f} times the predicted step<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=[near_run.measured_over_predicted for near_run in trust.nearest],
        y=[near_run.run.row_id for near_run in trust.nearest],
        mode="markers", showlegend=False, marker={"color": TOTAL.color, "size": 10},
        hovertext=[
            f"{near_run.run.source}, {near_run.run.settings.model}: {_format_ratio(near_run)}"
            for near_run in trust.nearest
        ],
        hoverinfo="text",
    )  # fmt: skip
    ends = [1.0, *(near_run.measured_over_predicted for near_run in trust.nearest)]
    ends += [end for stage in trust.stages for end in (stage.low, stage.high)]
    room = 0.08 * (max(ends) - min(ends))
    figure.add_vline(1.0, {"dash": "dash", "width": 1, "color": CAPACITY.color}, "as predicted")
    figure.update_xaxes(title_text=MEASURE, range=[min(ends) - room, max(ends) + room])
    figure.update_yaxes(automargin=True)
    return figure
