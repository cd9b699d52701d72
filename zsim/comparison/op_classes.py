"""Ops by class, and each op with its counterpart in the other trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.comparison.alignment import align
from zsim.comparison.plan_check import PlanCheck
from zsim.report.views.meanings import COMPUTE_KINDS, span_meaning
from zsim.trace.trace import COLLECTIVES, SpanInfo, Trace
from zsim.units import format_bytes, format_seconds


def add_transfers(trace: Trace) -> Trace:
    """The trace with `transfer_seconds` where they are known.

    A recording has them. They are dropped where they are only bounds, since one rank of many cannot tell
    waiting from transfer. In a simulation the transfer of each op is its shortest span over the ranks, since
    the last rank to arrive waits for no other.
    """
    if trace.transfer_seconds is not None:
        is_bound = bool(trace.metadata.get("transfers_bounded"))
        return replace(trace, transfer_seconds=None) if is_bound else trace
    if trace.source == "recorded" or not len(trace):
        return trace
    lengths = trace.end_seconds - trace.start_seconds
    shortest = np.full(len(trace.infos), np.inf)
    np.minimum.at(shortest, trace.info_indices, lengths)
    is_once_per_rank = np.bincount(trace.info_indices, minlength=len(trace.infos)) <= len(
        np.unique(trace.ranks)
    )
    transfers = np.where(
        trace.is_of(COLLECTIVES) & is_once_per_rank[trace.info_indices], shortest[trace.info_indices], np.nan
    )
    return replace(trace, transfer_seconds=transfers)


def match_transfers(first: Trace, second: Trace) -> tuple[Trace, Trace]:
    """Both traces with `transfer_seconds`, or both without, so that like is compared with like."""
    first, second = add_transfers(first), add_transfers(second)
    if first.transfer_seconds is None or second.transfer_seconds is None:
        return replace(first, transfer_seconds=None), replace(second, transfer_seconds=None)
    return first, second


def op_seconds(trace: Trace) -> Floats:
    """Seconds of each span. For a collective those of its transfer, where known."""
    lengths: Floats = trace.end_seconds - trace.start_seconds
    if trace.transfer_seconds is None:
        return lengths
    return np.where(np.isnan(trace.transfer_seconds), lengths, trace.transfer_seconds)


def waiting_seconds(trace: Trace) -> float | None:
    """Seconds that the trace's collectives waited for other ranks. None where transfers are not known."""
    if trace.transfer_seconds is None:
        return None
    return float((trace.end_seconds - trace.start_seconds - op_seconds(trace)).sum())


KERNELS = "kernels"  # the class of all kernels, where phases are not known
_KNOWN_PHASES = 0.9  # of the kernels' time; with a smaller part in named phases, kernels are one class


@dataclass(frozen=True, slots=True)
class OpPair:
    """One op and its counterpart in the recording, with the seconds of both."""

    title: str
    bytes: int
    simulated_seconds: float
    recorded_seconds: float


@dataclass(frozen=True, slots=True)
class OpsOfClass:
    """One side's ops of a class: their spans by start, and their total seconds."""

    spans: tuple[int, ...]
    seconds: float


def class_name(info: SpanInfo, has_phases: bool) -> str:
    """Class of a span: `all-gather, 64 ranks`, `backward kernels`, `optimizer`, `host to GPU`, or "" for
    spans of the host.
    """
    if info.kind == "host":
        return ""
    if info.kind in COLLECTIVES:
        return f"{span_meaning(info.kind).label}, {info.group_size:,} rank{'s' * (info.group_size != 1)}"
    if info.kind not in COMPUTE_KINDS:
        return span_meaning(info.kind).label
    if not has_phases:
        return KERNELS
    if info.kind == "optimizer" or info.phase == "optimizer":
        return "optimizer"
    return f"{info.phase} kernels".strip()


def has_kernels(trace: Trace) -> bool:
    """Whether the trace has kernels."""
    return bool(trace.is_of(COMPUTE_KINDS).any())


def has_phases_recorded(trace: Trace) -> bool:
    """Whether (nearly all of) the kernels' time belongs to a named phase of the step."""
    if not len(trace):
        return False
    seconds = trace.end_seconds - trace.start_seconds
    is_known = np.array([bool(info.phase) or info.kind == "optimizer" for info in trace.infos], dtype=bool)
    kernels = trace.is_of(COMPUTE_KINDS)
    known_seconds = float(seconds[kernels & is_known[trace.info_indices]].sum())
    return known_seconds >= _KNOWN_PHASES * float(seconds[kernels].sum()) and known_seconds > 0


def group_ops(trace: Trace, has_phases: bool) -> dict[str, OpsOfClass]:
    """Ops by class, in the order of each class's first op."""
    names = [class_name(info, has_phases) for info in trace.infos]
    spans: dict[str, list[int]] = {}
    indices = trace.info_indices.tolist()
    for span in np.argsort(trace.start_seconds, kind="stable").tolist():
        if names[indices[span]]:
            spans.setdefault(names[indices[span]], []).append(span)
    seconds = op_seconds(trace)
    return {name: OpsOfClass(tuple(rows), float(seconds[rows].sum())) for name, rows in spans.items()}


