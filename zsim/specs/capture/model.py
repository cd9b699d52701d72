"""A recording -> a ModelSpec. Its sites are cut into segments: before, in, between and after the blocks, and
groups of operators of a segment are its modules, with names, op specs and parameters.

# [Note: gradients that are added]
Autograd adds the gradients of a tensor that several modules read. Formulas count such additions where a
product shares its input and at the residual stream. Other additions of the same size become a module of their
own.

# [Note: the modules that are blocks]
They are those that frameworks wrap individually. If a module names the classes itself (`_no_split_modules`,
transformers' and accelerate's), these are taken. Of blocks inside one another the innermost count. Otherwise
blocks are children of the same class in a ModuleList or a Sequential, if they have children of their own and
are not plain containers. If a child (a stage of a vision model) keeps nearly all its parameters in lists of
its own, the blocks are looked for inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from zsim.errors import InputError
from zsim.operations.operation import Operation, Role, operations_of
from zsim.operations.traced import CaptureInfo, Extent, TracedModule
from zsim.specs.capture.formula_matcher import FormulaMatch, FormulaMatcher
from zsim.specs.capture.groups import OperatorGroup, groups_of, kernels, traced
from zsim.specs.capture.recording import ModuleRecord, ModuleRecording, Operator, ParameterRecord
from zsim.specs.model.spec import Block, Embedding, Linear, Loss, ModelSpec, Module, Norm, Parameter


def model_of(recording: ModuleRecording, name: str, source: str) -> ModelSpec:
    """The model that was recorded. Raises InputError for a block that runs twice."""
    length = positions_of(recording)
    matcher = FormulaMatcher(recording, recording.samples * length)
    paths = block_paths(recording)
    segments, segment_numbers = _segments_of(recording, paths, source)
    groups = groups_of(recording, segment_numbers)
    assembler = ModuleAssembler(recording, matcher)
    segment_modules: list[tuple[CapturedSegment, tuple[Module, ...]]] = []
    for number, segment in enumerate(segments):
        segment_groups = [group for group in groups if segment_numbers[group.site] == number]
        modules = assembler.make_modules(segment_groups, segment.path)
        if segment.path:
            modules = (*modules, *assembler.unused_modules(segment.path, ()))
        if modules:
            segment_modules.append((segment, modules))
    unused = assembler.unused_modules("", paths)
    before, middle, after = _split(segment_modules)
    after = (*after, *unused)
    blocks, names = _blocks(recording, middle)
    registration = tuple(parameter.name for parameter in recording.parameters)
    all_modules = [*before, *(module for block in blocks for module in block.modules), *after]
    return ModelSpec(
        name=name,
        family=recording.modules[""].kind,
        hidden_size=recording.hidden_size or _hidden_size(recording, all_modules),
        vocab_size=recording.vocab_size or _vocabulary(all_modules),
        max_positions=length,
        before=before,
        blocks=blocks,
        after=after,
        block_prefix=next((path.rpartition(".")[0] for path in names if path), ""),
        is_tied=_is_tied(before, after),
        source=source,
        block_names=names,
        registration=registration,
        captured=_capture_summary(recording, length, unused),
    )


def positions_of(recording: ModuleRecording) -> int:
    """Positions of a sample: the length of token ids, if the example has them.

    Otherwise it is the number of rows per sample of the products that do most of the FLOPs, if they are
    Linear layers. For convolutions it is 1.
    """
    if recording.positions is not None:
        return recording.positions
    flops: Counter[int] = Counter()
    for operator in recording.forward:
        for product in operator.products:
            rows = 1
            if operator.name in ("mm", "addmm") and product.scaled == 0:
                rows = max(1, product.shape[0] // recording.samples)
            if not product.kind.startswith("attention"):
                flops[rows] += round(product.flops)
    return flops.most_common(1)[0][0] if flops else 1


@dataclass(frozen=True, slots=True)
class CapturedSegment:
    """Consecutive sites of one block, or outside of all blocks."""

    path: str
    """The block, "" outside of all."""
    call: int
    """The block's call."""


SegmentModules = Sequence[tuple[CapturedSegment, tuple[Module, ...]]]


