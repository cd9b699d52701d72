"""The recorded cases of a source checkout (`traces/`): PyTorch's behaviour, against zsim's plans.

Three shapes of JSON: the oracle's answers (real FSDP2 on a fake process group), recorded runs (a folder with
`summary.json`), and the shaped link's. They are told apart by their keys; traces/README.md explains them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from validation.cases.memory import memory_rows
from validation.cases.saves import clock_rows, files_rows
from validation.cases.shaped_link import predict_ahead
from zsim.api import make_plan, simulate
from zsim.comparison.compare import compare
from zsim.comparison.plan_check import calls_of_plan, check_plan, unfold
from zsim.comparison.verdict import MAX_FOREIGN_FRACTION, judge
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.memory.tensors import bytes_before_update, plan_peaks
from zsim.plan.ops import Plan
from zsim.report.report import Report
from zsim.report.views.meanings import MEMORY
from zsim.specs.experiment.tables import Experiment
from zsim.study.check.baseline import CheckRow, Outcome, row_of_metric
from zsim.study.check.targets import kind_of
from zsim.trace.readers.content import Content
from zsim.trace.readers.read import read_trace
from zsim.trace.readers.span_log import read_objects
from zsim.trace.trace import Trace
from zsim.units import format_bytes, format_seconds

ANY_CLUSTER = "dgx-h100"  # a plan does not depend on hardware
CPU_CLUSTER = "cpu-gloo"
# AdamW's step counters, 4 bytes per tensor, and the labels' buffers are not planned; activations follow
# formulas; short-lived gradients within a block's backward count in the sum.
STATES, CATEGORY, PEAK = 1e-4, 0.01, 0.005
WIRE = 0.005  # headers and acknowledgements
OVERLAP = 0.15
STEP_WALL, STEP_CPU = 0.20, 0.10  # for a cluster calibrated in the same job


def case_rows(name: str, path: Path, content: Mapping[str, Any]) -> list[CheckRow]:
    """All checks of one recorded case. Raises InputError for a case that contradicts its own shape."""
    kinds = {
        "oracle": _oracle, "run": _run, "shaped": _shaped, "files": files_rows, "saves": clock_rows
    }  # fmt: skip
    rows = kinds[str(kind_of(content))]
    try:
        return list(rows(name, path, content))
    except NotSimulatedError as error:
        return [CheckRow(name, "calls", "skipped", str(error))]
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
        raise InputError(f"{path}: not whole: {type(error).__name__} {error}") from None


# -- the oracle -------------------------------------------------------------------------------------------


def oracle_experiment(case: Mapping[str, Any]) -> Experiment:
    """The experiment that corresponds to the oracle's question."""
    return Experiment.of_data(
        {
            "model": case["model"],
            "cluster": ANY_CLUSTER,
            "gpus": case["world_size"],
            "training": {
                "sequence_length": case["sequence_length"],
                "micro_batch_size": case["micro_batch_size"],
                "gradient_accumulation_steps": case["gradient_accumulation_steps"],
                "precision": case["param_dtype"],
                "activation_checkpointing": case["activation_checkpointing"],
                "attention": "math" if case["param_dtype"] == "fp32" else "flash",
                "cross_entropy": "eager-shifted-labels",
                "layer_kernels": "torchtitan" if case["code"] == "torchtitan" else "torch",
                "gradient_clipping": case["gradient_clipping"],
            },
            "strategy": {
                "kind": "fsdp2",
                "reshard_after_forward": case["reshard_after_forward"],
                "replicate": case["replicate"],
                "wrapping": case["wrapping"],
                "param_dtype": case["param_dtype"],
                "reduce_dtype": case["reduce_dtype"],
            },
        }
    )


def _oracle(name: str, path: Path, content: Mapping[str, Any]) -> Iterator[CheckRow]:
    plan = make_plan(oracle_experiment(content["case"]))
    yield _calls_row(name, plan, content, path)
    peaks, measured = plan_peaks(plan), content["peak_bytes"]
    for category, there in measured.items():
        tolerance = PEAK if category == "total" else CATEGORY
        tolerance = STATES if category in ("parameters", "gradients", "optimizer_states") else tolerance
        yield _bytes_row(name, category, peaks[category], there, tolerance)


