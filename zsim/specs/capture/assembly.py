"""Groups of operators of one segment -> the modules of a `ModelSpec`, with names, op specs and parameters.

# [Note: gradients that are added]
Autograd adds the gradients of a tensor that several modules read. Formulas count such additions where a
product shares its input and at the residual stream. Other additions of the same size become a module of their
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from zsim.dataclass import dataclass
from zsim.specs.capture.groups import PlaceWork
from zsim.specs.capture.kernels import kernels, traced
from zsim.specs.capture.recording import ModuleRecording, Operator, ParameterRecord
from zsim.specs.capture.works import KnownWork, Matcher
from zsim.specs.model.spec import Attention, Linear, Loss, Module, Parameter, Residual
from zsim.specs.model.traced import Traced


@dataclass
class Owners:
    """Parameters by the module that registered them. Each is handed out once."""

    by_path: dict[str, list[ParameterRecord]]
    """{path of a module: its parameters}"""
    storages: dict[int, str]  # the owner's path of each parameter's storage
    """{number of a parameter's storage: path of the module that owns it}"""
    taken: set[str] = field(default_factory=set)
    """Paths of modules whose parameters were handed out."""

    @classmethod
    def of(cls, recording: ModuleRecording) -> Owners:
        by_path: dict[str, list[ParameterRecord]] = {}
        for one in recording.parameters:
            by_path.setdefault(one.name.rpartition(".")[0], []).append(one)
        paths = {one.storage: one.name.rpartition(".")[0] for one in recording.parameters}
        return cls(by_path, paths)

    def take(self, path: str) -> tuple[Parameter, ...]:
        """The parameters of the module at `path`, or () if they were handed out before."""
        if path in self.taken:
            return ()
        self.taken.add(path)
        return tuple(_parameter(one) for one in self.by_path.get(path, ()))


def _parameter(record: ParameterRecord) -> Parameter:
    name = record.name.rpartition(".")[2]
    return Parameter(name, record.shape, trainable=record.is_trainable)


class Assembly:
    """Makes the modules of segments.

    In all methods `root` is the path of the segment's block, or "" outside of the blocks.
    """

    def __init__(self, recording: ModuleRecording, matcher: Matcher) -> None:
        self.recording, self.matcher = recording, matcher
        self.owners = Owners.of(recording)
        self._called = {place.path for place in recording.places}

    def modules(self, groups: Sequence[PlaceWork], root: str) -> tuple[Module, ...]:
        """The modules of one segment in the order of forward."""
        names: Counter[str] = Counter()
        made: list[Module] = []
        knowns = self._known(groups)
        rest = _uncovered(groups, knowns)
        for group, known in zip(groups, knowns, strict=True):
            made += [self._without_work(path, root) for path in self._borrowed(group)]
            work, shares = (known.work, known.shares_input) if known else (self._traced(group, rest), False)
            parameters = self.owners.take(group.path)
            is_whole = not self.recording.modules[group.path].children and names[group.path] == 0
            name = group.path if is_whole else _function_name(group, work)
            name = _unique(_relative(name, root), names)
            names[group.path] += 1
            owner = None if is_whole else _relative(group.path, root)
            made.append(Module(name, work, parameters, shares, owner=owner))
        sums = [
            one for group, known in zip(groups, knowns, strict=True) if known for one in rest[group.place]
        ]
        if sums:
            work = Traced(self.recording.samples, backward=kernels(self.recording, sums))
            made.insert(0, Module(_unique("sum of gradients", names), work))
        return tuple(made)

    def _known(self, groups: Sequence[PlaceWork]) -> list[KnownWork | None]:
        """The formula of each group, None where it has none. Frozen weights have none."""
        kept: set[int] = set()
        found: list[KnownWork | None] = []
        for group in groups:
            known = None
            if _is_trained(self.owners, group.path):
                is_leaf = not self.recording.modules[group.path].children
                known = self.matcher.known(group, kept, is_leaf=is_leaf)
            found.append(known)
            kept.update(group.saved)
        return found

    def _traced(self, group: PlaceWork, rest: Mapping[int, Sequence[Operator]]) -> Traced:
        return traced(self.recording, group, [*group.own_backward, *rest[group.place]])

    def left(self, root: str, blocks: Iterable[str]) -> tuple[Module, ...]:
        """Modules of the parameters below `root` that no operator has read, outside of `blocks`."""
        inside = [path + "." for path in blocks if path != root]
        found = []
        for path in self.owners.by_path:
            is_here = not root or path == root or path.startswith(root + ".")
            is_inner = any((path + ".").startswith(prefix) for prefix in inside)
            if is_here and not is_inner and path not in self.owners.taken:
                found.append(self._without_work(path, root))
        return tuple(found)

    def _borrowed(self, group: PlaceWork) -> list[str]:
        """Modules whose parameters a group reads without calling them."""
        paths = [
            self.owners.storages[use.storage]
            for operator in group.forward
            for use in operator.reads
            if use.storage in self.owners.storages
        ]
        return [
            path
            for path in dict.fromkeys(paths)
            if path != group.path and path not in self._called and path not in self.owners.taken
        ]

    def _without_work(self, path: str, root: str) -> Module:
        name = _relative(path, root) or "parameters"
        owner = None if name == _relative(path, root) else ""
        return Module(name, Traced(self.recording.samples), self.owners.take(path), owner=owner)


def _is_trained(owners: Owners, path: str) -> bool:
    return all(one.is_trainable for one in owners.by_path.get(path, ()))


def _relative(path: str, root: str) -> str:
    if not root:
        return path
    return "" if path == root else path.removeprefix(root + ".")


def _function_name(group: PlaceWork, work: object) -> str:
    """The name of a function between modules, by what it computes."""
    if isinstance(work, Attention):
        what = "core"
    elif isinstance(work, Residual):
        what = "residual"
    elif isinstance(work, Loss):
        what = "loss"
    elif isinstance(work, Linear):
        what = "product"
    else:
        operators = group.forward or group.backward
        what = operators[0].name.strip("_").replace(" ", "_")
    return f"{group.path}.{what}" if group.path else what


def _unique(name: str, names: Counter[str]) -> str:
    names["= " + name] += 1
    count = names["= " + name]
    return name if count == 1 else f"{name}_{count}"


def _uncovered(groups: Sequence[PlaceWork], knowns: Sequence[KnownWork | None]) -> dict[int, list[Operator]]:
    """{site: the additions of gradients that no formula counts}.

    Additions at groups that have a formula are counted first. See [Note: gradients that are added].
    """
    left = Counter(known.covers for known in knowns if known)
    rest: dict[int, list[Operator]] = {group.place: [] for group in groups}
    order = sorted(zip(groups, knowns, strict=True), key=lambda pair: pair[1] is None)
    for group, _ in order:
        for operator in group.sums:
            numel = max((use.numel for use in operator.writes), default=0)
            if left[numel] > 0:
                left[numel] -= 1
            else:
                rest[group.place].append(operator)
    return rest
