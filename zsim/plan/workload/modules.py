"""A module's kernels and activations: by itself, and in its context in a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from zsim.cost import memory as footprint
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import BACKWARD_INPUT, BACKWARD_WEIGHT, RECOMPUTE, Role
from zsim.operations.tensors import ModuleTensors, remove_bytes, split_into_tensors
from zsim.plan.ops import Kernels
from zsim.plan.workload.issued_work import IssuedWork, backward_of, forward_of, launches_of, num_launches
from zsim.plan.workload.product_pieces import gathered_input
from zsim.specs.model.spec import Block, Linear, Module
from zsim.specs.strategy.training import Checkpointing


@dataclass(frozen=True)
class ModuleWork:
    """One module's kernels and the tensors of its activations.

    `saved_bytes` stay from forward (under full checkpointing: from recomputation) to backward. The extra
    bytes live only during one op.
    """

    forward: IssuedWork
    backward: IssuedWork
    forward_launches: int
    backward_launches: int
    recompute: IssuedWork | None = None
    recompute_launches: int = 0
    recomputed_bytes: int = 0
    tensors: ModuleTensors = field(default_factory=ModuleTensors)
    kept_outputs: tuple[int, ...] = ()
    """Bytes of the outputs, or of a quantised input, that the segment's checkpoint keeps."""
    input_gradient: IssuedWork = ()
    """The half of backward that makes the gradient of the input, for schedules that split it."""
    weight_gradient: IssuedWork = ()
    """The half of backward that makes the gradients of weights, for schedules that split it."""

    @cached_property
    def saved_bytes(self) -> int:
        return sum(self.tensors.saved)

    @cached_property
    def forward_extra_bytes(self) -> int:
        return sum(self.tensors.forward)

    @cached_property
    def backward_extra_bytes(self) -> int:
        return sum(self.tensors.backward)


NO_WORK = ModuleWork(Kernels(()), Kernels(()), 0, 0)

ModuleWorks = tuple[ModuleWork, ...]


def module_work(
    module: Module, shape: BatchShape, options: WorkOptions, *, is_selective: bool = False
) -> ModuleWork:
    """The work of a module by itself. With `is_selective` attention is recomputed in backward (policy
    "selective").
    """
    shape, options = shape.seen_by(module), module.work_options(options)
    forward, backward = forward_of(module, shape, options), backward_of(module, shape, options)
    weight_gradient = module.kernels(BACKWARD_WEIGHT, shape, options)
    input_gradient = module.kernels(BACKWARD_INPUT, shape, options) if weight_gradient else ()
    saved_bytes = module.saved_bytes(shape, options)
    kept_bytes = module.selective_bytes(shape, options) if is_selective else saved_bytes
    tensors = module.tensors(shape, options)
    return ModuleWork(
        forward=forward,
        backward=backward,
        forward_launches=launches_of(forward),
        backward_launches=launches_of(backward),
        recompute=forward if is_selective else None,
        recompute_launches=launches_of(forward) if is_selective else 0,
        recomputed_bytes=saved_bytes - kept_bytes if is_selective else 0,
        tensors=replace(tensors, saved=split_into_tensors(kept_bytes, tensors.saved)),
        input_gradient=Kernels(input_gradient) if weight_gradient else backward,
        weight_gradient=Kernels(weight_gradient) if weight_gradient else (),
    )


def reuse_stream_gradient(
    modules: Sequence[Module], module_works: ModuleWorks, shape: BatchShape, options: WorkOptions
) -> ModuleWorks:
    """The work of a block's modules with gradients reused: a Linear whose output is added to the residual
    stream without dropout reuses the stream's gradient as its output gradient, so none is allocated.
    """
    if options.autocast or options.stream_bytes != options.activation_bytes:
        return module_works  # autograd casts the gradient
    reused = list(module_works)
    for number, reader in enumerate(modules[1:]):
        product = modules[number]
        is_reused = reader.role is Role.RESIDUAL and reader.op_spec.saves_nothing
        if product.role is Role.PRODUCT and is_reused:
            _, outputs = product.op_spec.product_features
            gradient_bytes = shape.seen_by(reader).tokens * outputs * options.activation_bytes
            backward = remove_bytes(module_works[number].tensors.backward, gradient_bytes)
            tensors = replace(module_works[number].tensors, backward=backward)
            reused[number] = replace(module_works[number], tensors=tensors)
    return tuple(reused)


@dataclass(frozen=True, slots=True)
class Rerun:
    """The modules from number `start` to before `end`, in a checkpoint of their own."""

    start: int
    end: int
    has_norm: bool = False
    """The first module is a norm whose input stays, and whose output is made again."""


@dataclass(frozen=True, slots=True)
class BlockWork:
    """The work of a block's modules."""

    per_module: ModuleWorks
    """Forward and backward of each module."""
    recomputed: ModuleWorks
    """Recomputation of the first modules. () without checkpointing."""
    reruns: tuple[Rerun, ...] = ()
    """Parts that run once more on their own."""


