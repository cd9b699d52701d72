"""One sentence on what limits the step."""

from __future__ import annotations

from zsim.report.breakdown import Breakdown
from zsim.report.meanings import BREAKDOWN, span_meaning
from zsim.trace.spans import Trace

_BOUND = {
    "compute": "Compute-bound",
    "exposed_communication": "Communication-bound",
    "offload_stall": "Offload-bound",
    "optimizer": "Optimizer-bound",
    "host_bound": "Host-bound",
}
_WORTH_SAYING = 0.005  # of the step


def limiting_sentence(trace: Trace, breakdown: Breakdown) -> str:
    """E.g. "Compute-bound: 84 % compute; exposed communication 11 %, mostly waiting for all-gather ..."."""
    total = sum(breakdown.seconds.values())
    if total <= 0:
        return "An empty step."
    first = max(breakdown.seconds, key=lambda name: breakdown.seconds[name])
    parts = [
        f"{breakdown.seconds[first] / total:.0%} {BREAKDOWN[first].label}{_mostly(trace, breakdown, first)}"
    ]
    rest = sorted((name for name in breakdown.seconds if name != first), key=lambda n: -breakdown.seconds[n])
    for name in rest:
        share = breakdown.seconds[name] / total
        if share >= _WORTH_SAYING:
            parts.append(f"{BREAKDOWN[name].label} {share:.0%}{_mostly(trace, breakdown, name)}")
    text = f"{_BOUND[first]}: {'; '.join(parts)}."
    return text.replace("%", " %")


def _mostly(trace: Trace, breakdown: Breakdown, cause: str) -> str:
    """What most of the waits with this cause were for: one op, or else one kind."""
    by_kind: dict[str, float] = {}
    by_op: dict[tuple[str, str, str], float] = {}
    for wait in breakdown.waits:
        if wait.cause == cause and wait.info is not None:
            info = trace.infos[wait.info]
            op = (info.kind, info.module or info.name, info.phase)
            by_kind[info.kind] = by_kind.get(info.kind, 0.0) + wait.seconds
            by_op[op] = by_op.get(op, 0.0) + wait.seconds
    if not by_kind:
        return ""
    kind, name, phase = max(by_op, key=lambda key: by_op[key])
    of_cause = breakdown.seconds[cause]
    if by_op[kind, name, phase] > of_cause / 2:
        return f", mostly the {span_meaning(kind).label} of {name}" + (f" in {phase}" if phase else "")
    kind = max(by_kind, key=lambda key: by_kind[key])
    if by_kind[kind] > of_cause / 2:
        return f", mostly {span_meaning(kind).label} ({by_kind[kind] / of_cause:.0%} of it)"
    return ""
