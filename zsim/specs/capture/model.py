"""A recording -> a ModelSpec. Its sites are cut into segments: before, in, between and after the blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zsim.errors import InputError
from zsim.operations.operation import Role, operations_of
from zsim.operations.traced import CaptureInfo, Extent
from zsim.specs.capture.assembly import ModuleAssembler
from zsim.specs.capture.formula_matcher import FormulaMatcher
from zsim.specs.capture.groups import groups_of
from zsim.specs.capture.recording import ModuleRecording
from zsim.specs.capture.repeats import block_paths
from zsim.specs.model.spec import Block, Embedding, Linear, Loss, ModelSpec, Module, Norm


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
        is_tied=_is_tied(recording, before, after),
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


def _is_tied(recording: ModuleRecording, before: Sequence[Module], after: Sequence[Module]) -> bool:
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
            "and "
            "updated like the others"
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
                    "simulate; "
                    "expected blocks that run once each"
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