def checkpoint_block(
    block: Block,
    module_works: ModuleWorks,
    policy: Checkpointing,
    shape: BatchShape,
    options: WorkOptions,
    *,
    stops_early: bool,
) -> BlockWork:
    """The work of a checkpointed block, without the saved bytes that the checkpoint holds already: the
    block's input, if that is all that the first module saves, and with "selective-op" the outputs that are
    kept.
    """
    keeps_outputs = policy == "selective-op"
    is_shared = keeps_outputs and options.attention == "flash"
    shared = footprint.shared_saved_bytes(block, shape, options) if is_shared else {}
    first = block.modules[0]
    if footprint.saves_only_block_input(first, options):
        shared[first.name] = module_works[0].saved_bytes
    kept_names = (
        {module.name for module in footprint.selective_op_modules(block, options)} if keeps_outputs else set()
    )
    count = len(footprint.recomputed_modules(block, stops_early=stops_early))
    forward_works, recomputed = [], []
    readers = [*block.modules[1:], None]
    for module, original, reader in zip(block.modules, module_works, readers, strict=True):
        checkpointed = _drop_saved(original, shared.get(module.name, 0))
        if module.name in kept_names:
            recomputed.append(_skip_kernels(checkpointed, module, shape, options))
            forward_works.append(_keep_outputs(checkpointed, module, shape, options))
            continue
        is_scattered = reader is not None and reader.name in kept_names and reader.role is Role.EXCHANGE
        skips = is_scattered and options.compile and module.role is Role.PRODUCT
        recomputed.append(_skip_kernels(checkpointed, module, shape, options) if skips else checkpointed)
        size = footprint.kept_quantised_input(module, shape.seen_by(module), options) if keeps_outputs else 0
        kept_work = replace(checkpointed, kept_outputs=(size,)) if size else checkpointed
        forward_works.append(
            _overwrite_input(kept_work) if module.op_spec.overwrites_input(options) else kept_work
        )
    return BlockWork(tuple(forward_works), tuple(recomputed[:count]))


def _drop_saved(original: ModuleWork, count: int) -> ModuleWork:
    """The work without `count` of its saved bytes, which the checkpoint holds."""
    saved = remove_bytes(original.tensors.saved, count)
    return replace(original, tensors=replace(original.tensors, saved=saved))


def _keep_outputs(
    original: ModuleWork, module: Module, shape: BatchShape, options: WorkOptions
) -> ModuleWork:
    """The work with its outputs kept by the checkpoint."""
    outputs = module.op_spec.kept_outputs(shape.seen_by(module), options)
    return replace(_drop_output(original, outputs[0]), kept_outputs=outputs)


def _skip_kernels(
    original: ModuleWork, module: Module, shape: BatchShape, options: WorkOptions
) -> ModuleWork:
    """The work in recomputation when its output is kept: fused attention recomputes its rotary embedding
    only, an exchange nothing, a product nothing unless it gathers the input that its weight's gradient
    needs."""
    shape = shape.seen_by(module)
    output = module.op_spec.kept_outputs(shape, options)[0]
    if module.role is Role.EXCHANGE:
        return replace(_drop_output(original, output), forward=())
    if isinstance(module.op_spec, Linear) and module.op_spec.gathers_input:
        gathered = (gathered_input(module.op_spec, shape, options),)
        return replace(_drop_output(original, output), forward=gathered, forward_launches=0)
    forward = module.kernels(RECOMPUTE, shape, options)
    return replace(
        _drop_output(original, output), forward=Kernels(forward), forward_launches=num_launches(forward)
    )


def _overwrite_input(original: ModuleWork) -> ModuleWork:
    """The work of an operation that overwrites an input that is not needed later, so that its output is not
    allocated.
    """
    output = original.forward_extra_bytes
    return _drop_output(original, output) if original.saved_bytes >= output else original


def _drop_output(original: ModuleWork, count: int) -> ModuleWork:
    forward = remove_bytes(original.tensors.forward, count)
    return replace(original, tensors=replace(original.tensors, forward=forward))


SIDE_STREAM_MARKS = ("begins", "continues", "ends")


def backward_order(modules: Sequence[Module]) -> list[int]:
    """Numbers of modules in the order of their backward: the reverse of forward, unless shared experts run
    beside the exchanges.

    Then, of the next modules of both streams, one that is marked to go first comes first, and otherwise the
    one that ran last forward. Of two exchanges in a row both can run. See [Note: shared experts on a stream
    of their own] of `zsim.plan.parallel.shared_expert_overlap`.
    """
    joins = next((n for n, module in enumerate(modules) if module.side_stream == "joins"), None)
    if joins is None:
        return list(range(len(modules) - 1, -1, -1))
    forks = next(n for n, module in enumerate(modules) if module.side_stream == "forks")
    overlapped_modules = range(joins - 1, forks, -1)
    side_modules = [n for n in overlapped_modules if modules[n].side_stream in SIDE_STREAM_MARKS]
    main_modules = [n for n in overlapped_modules if modules[n].side_stream not in SIDE_STREAM_MARKS]
    interleaved = _interleave(modules, side_modules, main_modules)
    return [*range(len(modules) - 1, joins - 1, -1), *interleaved, *range(forks, -1, -1)]


def _interleave(modules: Sequence[Module], side_modules: list[int], main_modules: list[int]) -> list[int]:
    """The modules of two streams, last first, in the order in which autograd takes them."""
    order: list[int] = []
    while side_modules or main_modules:
        ready = [*side_modules[:1], *main_modules[:1]]
        if len(main_modules) > 1 and all(modules[n].role is Role.EXCHANGE for n in main_modules[:2]):
            ready.append(main_modules[1])
        chosen = max(ready, key=lambda n: (modules[n].is_first_in_backward, n))
        (side_modules if chosen in side_modules else main_modules).remove(chosen)
        order.append(chosen)
    return order
