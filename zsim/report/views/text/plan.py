"""A plan as text and as plain data: the ops of a rank, in host issue order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
from zsim.plan.ops import (
    Collective,
    Group,
    Kernels,
    OffloadWork,
    Op,
    Plan,
    PointToPoint,
    Program,
    offload_kind,
)
from zsim.report.rank_map import ranges
from zsim.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console


def plan_to_dict(plan: Plan, rank: int | None = None) -> dict[str, Any]:
    """The whole plan as plain data, or the program of one rank with the communicators that it is in.

    `after` and `host_waits` are op numbers, and bytes are per call. Raises InputError for a rank that there
    is not.
    """
    return {
        "framework": plan.framework,
        "world_size": plan.world_size,
        "groups": {name: _group(group) for name, group in plan.groups.items()},
        **(_all_programs(plan) if rank is None else _program_on(plan, rank)),
        "notes": list(plan.notes),
    }


def _all_programs(plan: Plan) -> dict[str, Any]:
    if len(plan.programs) == 1:
        return _program(plan.program)
    return {
        "programs": [{"name": program.name, **_program(program)} for program in plan.programs],
        "program_of": plan.program_of.tolist(),
    }


def _program_on(plan: Plan, rank: int) -> dict[str, Any]:
    program = _program_of_rank(plan, rank)
    return {
        "rank": rank,
        "name": program.name,
        "communicators": _communicators(plan, rank),
        **_program(program),
    }


def _program_of_rank(plan: Plan, rank: int) -> Program:
    if not 0 <= rank < plan.world_size:
        raise InputError(f"--rank: found {rank}, expected 0 to {plan.world_size - 1}")
    return plan.program_on(rank)


def _communicators(plan: Plan, rank: int) -> dict[str, list[int]]:
    """The ranks of each communicator that `rank` is in, by group."""
    groups = plan.groups.items()
    return {name: group.ranks_of(rank) for name, group in groups if (group.members == rank).any()}


def _group(group: Group) -> dict[str, Any]:
    row: dict[str, Any] = {"size": group.size, "stride": group.stride}
    return row if group.stride is not None else row | {"members": group.members.tolist()}


def _program(program: Program) -> dict[str, Any]:
    return {
        "resident_bytes": [
            {"device": memory.device, "category": memory.category, "bytes": memory.bytes}
            for memory in program.resident
        ],
        "collectives": [
            {"kind": work.kind, "group": work.group, "dtype": work.dtype, "bytes": work.bytes, "count": count}
            | _split_sizes(work)
            for work, count in collective_counts(program).items()
        ],
        **(
            {"actions": [{"op": first, "action": str(action)} for first, action in program.actions]}
            if program.name
            else {}
        ),
        "ops": [_op(number, op) for number, op in enumerate(program.ops)],
        "memory": [
            {name: getattr(change, name) for name in ("op", "device", "category", "bytes", "owner")}
            for change in program.memory
        ],
    }


def _split_sizes(work: Collective | PointToPoint) -> dict[str, Any]:
    """The table of an all-to-all of unequal parts. Empty for other calls."""
    return (
        {"parts": work.split_sizes} if isinstance(work, Collective) and work.split_sizes is not None else {}
    )


def collective_counts(program: Program) -> Counter[Collective | PointToPoint]:
    """Calls of each distinct collective or batch of messages in a step, in the order of the first calls."""
    return Counter(op.work for op in program.ops if isinstance(op.work, Collective | PointToPoint))


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
    if isinstance(work, Collective | PointToPoint):
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
    plan: Plan,
    *,
    limit: int,
    rank: int | None = None,
    console: Console | None = None,
    files: Mapping[str, Path] | None = None,
) -> None:
    """Print the collectives and the first `limit` actions and ops (0: all) of every program, or of that of
    one rank, at 80 columns. Raises InputError for a rank that there is not."""
    from rich.console import Console

    console = console or Console(highlight=False)
    programs = plan.programs if rank is None else (_program_of_rank(plan, rank),)
    num_ops = ", ".join(f"{len(program.ops)}" for program in programs)
    console.print(f"{plan.framework}: {num_ops} ops per rank and step, {plan.world_size} ranks", style="bold")
    groups = ", ".join(_group_text(group) for group in plan.groups.values())
    console.print(f"groups: {groups}\n")
    if rank is not None:
        memberships = (f"{name} {ranges(members)}" for name, members in _communicators(plan, rank).items())
        console.print(f"rank {rank} is in {'; '.join(memberships) or 'no group'}\n")
    for number, program in enumerate(plan.programs):
        if program not in programs:
            continue
        if program.name:
            ranks = int((plan.program_of == number).sum())
            console.print(f"{program.name} ({ranks} rank{'' if ranks == 1 else 's'})", style="bold")
            _print_actions(program, limit, console)
        _print_program(program, limit, console)
    for description, path in (files or {}).items():
        console.print(f"{description}  {path}", soft_wrap=True)


def _print_actions(program: Program, limit: int, console: Console) -> None:
    """The order of forwards and backwards, as torch writes actions: "0F0 0F1 0B0"."""
    listed = program.actions if limit == 0 else program.actions[:limit]
    num_unlisted = len(program.actions) - len(listed)
    more = f" and {num_unlisted} more" if num_unlisted else ""
    if listed:
        console.print(f"{' '.join(str(action) for _, action in listed)}{more}\n")


def _print_program(program: Program, limit: int, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="Collectives per rank and step", title_justify="left")
    for header in ("calls", "kind", "group", "tensor", "dtype"):
        table.add_column(header, justify="right" if header in ("calls", "tensor") else "left")
    for work, count in collective_counts(program).items():
        table.add_row(str(count), work.kind, work.group, format_bytes(work.bytes), work.dtype)
    console.print(table)
    listed = program.ops if limit == 0 else program.ops[:limit]
    ops = Table(box=None, pad_edge=False, title="\nOps in host issue order", title_justify="left")
    for header in ("#", "stream", "op", "work", "waits for"):
        ops.add_column(header, justify="right" if header == "#" else "left", overflow="fold")
    for number, op in enumerate(listed):
        waits = [str(dependency) for dependency in op.after] + [
            f"host {dependency}" for dependency in op.host_waits
        ]
        ops.add_row(str(number), op.stream, op.name, _work_text(op), ", ".join(waits))
    console.print(ops)
    if len(listed) < len(program.ops):
        num_unlisted = len(program.ops) - len(listed)
        console.print(f"... and {num_unlisted} more (--limit 0 lists all, --json writes them)")


def _group_text(group: Group) -> str:
    spacing = "unequal distances" if group.stride is None else f"stride {group.stride}"
    return f"{group.name} {group.size} ({spacing})"


def _work_text(op: Op) -> str:
    work = op.work
    if isinstance(work, Collective | PointToPoint):
        return f"{format_bytes(work.bytes)} {work.dtype} {work.group}"
    if isinstance(work, OffloadWork):
        return f"{format_bytes(work.bytes)} {offload_kind(work)}"
    if isinstance(work, Kernels):
        flops = sum(kernel.flops for kernel in work.kernels)
        moved = format_bytes(sum(kernel.hbm_bytes for kernel in work.kernels))
        return f"{flops / 1e9:.0f} GFLOP, {moved}" if flops else moved
    return ""
