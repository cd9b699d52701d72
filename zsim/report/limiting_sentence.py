"""One sentence on what limits the step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints, factorize
from zsim.report.breakdown import Breakdown
from zsim.report.views.meanings import WHOLE_STEP, span_meaning
from zsim.trace.trace import SpanInfos, Trace
from zsim.units import format_seconds

_BOUND = {
    "compute": "Compute-bound",
    "exposed_communication": "Communication-bound",
    "bubble": "Pipeline-bound",
    "offload_stall": "Offload-bound",
    "optimizer": "Optimizer-bound",
    "allocator": "Short of memory",
    "host_bound": "Host-bound",
    "data_loading": "Bound by data loading",
}
_WORTH_SAYING = 0.005  # of the step


def limiting_sentence(
    trace: Trace,
    breakdown: Breakdown,
    overlap_fraction: float | None = None,
    kernel_fraction: float | None = None,
    peak_dtype: str = "",
) -> str:
    """The sentence on what limits the step, such as "Compute-bound: 84 % compute; exposed communication 11 %,
    mostly the all-gather of ...".

    Where the step mostly computes, the sentence goes on with the fraction of communication that is hidden and
    the fraction of the peak (fp8's peak where the step computes in fp8) that the kernels reach.
    """
    total = sum(breakdown.seconds.values())
    if total <= 0:
        return "An empty step."
    first = max(breakdown.seconds, key=lambda name: breakdown.seconds[name])
    share = _share(breakdown.seconds[first] / total)
    clauses = [f"{share} {WHOLE_STEP[first].label}{_main_wait(trace, breakdown, first)}"]
    other_causes = sorted(
        (name for name in breakdown.seconds if name != first), key=lambda n: -breakdown.seconds[n]
    )
    for name in other_causes:
        fraction = breakdown.seconds[name] / total
        if fraction >= _WORTH_SAYING:
            clauses.append(f"{WHOLE_STEP[name].label} {_share(fraction)}{_main_wait(trace, breakdown, name)}")
    if first == "compute" and overlap_fraction is not None:
        clauses.append(f"{_share(overlap_fraction)} of communication is hidden")
    if first == "compute" and kernel_fraction is not None:
        peak = f"{peak_dtype}'s peak" if peak_dtype in ("fp8", "fp4") else "the peak"
        clauses.append(f"kernels reach {_share(kernel_fraction)} of {peak}")
    return f"{_BOUND[first]}: {'; '.join(clauses)}."


def overlap_doubt_sentence(framework: str, step_seconds: float, without_overlap: float | None) -> str:
    """The sentence to add where the overlap is in doubt. Empty where it makes no difference."""
    if without_overlap is None or without_overlap < step_seconds * (1 + _WORTH_SAYING):
        return ""
    return (
        f" If no communication were hidden, the step would be {format_seconds(without_overlap)}; most "
        f"published runs of {framework} over several nodes are nearer to that."
    )


def _share(fraction: float) -> str:
    """Whole percents, and tenths of a percent below 1 % and above 99 %."""
    is_extreme = 0 < fraction < 0.01 or 0.99 < fraction < 1
    return f"{fraction * 100:.1f} %" if is_extreme else f"{fraction * 100:.0f} %"


def _main_wait(trace: Trace, breakdown: Breakdown, cause: str) -> str:
    """Words for the one op, or else the one kind of op, that more than half of the waits with this cause were
    for. Empty without one.
    """
    infos, seconds = breakdown.waits.select_cause(cause)
    if not len(infos):
        return ""
    words = trace.infos.memoize(_op_words)
    cause_seconds = breakdown.seconds[cause]
    op, group_seconds = _largest_group(words.name_of_op[infos], seconds)
    if group_seconds > cause_seconds / 2:
        kind, name, phase = words.names[op]
        where = (f" of {name}" if name else "s") + (f" in {phase}" if phase else "")
        return f", mostly the {span_meaning(kind).label}{where}"
    kind_index, group_seconds = _largest_group(words.kind_of_op[infos], seconds)
    if group_seconds > cause_seconds / 2:
        return (
            f", mostly {span_meaning(words.kinds[kind_index]).label} "
            f"({_share(group_seconds / cause_seconds)} of it)"
        )
    return ""


def _largest_group(groups: Ints, seconds: Floats) -> tuple[int, float]:
    """The group with the most seconds (of equal ones the first), and its seconds."""
    sums = np.bincount(groups, seconds)
    largest = float(sums.max())
    return next(group for group in groups.tolist() if sums[group] == largest), largest


class _OpWords(NamedTuple):
    """The distinct (kind, name or "", phase) of ops and the distinct kinds, and the index of each op's."""

    names: list[tuple[str, str, str]]
    name_of_op: Ints
    kinds: list[str]
    kind_of_op: Ints


def _op_words(infos: SpanInfos) -> _OpWords:
    """The words for the ops, to be cached with the infos."""
    words = [
        (info.kind, info.module or (info.name if info.name != info.kind else ""), info.phase)
        for info in infos
    ]
    return _OpWords(*factorize(words), *factorize([info.kind for info in infos]))