def _split(segment_modules: SegmentModules) -> tuple[tuple[Module, ...], SegmentModules, tuple[Module, ...]]:
    """Modules before the first block, blocks and what is between them, modules after the last."""
    block_indices = [number for number, (segment, _) in enumerate(segment_modules) if segment.path]
    if not block_indices:
        return tuple(module for _, modules in segment_modules for module in modules), (), ()
    first, last = block_indices[0], block_indices[-1]
    before = tuple(module for _, modules in segment_modules[:first] for module in modules)
    after = tuple(module for _, modules in segment_modules[last + 1 :] for module in modules)
    return before, segment_modules[first : last + 1], after


def _blocks(recording: ModuleRecording, middle: SegmentModules) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """The blocks and their names. Equal blocks are the same object."""
    unique_blocks: dict[Block, Block] = {}
    blocks = []
    for segment, modules in middle:
        call = recording.calls[segment.call] if segment.path else None
        kind = recording.modules[segment.path].kind if call else "between"
        input_extent = _input_extent(recording, call.input_bytes) if call else None
        order = _registration_order(recording, segment.path, modules) if call else None
        block = Block(kind, modules, order, input_extent=input_extent, is_wrapped=call is not None)
        blocks.append(unique_blocks.setdefault(block, block))
    return tuple(blocks), tuple(segment.path for segment, _ in middle)


