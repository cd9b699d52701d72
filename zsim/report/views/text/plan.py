"""A plan for people and programs: what a rank will do, in host issue order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.plan.ops import Collective, Group, Kernels, OffloadWork, Op, Plan, offload_kind
from zsim.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The whole plan as plain data; `after` and `host_waits` are op numbers, bytes are per call."""
    return {
        "framework": plan.framework,
        "world_size": plan.world_size,
        "groups": {name: {"size": group.size, "stride": group.stride} for name, group in plan.groups.items()},
        "resident_bytes": [
            {"device": memory.device, "category": memory.category, "bytes": memory.bytes}
            for memory in plan.resident
        ],
        "collectives": [
            {"kind": work.kind, "group": work.group, "dtype": work.dtype, "bytes": work.bytes, "count": count}
            for work, count in collective_counts(plan).items()
        ],
        "ops": [_op(number, op) for number, op in enumerate(plan.ops)],
        "memory": [
            {
                "op": change.op,
                "device": change.device,
                "category": change.category,
                "bytes": change.bytes,
                "owner": change.owner,
            }
            for change in plan.memory
        ],
        "notes": list(plan.notes),
    }


def collective_counts(plan: Plan) -> Counter[Collective]:
    """Calls of each distinct collective per rank and step, in order of the first call."""
    return Counter(op.work for op in plan.ops if isinstance(op.work, Collective))


def _op(number: int, op: Op) -> dict[str, Any]:
    row: dict[str, Any] = {
        "number": number,
        "name": op.name,
        "stream": op.stream,
        "phase": op.phase,
        "module": op.module,
        "launches": op.launches,
        "after": list(op.after),
        "host_waits": list(op.host_waits),
    }
    work = op.work
    if isinstance(work, Collective):
        row |= {"kind": work.kind, "bytes": work.bytes, "dtype": work.dtype, "group": work.group}
    elif isinstance(work, OffloadWork):
        row |= {"kind": offload_kind(work), "bytes": work.bytes}
    elif isinstance(work, Kernels):
        row |= {
            "kind": "kernels",
            "flops": sum(kernel.flops for kernel in work.kernels),
            "hbm_bytes": sum(kernel.hbm_bytes for kernel in work.kernels),
        }
    else:
        row["kind"] = "host"
    return row


def print_plan(
    plan: Plan, *, limit: int, console: Console | None = None, files: Mapping[str, Path] | None = None
) -> None:
    """The first `limit` ops (0: all) and the collectives, at 80 columns."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console(highlight=False)
    console.print(
        f"{plan.framework}: {len(plan.ops)} ops per rank and step, {plan.world_size} ranks", style="bold"
    )
    groups = ", ".join(_group_text(group) for group in plan.groups.values())
    console.print(f"groups: {groups}\n")
    table = Table(box=None, pad_edge=False, title="Collectives per rank and step", title_justify="left")
    for header, side in (
        ("calls", "right"),
        ("kind", "left"),
        ("group", "left"),
        ("tensor", "right"),
        ("dtype", "left"),
    ):
        table.add_column(header, justify="right" if side == "right" else "left")
    for work, count in collective_counts(plan).items():
        table.add_row(str(count), work.kind, work.group, format_bytes(work.bytes), work.dtype)
    console.print(table)
    shown = plan.ops if limit == 0 else plan.ops[:limit]
    ops = Table(box=None, pad_edge=False, title="\nOps in host issue order", title_justify="left")
    for header in ("#", "stream", "op", "work", "waits for"):
        ops.add_column(header, justify="right" if header == "#" else "left", overflow="fold")
    for number, op in enumerate(shown):
        waits = [str(other) for other in op.after] + [f"host {other}" for other in op.host_waits]
        ops.add_row(str(number), op.stream, op.name, _work_text(op), ", ".join(waits))
    console.print(ops)
    if len(shown) < len(plan.ops):
        console.print(f"... and {len(plan.ops) - len(shown)} more (--limit 0 lists all, --json writes them)")
    for what, path in (files or {}).items():
        console.print(f"{what}  {path}", soft_wrap=True)


def _group_text(group: Group) -> str:
    apart = "unequal distances" if group.stride is None else f"stride {group.stride}"
    return f"{group.name} {group.size} ({apart})"


def _work_text(op: Op) -> str:
    work = op.work
    if isinstance(work, Collective):
        return f"{format_bytes(work.bytes)} {work.dtype} {work.group}"
    if isinstance(work, OffloadWork):
        return f"{format_bytes(work.bytes)} {offload_kind(work)}"
    if isinstance(work, Kernels):
        flops = sum(kernel.flops for kernel in work.kernels)
        moved = format_bytes(sum(kernel.hbm_bytes for kernel in work.kernels))
        return f"{flops / 1e9:.0f} GFLOP, {moved}" if flops else moved
    return ""