def pair_ops(simulated: Trace, recorded: Trace, plan: PlanCheck, has_phases: bool) -> dict[str, list[OpPair]]:
    """Pairs of ops by class: collectives as the plan check has paired them, other ops by name where both
    sides use the same names."""
    pairs_per_class: dict[str, list[OpPair]] = {}
    times = op_seconds(simulated).tolist(), op_seconds(recorded).tolist()
    for i, j in plan.pairs:
        simulated_call, recorded_call = plan.simulated[i], plan.recorded[j]
        if (simulated_call.kind, simulated_call.bytes) == (recorded_call.kind, recorded_call.bytes) and min(
            simulated_call.span, recorded_call.span
        ) >= 0:
            name = class_name(simulated.infos[simulated.info_indices[simulated_call.span]], has_phases)
            pair = OpPair(
                simulated_call.title,
                simulated_call.bytes,
                times[0][simulated_call.span],
                times[1][recorded_call.span],
            )
            pairs_per_class.setdefault(name, []).append(pair)
    simulated_classes, recorded_classes = group_ops(simulated, has_phases), group_ops(recorded, has_phases)
    for name, ops in simulated_classes.items():
        if name in pairs_per_class or name not in recorded_classes:
            continue
        spans, recorded_spans = ops.spans, recorded_classes[name].spans
        by_name = align_by_name(_names(simulated, spans), _names(recorded, recorded_spans))
        pairs = [OpPair(title, 0, times[0][spans[i]], times[1][recorded_spans[j]]) for title, i, j in by_name]
        if pairs:
            pairs_per_class[name] = pairs
    return pairs_per_class


def _names(trace: Trace, spans: Sequence[int]) -> list[str]:
    return [trace.infos[trace.info_indices[span]].name for span in spans]


def align_by_name(
    simulated_names: Sequence[str], recorded_names: Sequence[str]
) -> list[tuple[str, int, int]]:
    """(name, index, index) of ops with equal names, in time order.

    There are none where less than half of the names are shared.
    """
    if 2 * len(set(simulated_names) & set(recorded_names)) < max(
        len(set(simulated_names)), len(set(recorded_names))
    ):
        return []
    return [(simulated_names[i], i, j) for i, j in align(simulated_names, recorded_names).same]


def explain_error(pairs: Sequence[OpPair], tolerance: float) -> str:
    """The likely cause of a class's error: a link's bandwidth, a latency, or some ops only, or "" within
    tolerance.

    If all calls are longer by one factor it is bandwidth, if all are longer by one amount it is latency. The
    one that varies less over sizes is named.
    """
    timed = [pair for pair in pairs if pair.simulated_seconds > 0 and pair.recorded_seconds > 0]
    simulated_seconds = np.array([pair.simulated_seconds for pair in timed])
    recorded_seconds = np.array([pair.recorded_seconds for pair in timed])
    off_indices = np.flatnonzero(
        np.abs(recorded_seconds - simulated_seconds) > tolerance * simulated_seconds
    ).tolist()
    if not off_indices:
        return ""
    if 2 * len(off_indices) <= len(timed):
        worst = timed[max(off_indices, key=lambda k: abs(recorded_seconds[k] - simulated_seconds[k]))]
        times = (
            f"{format_seconds(worst.simulated_seconds)} simulated, {format_seconds(worst.recorded_seconds)}"
        )
        return f"{len(off_indices)} of {len(timed)} ops, most of all {worst.title}: {times} recorded"
    sizes = np.array([pair.bytes for pair in timed])
    ratios, extras = (
        _median_per_size(sizes, recorded_seconds / simulated_seconds),
        _median_per_size(sizes, recorded_seconds - simulated_seconds),
    )
    factor, extra = (
        float(np.median(recorded_seconds / simulated_seconds)),
        float(np.median(recorded_seconds - simulated_seconds)),
    )
    if len(ratios) > 1 and _relative_range(extras) < _relative_range(ratios):
        direction = "longer" if extra > 0 else "shorter"
        return f"every call {format_seconds(abs(extra))} {direction}, whatever its size: latency"
    if not sizes.any():
        return f"the usual op takes {factor:.2f} times as long as simulated"
    low, high = format_bytes(sizes.min()), format_bytes(sizes.max())
    size_range = f", from {low} to {high}" if low != high else ""
    return f"every call {factor:.2f} times as long{size_range}: {1 / factor:.2f} of the simulated bandwidth"


def _median_per_size(sizes: Ints, values: Floats) -> Floats:
    """The median of the values of each size, so that common sizes count no more than rare ones."""
    return np.array([float(np.median(values[sizes == size])) for size in np.unique(sizes)])


def _relative_range(values: Floats) -> float:
    """Range of the values relative to their mean."""
    return float(np.ptp(values) / max(abs(float(values.mean())), 1e-12))