def _memory_name(category: str) -> str:
    return f"gpu {MEMORY[category].label if category in MEMORY else category}"


def _bytes_row(name: str, category: str, mine: int, there: int, tolerance: float) -> CheckRow:
    metric = judge(_memory_name(category), mine, there, unit="bytes", total=there, tolerance=tolerance)
    text = f"{format_bytes(mine)} planned, {format_bytes(there)} measured ({mine - there:+,} B)"
    return row_of_metric(name, metric, text if metric.verdict != "pass" else "")


def _calls_row(name: str, plan: Plan, content: Mapping[str, Any], path: Path) -> CheckRow:
    """The plan check: every call must match exactly."""
    recorded = unfold(content["calls"], f"{path}: calls")
    check = check_plan(calls_of_plan(plan), recorded, ("planned", "recorded"))
    return CheckRow(
        name,
        "calls",
        check.verdict,
        "; ".join(row.sentence for row in check.differences[:3])
        + (f"; and {len(check.differences) - 3} more" if len(check.differences) > 3 else ""),
        len(check.simulated),
        len(check.recorded),
    )


# -- recorded runs ----------------------------------------------------------------------------------------


def _run(name: str, path: Path, content: Mapping[str, Any]) -> Iterator[CheckRow]:
    is_same = bool(content["same_calls_on_all_ranks"])
    yield CheckRow(
        name, "ranks", "pass" if is_same else "fail", "" if is_same else "the ranks made different calls"
    )
    if content["experiment"] is None:
        reason = f"zsim has no plan of '{content['case']['backend']}'"
        yield CheckRow(name, "calls", "skipped", reason)
        return
    plan = make_plan(Experiment.of_data({"cluster": ANY_CLUSTER, **content["experiment"]}))
    yield _calls_row(name, plan, content, path)
    yield from _states_rows(name, plan, content)
    logs = _read(path.parent, "rank*.jsonl.gz")
    if isinstance(logs, Trace):
        yield from memory_rows(name, plan, logs)
    if "nvme" in content["experiment"]["strategy"].values():
        yield CheckRow(name, "step", "skipped", f"{CPU_CLUSTER} has no drives")
        return
    own = path.parent / "cluster.toml"
    cluster = str(own) if own.exists() else CPU_CLUSTER
    result = simulate(Experiment.of_data({"cluster": cluster, **content["experiment"]}))
    for title, read in (("span logs", logs), ("profile", _read(path.parent, "rank*.kineto.json.gz"))):
        if read is not None:
            yield _trace_row(name, f"calls, {title}", result.trace, read)
    yield from _run_times(name, path, content, result.report, is_own=own.exists())


def _states_rows(name: str, plan: Plan, content: Mapping[str, Any]) -> Iterator[CheckRow]:
    """Bytes of model states at the end of the last backward, on the rank with the maximum; they must match
    exactly. DeepSpeed's stages 1 and 2 keep whole gradients at both ends of a rank's partition; a plan counts
    the part outside of the partition as a buffer."""
    planned = bytes_before_update(plan)
    if content["case"]["name"].startswith(("deepspeed1", "deepspeed2")):
        planned["gradients"] += planned["buffers"]
    for category in ("parameters", "gradients", "optimizer_states"):
        there = max(rank["device"].get(category, 0) for rank in content["held_bytes_before_update"])
        if planned[category] or there:
            yield _bytes_row(name, category, planned[category], there, 0.0)


def _read(folder: Path, pattern: str) -> Trace | InputError | None:
    """The ranks' own records, or the error in them; None without files."""
    files = sorted(folder.glob(pattern))
    try:
        return read_trace(files) if files else None
    except InputError as error:
        return error


def _trace_row(name: str, title: str, simulated: Trace, read: Trace | InputError) -> CheckRow:
    """The plan check again, rank by rank; ranks that contradict each other are a miss too."""
    if isinstance(read, InputError):
        return CheckRow(name, title, "fail", str(read))
    try:
        comparison = compare(simulated, read)
    except InputError as error:
        return CheckRow(name, title, "fail", str(error))
    found = [row.sentence for row in comparison.differences if row.check == "plan"]
    plan = comparison.plan
    calls = len(plan.simulated), len(plan.recorded)
    return CheckRow(name, title, comparison.plan_verdict, "; ".join(found[:3]), *calls)