def _input_extent(recording: ModuleRecording, input_bytes: int) -> Extent:
    """The inputs of a block, in the type that the module computes in."""
    low = next((storage.item_bytes for storage in recording.storages if storage.is_low), 2)
    return Extent(input_bytes // low)


def _registration_order(recording: ModuleRecording, path: str, modules: Sequence[Module]) -> tuple[str, ...]:
    """Names of a block's modules with parameters in the order of `named_parameters()`."""
    order = {record.name: number for number, record in enumerate(recording.parameters)}
    owners = [module for module in modules if module.parameters]
    first_index = {
        module.name: min(order[f"{path}.{module.path_of(parameter)}"] for parameter in module.parameters)
        for module in owners
    }
    return tuple(sorted(first_index, key=lambda name: first_index[name]))


def _is_tied(before: Sequence[Module], after: Sequence[Module]) -> bool:
    """Whether a product after the blocks uses the weight of an embedding before them."""
    tables = [module.numel for module in before if module.role is Role.EMBEDDING]
    return any(
        isinstance(module.op_spec, Linear)
        and not any(parameter.name == "weight" for parameter in module.parameters)
        and module.op_spec.in_features * module.op_spec.out_features in tables
        for module in after
    )


def _hidden_size(recording: ModuleRecording, modules: Sequence[Module]) -> int:
    """The width of most norms, else the input width of most products, else the output width of most
    weights.
    """
    widths = Counter(norm.width for norm in operations_of(modules, Norm))
    inputs = Counter(product.in_features for product in operations_of(modules, Linear))
    rows = Counter(parameter.shape[0] for parameter in recording.parameters if len(parameter.shape) > 1)
    is_sequence = positions_of(recording) > 1
    counts = (widths or inputs or rows) if is_sequence else rows or widths
    return counts.most_common(1)[0][0] if counts else 1


def _vocabulary(modules: Sequence[Module]) -> int:
    losses = [loss.vocab_size for loss in operations_of(modules, Loss)]
    tables = [table.rows for table in operations_of(modules, Embedding)]
    return max([*losses, *tables], default=1)


def _capture_summary(recording: ModuleRecording, length: int, unused: Sequence[Module]) -> CaptureInfo:
    unpriced = _unpriced_operators(recording)
    has_convolutions = any("convolution" in operator.name for operator in recording.forward)
    return CaptureInfo(
        recording.samples, length, unpriced, bool(unpriced) or has_convolutions, _notes(recording, unused)
    )


def _unpriced_operators(recording: ModuleRecording) -> tuple[str, ...]:
    names = Counter(
        operator.name for operator in (*recording.forward, *recording.backward) if not operator.is_priced
    )
    return tuple(sorted(names))


def _notes(recording: ModuleRecording, unused: Sequence[Module]) -> tuple[str, ...]:
    """Sentences of the report about the capture."""
    notes = []
    if not recording.has_loss:
        notes.append(
            "the module returns no scalar, so no loss is counted: backward begins at its outputs; a forward "
            "that returns the loss has it counted"
        )
    if any("convolution" in operator.name for operator in recording.forward):
        notes.append("convolutions are priced as the products that they are (implicit GEMM), uncalibrated")
    if recording.assumes_full:
        notes.append(
            "forward asks whether all elements of a tensor fulfil a condition, as of a padding mask or a "
            "check: taken as true, samples without padding and not packed"
        )
    names = [module.name for module in unused if module.parameters]
    if names:
        examples = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        notes.append(
            f"{len(names)} modules have parameters that forward does not use ({examples}); they are sharded "
            "and updated like the others"
        )
    return tuple(notes)


def _segments_of(
    recording: ModuleRecording, blocks: list[str], where: str
) -> tuple[list[CapturedSegment], dict[int, int]]:
    """The segments in the order of forward, and the number of each site's segment.

    Raises InputError for a block that runs more than once.
    """
    block_paths = set(blocks)
    segments: list[CapturedSegment] = []
    segment_numbers: dict[int, int] = {}
    call_per_path: dict[str, int] = {}
    for number, site in enumerate(recording.sites):
        path, call = _block_of(recording, site.call, block_paths)
        if not segments or (segments[-1].path, segments[-1].call) != (path, call):
            if path and call_per_path.setdefault(path, call) != call:
                raise InputError(
                    f"{where}: block '{path}' runs more than once in a forward, which zsim does not "
                    "simulate; expected blocks that run once each"
                )
            segments.append(CapturedSegment(path, call))
        segment_numbers[number] = len(segments) - 1
    return segments, segment_numbers


def _block_of(recording: ModuleRecording, call: int, block_paths: set[str]) -> tuple[str, int]:
    """(the block around a call, that block's call), or ("", -1) outside of all blocks."""
    while call >= 0:
        if recording.calls[call].path in block_paths:
            return recording.calls[call].path, call
        call = recording.calls[call].parent
    return "", -1


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


# The part of a child's parameters from which on the lists in it are the ones that repeat.
_MIN_FRACTION = 0.75
_CONTAINERS = {"Sequential", "ModuleList", "ModuleDict"}


def block_paths(recording: ModuleRecording) -> list[str]:
    """Paths of the blocks in the order of the module tree, none inside another."""
    named_blocks = _named_blocks(recording)
    if named_blocks:
        return named_blocks
    numels = _numels(recording)
    paths: list[str] = []
    _search(recording.modules, "", numels, paths)
    return paths


def _named_blocks(recording: ModuleRecording) -> list[str]:
    class_names = {kind for module in recording.modules.values() for kind in module.no_split}
    called_paths = {call.path for call in recording.calls}
    paths = [
        path
        for path, module in recording.modules.items()
        if module.kind in class_names and path in called_paths and path
    ]
    return [path for path in paths if not any(inner_path.startswith(path + ".") for inner_path in paths)]


def _search(modules: dict[str, ModuleRecord], path: str, numels: dict[str, int], paths: list[str]) -> None:
    """Adds the blocks below `path`."""
    for child in modules[path].children:
        repeated = _repeated(modules, modules[path]) if modules[path].is_list else set()
        if child not in repeated:
            _search(modules, child, numels, paths)
            continue
        inner_blocks: list[str] = []
        _search(modules, child, numels, inner_blocks)
        if inner_blocks and sum(numels[block] for block in inner_blocks) >= _MIN_FRACTION * max(
            1, numels[child]
        ):
            paths.extend(inner_blocks)
        else:
            paths.append(child)


def _repeated(modules: dict[str, ModuleRecord], owner: ModuleRecord) -> set[str]:
    """Children of a class that occurs at least twice in a list, with children of their own."""
    composites = [child for child in owner.children if _is_composite(modules[child])]
    count = Counter(modules[child].kind for child in composites)
    return {child for child in composites if count[modules[child].kind] > 1}


def _is_composite(module: ModuleRecord) -> bool:
    return bool(module.children) and module.kind not in _CONTAINERS


def _numels(recording: ModuleRecording) -> dict[str, int]:
    """Elements of the parameters at and below every module."""
    total = dict.fromkeys(recording.modules, 0)
    for parameter in recording.parameters:
        path = parameter.name
        while path:
            path = path.rpartition(".")[0]
            total[path] = total.get(path, 0) + prod(parameter.shape)
    return total
