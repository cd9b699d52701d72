"""The modules that FSDP1 wraps, and so the parameters that share one flat parameter.

Wrapped modules nest: a flat parameter holds the parameters below its module that are not below a wrapped
module inside it; the root holds the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zsim.errors import InputError, did_you_mean
from zsim.plan.workload.workload import ModuleCall, Workload
from zsim.reading import whole_number

BLOCK_WRAPPINGS = ("huggingface", "torchtitan-0.1", "torchtitan")
WRAPPINGS = (*BLOCK_WRAPPINGS, "none", "size:N")


@dataclass(frozen=True)
class FlatUnit:
    """One FSDP1 instance.

    `path`: the wrapped module's name ("" is the root); it runs from module call `first` to `last`; `owners`:
    the calls whose parameters it holds. The flat parameter is sharded over `shard_size` ranks (1 under
    NO_SHARD) and padded to a multiple of that.
    """

    path: str
    first: str
    last: str
    owners: tuple[str, ...]
    numel: int
    shard_size: int

    @property
    def name(self) -> str:
        return self.path or "root"

    @property
    def is_root(self) -> bool:
        return not self.path

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.shard_size)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.shard_size


def make_flat_units(workload: Workload, wrapping: str, shard_size: int) -> list[FlatUnit]:
    """The FSDP1 instances that hold parameters, in the order in which forward enters them: outer before
    inner.

    "huggingface" and torchtitan's: each block; "none": the root alone; "size:N": torch's
    `size_based_auto_wrap_policy` with `min_num_params` N.
    """
    calls = [call for segment in workload.segments for call in segment.calls]
    paths = _wrapped_paths(workload, wrapping, calls)
    owners: dict[str, list[ModuleCall]] = {path: [] for path in ("", *paths)}
    spans: dict[str, list[str]] = {path: [] for path in owners}
    home: dict[str, str] = {}
    for call in calls:
        inside = [path for path in _ancestors(call.name) if path in spans]
        for path in ("", *inside):
            spans[path].append(call.name)
        home[call.name] = inside[-1] if inside else ""
    tied = next((call for call in calls if call.borrowed_numel), None)
    for call in calls:
        if call.numel:
            # A tied weight is in one unit only: the root, if embedding and head are in different units.
            is_shared = tied is not None and call.numel == tied.borrowed_numel
            is_apart = tied is not None and home[call.name] != home[tied.name]
            owners["" if is_shared and is_apart else home[call.name]].append(call)
    order = {call.name: position for position, call in enumerate(calls)}
    units = [
        FlatUnit(
            path, spans[path][0], spans[path][-1], tuple(call.name for call in held),
            sum(call.numel for call in held), shard_size,
        )
        for path, held in owners.items()
        if held
    ]  # fmt: skip
    return sorted(units, key=lambda unit: (order[unit.first], -order[unit.last], len(unit.path)))


def _wrapped_paths(workload: Workload, wrapping: str, calls: list[ModuleCall]) -> list[str]:
    if wrapping == "none":
        return []
    if wrapping in BLOCK_WRAPPINGS:
        return [segment.name for segment in workload.segments if segment.kind == "block"]
    kind, _, threshold = wrapping.partition(":")
    least = whole_number(threshold)
    if kind == "size" and least:
        numels = {call.name: call.numel for call in calls if call.numel}
        return size_based_paths(numels, least, module_lists=workload.model.block_lists)
    raise InputError(
        f"strategy.wrapping: unknown preset '{wrapping}'{did_you_mean(wrapping, WRAPPINGS)}; "
        f"fsdp1 knows {', '.join(WRAPPINGS)} (N elements)"
    )


def size_based_paths(
    numels: dict[str, int], min_num_params: int, *, module_lists: Iterable[str] = ()
) -> list[str]:
    """The modules that `size_based_auto_wrap_policy` wraps, children before parents, without the root.

    `numels`: {leaf module: its elements}; `module_lists`: the nn.ModuleLists, which are never wrapped
    themselves. Depth first: a module that has at least `min_num_params` elements left after its children were
    wrapped is wrapped with the rest. Source: `_recursive_wrap` in
    torch/distributed/fsdp/wrap.py.
    """
    total: dict[str, int] = {}
    children: dict[str, dict[str, None]] = {}
    for leaf, numel in numels.items():
        parent = ""
        total[""] = total.get("", 0) + numel
        for path in _ancestors(leaf):
            total[path] = total.get(path, 0) + numel
            children.setdefault(parent, {})[path] = None
            parent = path
    never_wrapped = {"", *module_lists}
    wrapped: list[str] = []

    def wrap(path: str) -> int:
        """Wrap modules below and at `path`; returns the number of elements wrapped."""
        if total[path] < min_num_params:
            return 0
        done = sum(wrap(child) for child in children.get(path, ()))
        if path in never_wrapped or total[path] - done < min_num_params:
            return done
        wrapped.append(path)
        return total[path]

    if total:
        wrap("")
    return wrapped


def _ancestors(name: str) -> list[str]:
    """`a`, `a.b`, `a.b.c` for "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
