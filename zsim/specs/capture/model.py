"""A recording -> a ModelSpec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zsim.specs.capture.assembly import Assembly
from zsim.specs.capture.groups import groups_of
from zsim.specs.capture.recording import ModuleRecording
from zsim.specs.capture.repeats import block_paths
from zsim.specs.capture.segments import Stretch, stretches_of
from zsim.specs.capture.works import Matcher
from zsim.specs.model.spec import Block, Embedding, Linear, Loss, ModelSpec, Module, Norm
from zsim.specs.model.traced import Captured, Extent, Traced


def model_of(recording: ModuleRecording, name: str, source: str) -> ModelSpec:
    """The model that was recorded. Raises InputError for a block that runs twice."""
    length = positions_of(recording)
    matcher = Matcher(recording, recording.samples * length)
    paths = block_paths(recording)
    stretches, number_of = stretches_of(recording, paths, source)
    groups = groups_of(recording, number_of)
    assembly = Assembly(recording, matcher)
    parts: list[tuple[Stretch, tuple[Module, ...]]] = []
    for number, stretch in enumerate(stretches):
        own = [group for group in groups if number_of[group.place] == number]
        modules = assembly.modules(own, stretch.path)
        if stretch.path:
            modules = (*modules, *assembly.left(stretch.path, ()))
        if modules:
            parts.append((stretch, modules))
    unused = assembly.left("", paths)
    before, middle, after = _split(parts)
    after = (*after, *unused)
    blocks, names = _blocks(recording, middle)
    registration = tuple(one.name for one in recording.parameters)
    every = [*before, *(module for block in blocks for module in block.modules), *after]
    return ModelSpec(
        name=name,
        family=recording.modules[""].kind,
        hidden_size=recording.hidden_size or _hidden_size(recording, every),
        vocab_size=recording.vocab_size or _vocabulary(every),
        max_positions=length,
        before=before,
        blocks=blocks,
        after=after,
        block_prefix=next((path.rpartition(".")[0] for path in names if path), ""),
        is_tied=_is_tied(recording, before, after),
        source=source,
        block_names=names,
        registration=registration,
        captured=_captured(recording, length, unused),
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


Parts = Sequence[tuple[Stretch, tuple[Module, ...]]]


def _split(parts: Parts) -> tuple[tuple[Module, ...], Parts, tuple[Module, ...]]:
    """Modules before the first block, blocks and what is between them, modules after the last."""
    places = [number for number, (stretch, _) in enumerate(parts) if stretch.path]
    if not places:
        return tuple(module for _, modules in parts for module in modules), (), ()
    first, last = places[0], places[-1]
    before = tuple(module for _, modules in parts[:first] for module in modules)
    after = tuple(module for _, modules in parts[last + 1 :] for module in modules)
    return before, parts[first : last + 1], after


def _blocks(recording: ModuleRecording, middle: Parts) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """The blocks and their names. Equal blocks are the same object."""
    known: dict[Block, Block] = {}
    blocks = []
    for stretch, modules in middle:
        call = recording.calls[stretch.call] if stretch.path else None
        kind = recording.modules[stretch.path].kind if call else "between"
        held = _held(recording, call.input_bytes) if call else None
        order = _registration(recording, stretch.path, modules) if call else None
        block = Block(kind, modules, order, held=held, is_wrapped=call is not None)
        blocks.append(known.setdefault(block, block))
    return tuple(blocks), tuple(stretch.path for stretch, _ in middle)


def _held(recording: ModuleRecording, input_bytes: int) -> Extent:
    """The inputs of a block, in the type that the module computes in."""
    low = next((one.item_bytes for one in recording.storages if one.is_low), 2)
    return Extent(input_bytes // low)


def _registration(recording: ModuleRecording, path: str, modules: Sequence[Module]) -> tuple[str, ...]:
    """Names of a block's modules with parameters in the order of `named_parameters()`."""
    order = {one.name: number for number, one in enumerate(recording.parameters)}
    owners = [module for module in modules if module.parameters]
    first = {
        module.name: min(order[f"{path}.{module.path_of(parameter)}"] for parameter in module.parameters)
        for module in owners
    }
    return tuple(sorted(first, key=lambda name: first[name]))


def _is_tied(recording: ModuleRecording, before: Sequence[Module], after: Sequence[Module]) -> bool:
    """Whether a product after the blocks uses the weight of an embedding before them."""
    tables = [module.numel for module in before if isinstance(module.work, Embedding)]
    return any(
        isinstance(module.work, Linear)
        and not any(one.name == "weight" for one in module.parameters)
        and module.work.in_features * module.work.out_features in tables
        for module in after
    )


def _hidden_size(recording: ModuleRecording, modules: Sequence[Module]) -> int:
    """The width of most norms, else the input width of most products, else the output width of most
    weights.
    """
    widths = Counter(module.work.width for module in modules if isinstance(module.work, Norm))
    inputs = Counter(module.work.in_features for module in modules if isinstance(module.work, Linear))
    rows = Counter(one.shape[0] for one in recording.parameters if len(one.shape) > 1)
    is_sequence = positions_of(recording) > 1
    found = (widths or inputs or rows) if is_sequence else rows or widths
    return found.most_common(1)[0][0] if found else 1


def _vocabulary(modules: Sequence[Module]) -> int:
    losses = [module.work.vocab_size for module in modules if isinstance(module.work, Loss)]
    tables = [module.work.rows for module in modules if isinstance(module.work, Embedding)]
    return max([*losses, *tables], default=1)


def _captured(recording: ModuleRecording, length: int, unused: Sequence[Module]) -> Captured:
    unpriced = _unpriced(recording)
    has_convolutions = any("convolution" in one.name for one in recording.forward)
    return Captured(
        recording.samples, length, unpriced, bool(unpriced) or has_convolutions, _notes(recording, unused)
    )


def _unpriced(recording: ModuleRecording) -> tuple[str, ...]:
    names = Counter(one.name for one in (*recording.forward, *recording.backward) if not one.is_priced)
    return tuple(sorted(names))


def _notes(recording: ModuleRecording, unused: Sequence[Module]) -> tuple[str, ...]:
    """Sentences of the report about the capture."""
    found = []
    if not recording.has_loss:
        found.append(
            "the module returns no scalar, so no loss is counted: backward begins at its outputs; a forward "
            "that returns the loss has it counted"
        )
    if any("convolution" in one.name for one in recording.forward):
        found.append("convolutions are priced as the products that they are (implicit GEMM), uncalibrated")
    if recording.assumes_full:
        found.append(
            "forward asks whether all elements of a tensor fulfil a condition, as of a padding mask or a "
            "check: taken as true, samples without padding and not packed"
        )
    names = [module.name for module in unused if module.parameters]
    if names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        found.append(
            f"{len(names)} modules have parameters that forward does not use ({some}); they are sharded and "
            "updated like the others"
        )
    return tuple(found)


def traced_modules(model: ModelSpec) -> list[Module]:
    """The modules of a model whose work was traced."""
    every = [*model.before, *(module for block in model.blocks for module in block.modules), *model.after]
    return [module for module in every if isinstance(module.work, Traced)]
