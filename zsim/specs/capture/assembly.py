"""Groups of operators of one segment -> the modules of a `ModelSpec`, with names, op specs and parameters.

# [Note: gradients that are added]
Autograd adds the gradients of a tensor that several modules read. Formulas count such additions where a
product shares its input and at the residual stream. Other additions of the same size become a module of their
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zsim.operations.operation import Operation, Role
from zsim.operations.traced import TracedModule
from zsim.specs.capture.formula_matcher import FormulaMatch, FormulaMatcher
from zsim.specs.capture.groups import OperatorGroup
from zsim.specs.capture.kernels import kernels, traced
from zsim.specs.capture.recording import ModuleRecording, Operator, ParameterRecord
from zsim.specs.model.spec import Module, Parameter


@dataclass
class ParameterOwners:
    """Parameters by the module that registered them. Each is handed out once."""

    parameters_per_path: dict[str, list[ParameterRecord]]
    """{path of a module: its parameters}"""
    path_per_storage: dict[int, str]  # the owner's path of each parameter's storage
    """{number of a parameter's storage: path of the module that owns it}"""
    assigned_paths: set[str] = field(default_factory=set)
    """Paths of modules whose parameters were handed out."""

    @classmethod
    def from_recording(cls, recording: ModuleRecording) -> ParameterOwners:
        parameters_per_path: dict[str, list[ParameterRecord]] = {}
        for record in recording.parameters:
            parameters_per_path.setdefault(record.name.rpartition(".")[0], []).append(record)
        path_per_storage = {record.storage: record.name.rpartition(".")[0] for record in recording.parameters}
        return cls(parameters_per_path, path_per_storage)

    def take(self, path: str) -> tuple[Parameter, ...]:
        """The parameters of the module at `path`, or () if they were handed out before."""
        if path in self.assigned_paths:
            return ()
        self.assigned_paths.add(path)
        return tuple(_parameter(record) for record in self.parameters_per_path.get(path, ()))


def _parameter(record: ParameterRecord) -> Parameter:
    name = record.name.rpartition(".")[2]
    return Parameter(name, record.shape, trainable=record.is_trainable)


class ModuleAssembler:
    """Makes the modules of segments.

    In all methods `root` is the path of the segment's block, or "" outside of the blocks.
    """

    def __init__(self, recording: ModuleRecording, matcher: FormulaMatcher) -> None:
        self.recording, self.matcher = recording, matcher
        self.owners = ParameterOwners.from_recording(recording)
        self._called_paths = {site.path for site in recording.sites}

    def make_modules(self, groups: Sequence[OperatorGroup], root: str) -> tuple[Module, ...]:
        """The modules of one segment in the order of forward."""
        names: Counter[str] = Counter()
        modules: list[Module] = []
        formulas = self._match_formulas(groups)
        extra_sums = _uncounted_sums(groups, formulas)
        for group, formula in zip(groups, formulas, strict=True):
            modules += [self._make_idle_module(path, root) for path in self._borrowed(group)]
            op_spec, shares = (
                (formula.op_spec, formula.shares_input)
                if formula
                else (self._traced(group, extra_sums), False)
            )
            parameters = self.owners.take(group.path)
            is_whole_module = not self.recording.modules[group.path].children and names[group.path] == 0
            name = group.path if is_whole_module else _function_name(group, op_spec)
            name = _unique(_relative(name, root), names)
            names[group.path] += 1
            owner = None if is_whole_module else _relative(group.path, root)
            modules.append(Module(name, op_spec, parameters, shares, parameter_owner=owner))
        sums = [
            operator
            for group, formula in zip(groups, formulas, strict=True)
            if formula
            for operator in extra_sums[group.site]
        ]
        if sums:
            op_spec = TracedModule(self.recording.samples, backward=kernels(self.recording, sums))
            modules.insert(0, Module(_unique("sum of gradients", names), op_spec))
        return tuple(modules)

    def _match_formulas(self, groups: Sequence[OperatorGroup]) -> list[FormulaMatch | None]:
        """The formula of each group, None where it has none. Frozen weights have none."""
        saved: set[int] = set()
        formulas: list[FormulaMatch | None] = []
        for group in groups:
            formula = None
            if _is_trained(self.owners, group.path):
                is_leaf = not self.recording.modules[group.path].children
                formula = self.matcher.match(group, saved, is_leaf=is_leaf)
            formulas.append(formula)
            saved.update(group.saved)
        return formulas

    def _traced(self, group: OperatorGroup, extra_sums: Mapping[int, Sequence[Operator]]) -> TracedModule:
        return traced(self.recording, group, [*group.module_backward, *extra_sums[group.site]])

    def unused_modules(self, root: str, blocks: Iterable[str]) -> tuple[Module, ...]:
        """Modules of the parameters below `root` that no operator has read, outside of `blocks`."""
        block_prefixes = [path + "." for path in blocks if path != root]
        modules = []
        for path in self.owners.parameters_per_path:
            is_here = not root or path == root or path.startswith(root + ".")
            is_inner = any((path + ".").startswith(prefix) for prefix in block_prefixes)
            if is_here and not is_inner and path not in self.owners.assigned_paths:
                modules.append(self._make_idle_module(path, root))
        return tuple(modules)

    def _borrowed(self, group: OperatorGroup) -> list[str]:
        """Modules whose parameters a group reads without calling them."""
        paths = [
            self.owners.path_per_storage[use.storage]
            for operator in group.forward
            for use in operator.reads
            if use.storage in self.owners.path_per_storage
        ]
        return [
            path
            for path in dict.fromkeys(paths)
            if path != group.path
            and path not in self._called_paths
            and path not in self.owners.assigned_paths
        ]

    def _make_idle_module(self, path: str, root: str) -> Module:
        name = _relative(path, root) or "parameters"
        owner = None if name == _relative(path, root) else ""
        return Module(
            name, TracedModule(self.recording.samples), self.owners.take(path), parameter_owner=owner
        )


def _is_trained(owners: ParameterOwners, path: str) -> bool:
    return all(parameter.is_trainable for parameter in owners.parameters_per_path.get(path, ()))


def _relative(path: str, root: str) -> str:
    if not root:
        return path
    return "" if path == root else path.removeprefix(root + ".")


_LABELS = {Role.MIXER: "core", Role.RESIDUAL: "residual", Role.LOSS: "loss", Role.PRODUCT: "product"}


def _function_name(group: OperatorGroup, op_spec: Operation) -> str:
    """The name of a function between modules, by what it computes."""
    label = _LABELS.get(op_spec.role)
    if label is None:
        operators = group.forward or group.backward
        label = operators[0].name.strip("_").replace(" ", "_")
    return f"{group.path}.{label}" if group.path else label


def _unique(name: str, names: Counter[str]) -> str:
    names["= " + name] += 1
    count = names["= " + name]
    return name if count == 1 else f"{name}_{count}"


def _uncounted_sums(
    groups: Sequence[OperatorGroup], formulas: Sequence[FormulaMatch | None]
) -> dict[int, list[Operator]]:
    """{site: the additions of gradients that no formula counts}.

    Additions at groups that have a formula are counted first. See [Note: gradients that are added].
    """
    remaining_sums = Counter(formula.summed_numel for formula in formulas if formula)
    extra_sums: dict[int, list[Operator]] = {group.site: [] for group in groups}
    order = sorted(zip(groups, formulas, strict=True), key=lambda pair: pair[1] is None)
    for group, _ in order:
        for operator in group.gradient_sums:
            numel = max((use.numel for use in operator.writes), default=0)
            if remaining_sums[numel] > 0:
                remaining_sums[numel] -= 1
            else:
                extra_sums[group.site].append(operator)
    return extra_sums