def _run_times(
    name: str, path: Path, content: Mapping[str, Any], report: Report, *, is_own: bool
) -> Iterator[CheckRow]:
    """Wall time of the step and processor time of its thread; judged if `cluster.toml` next to the run was
    calibrated in the same job, else only shown."""
    times = content["step_seconds"]
    foreign = float(times["foreign_cpu_fraction"])
    doubt = "" if is_own else "calibrated in another job: shown, not judged"
    busy = f"others used {foreign:.0%} of the machine" if foreign > MAX_FOREIGN_FRACTION else ""
    measured = times.get("mean", times["median"])  # skewed times: medians add up to too little
    yield _time_row(name, "step", report.step_seconds, measured, STEP_WALL, busy or doubt)
    cpu = _cpu_seconds(path.parent, content)
    if cpu is not None:
        seconds = report.breakdown.seconds
        computing = seconds["compute"] + seconds["optimizer"] + seconds["host_bound"]
        yield _time_row(name, "processor time of the main thread", computing, cpu, STEP_CPU, doubt)


def _time_row(name: str, what: str, mine: float, there: float, tolerance: float, doubt: str) -> CheckRow:
    metric = judge(what, mine, there, unit="seconds", total=there, tolerance=tolerance, doubt=doubt)
    text = f"{format_seconds(mine)} simulated, {format_seconds(there)} measured"
    return row_of_metric(name, metric, "; ".join(part for part in (text, doubt) if part))


def _cpu_seconds(folder: Path, content: Mapping[str, Any]) -> float | None:
    """Processor seconds of rank 0's thread per step: the mean of the timed steps; for an older recording, the
    median of those in its span log; None without either."""
    if "step_cpu_seconds" in content:
        return float(content["step_cpu_seconds"]["mean_by_rank"][0])
    log = folder / "rank0.jsonl.gz"
    if not log.exists():
        return None
    by_step: dict[int, int] = {}
    try:
        for event in islice(read_objects(Content(log)), 1, None):
            if event["kind"] == "phase":
                by_step[event["step"]] = by_step.get(event["step"], 0) + event["cpu_ns"]
    except (TypeError, KeyError) as error:
        raise InputError(f"{log}: not a span log: {error}") from None
    return statistics.median(by_step.values()) / 1e9 if by_step else None


def _shaped(name: str, path: Path, content: Mapping[str, Any]) -> Iterator[CheckRow]:
    """Declared bytes against those that the interfaces counted, with and without prefetching gathers; and the
    overlap."""
    for turn in ("serial", "ahead"):
        declared = content[turn]["declared_wire_bytes"]
        for received in content[turn]["received_bytes"]:
            title = f"{turn}, bytes on the wire"
            metric = judge(title, declared, received, unit="bytes", total=received, tolerance=WIRE)
            yield row_of_metric(name, metric)
    if "sequence_length" not in content:
        yield CheckRow(name, "step", "skipped", "an older recording, which does not say what it trained")
        return
    yield from _overlap(name, content)


def _overlap(name: str, content: Mapping[str, Any]) -> Iterator[CheckRow]:
    """The step with prefetched gathers, predicted from the step without; the prediction must also be closer
    than one without overlap."""
    predicted, measured = predict_ahead(content), content["ahead"]["step_seconds"]["mean"]
    foreign = float(content["foreign_cpu_fraction"])
    doubt = f"others used {foreign:.0%} of the machine" if foreign > MAX_FOREIGN_FRACTION else ""
    yield _time_row(name, "ahead, step", predicted.seconds, measured, OVERLAP, doubt)
    without = predicted.seconds_without_overlap
    is_nearer = abs(predicted.seconds - measured) < abs(without - measured)
    text = f"without overlap: {format_seconds(without)}, {without / measured - 1:+.0%}"
    outcome: Outcome = "inconclusive" if doubt else "pass" if is_nearer else "fail"
    yield CheckRow(name, "ahead, nearer than without overlap", outcome, text)
