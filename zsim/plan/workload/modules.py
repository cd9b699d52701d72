"""A module's kernels and activations: by itself, and in its context in a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property

from zsim.cost.kernels import modules as work
from zsim.cost.memory import activations as footprint
from zsim.cost.memory.tensors import ModuleTensors, cut, module_tensors, without
from zsim.dataclass import dataclass
from zsim.plan.ops import Kernels
from zsim.plan.workload.issued import Issued, backward_of, count, forward_of, launches_of
from zsim.plan.workload.product_pieces import gathered_input
from zsim.specs.model.experts import GroupedLinear
from zsim.specs.model.spec import Activation, Block, Exchange, Linear, Module, Residual
from zsim.specs.strategy.training import Checkpointing


@dataclass(frozen=True)
class ModuleWork:
    """One module's kernels and the tensors of its activations.

    `saved_bytes` stay from forward (under full checkpointing: from recomputation) to backward. The extra
    bytes live only during one op.
    """

    forward: Issued
    backward: Issued
    forward_launches: int
    backward_launches: int
    recompute: Issued | None = None
    recompute_launches: int = 0
    recomputed_bytes: int = 0
    tensors: ModuleTensors = field(default_factory=ModuleTensors)
    kept_outputs: tuple[int, ...] = ()
    """Bytes of the outputs, or of a quantised input, that the segment's checkpoint keeps."""
    input_gradient: Issued = ()
    """The half of backward that makes the gradient of the input, for schedules that split it."""
    weight_gradient: Issued = ()
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

Works = tuple[ModuleWork, ...]


def module_work(
    module: Module, shape: work.BatchShape, options: work.WorkOptions, *, is_selective: bool = False
) -> ModuleWork:
    """The work of a module by itself. With `is_selective` attention is recomputed in backward (policy
    "selective").
    """
    shape, options = shape.seen_by(module), options.seen_by(module)
    forward, backward = forward_of(module, shape, options), backward_of(module, shape, options)
    is_product = isinstance(module.work, Linear | GroupedLinear)
    of_input, of_weight = work.split_backward(module, shape, options) if is_product else ((), ())
    saved = footprint.saved_bytes(module, shape, options)
    kept = footprint.saved_bytes_selective(module, shape, options) if is_selective else saved
    tensors = module_tensors(module, shape, options)
    return ModuleWork(
        forward=forward,
        backward=backward,
        forward_launches=launches_of(forward),
        backward_launches=launches_of(backward),
        recompute=forward if is_selective else None,
        recompute_launches=launches_of(forward) if is_selective else 0,
        recomputed_bytes=saved - kept if is_selective else 0,
        tensors=replace(tensors, saved=cut(kept, tensors.saved)),
        input_gradient=Kernels(of_input) if of_weight else backward,
        weight_gradient=Kernels(of_weight) if of_weight else (),
    )


def on_residual_stream(
    modules: Sequence[Module], works: Works, shape: work.BatchShape, options: work.WorkOptions
) -> Works:
    """The work of a block's modules with gradients reused: a Linear whose output is added to the residual
    stream without dropout reuses the stream's gradient as its output gradient, so none is allocated.
    """
    if options.autocast or options.stream_bytes != options.activation_bytes:
        return works  # autograd casts the gradient
    result = list(works)
    for number, after in enumerate(modules[1:]):
        product = modules[number].work
        if isinstance(product, Linear) and isinstance(after.work, Residual) and not after.work.dropout:
            given = shape.seen_by(after).tokens * product.out_features * options.activation_bytes
            backward = without(works[number].tensors.backward, given)
            tensors = replace(works[number].tensors, backward=backward)
            result[number] = replace(works[number], tensors=tensors)
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Rerun:
    """The modules from number `start` to before `end`, in a checkpoint of their own."""

    start: int
    end: int
    has_norm: bool = False
    """The first module is a norm whose input stays, and whose output is made again."""


@dataclass(frozen=True, slots=True)
class BlockWorks:
    """The work of a block's modules."""

    works: Works
    """Forward and backward of each module."""
    recomputed: Works
    """Recomputation of the first modules. () without checkpointing."""
    reruns: tuple[Rerun, ...] = ()
    """Parts that run once more on their own."""


def checkpointed_works(
    block: Block,
    works: Works,
    policy: Checkpointing,
    shape: work.BatchShape,
    options: work.WorkOptions,
    *,
    stops_early: bool,
) -> BlockWorks:
    """The work of a checkpointed block, without the saved bytes that the checkpoint holds already: the
    block's input, if that is all that the first module saves, and with "selective-op" the outputs that are
    kept.
    """
    keeps_outputs = policy == "selective-op"
    is_shared = keeps_outputs and options.attention == "flash"
    shared = footprint.kept_for_readers(block, shape, options) if is_shared else {}
    first = block.modules[0]
    if footprint.keeps_only_the_stream(first, options):
        shared[first.name] = works[0].saved_bytes
    kept = {module.name for module in footprint.kept_modules(block, options)} if keeps_outputs else set()
    count = len(footprint.recomputed_modules(block, stops_early=stops_early))
    forward, again = [], []
    after = [*block.modules[1:], None]
    for module, alone, reader in zip(block.modules, works, after, strict=True):
        one = _without_saved(alone, shared.get(module.name, 0))
        if module.name in kept:
            again.append(_without_kernels(one, module, shape, options))
            forward.append(_keeping(one, module, shape, options))
            continue
        is_scattered = reader is not None and reader.name in kept and isinstance(reader.work, Exchange)
        skips = is_scattered and options.compile and isinstance(module.work, Linear)
        again.append(_without_kernels(one, module, shape, options) if skips else one)
        size = footprint.kept_quantised_input(module, shape.seen_by(module), options) if keeps_outputs else 0
        own = replace(one, kept_outputs=(size,)) if size else one
        forward.append(_in_place(own) if _is_compiled(module, options) else own)
    return BlockWorks(tuple(forward), tuple(again[:count]))


def _without_saved(one: ModuleWork, count: int) -> ModuleWork:
    """The work without `count` of its saved bytes, which the checkpoint holds."""
    saved = without(one.tensors.saved, count)
    return replace(one, tensors=replace(one.tensors, saved=saved))


def _keeping(
    one: ModuleWork, module: Module, shape: work.BatchShape, options: work.WorkOptions
) -> ModuleWork:
    """The work with its outputs kept by the checkpoint."""
    outputs = footprint.kept_outputs(module, shape.seen_by(module), options)
    return replace(_without_output(one, outputs[0]), kept_outputs=outputs)


def _without_kernels(
    one: ModuleWork, module: Module, shape: work.BatchShape, options: work.WorkOptions
) -> ModuleWork:
    """The work in recomputation when its output is kept: fused attention recomputes its rotary embedding
    only, an exchange nothing, a product nothing unless it gathers the input that its weight's gradient
    needs."""
    shape = shape.seen_by(module)
    output = footprint.kept_outputs(module, shape, options)[0]
    if isinstance(module.work, Exchange):
        return replace(_without_output(one, output), forward=())
    if isinstance(module.work, Linear) and module.work.gathers_input:
        gathered = (gathered_input(module.work, shape, options),)
        return replace(_without_output(one, output), forward=gathered, forward_launches=0)
    forward = work.unkept_kernels(module, shape, options)
    return replace(_without_output(one, output), forward=Kernels(forward), forward_launches=count(forward))


def _is_compiled(module: Module, options: work.WorkOptions) -> bool:
    """Whether the module is an activation that torch.compile generates. Liger's gated kernel is not."""
    if not isinstance(module.work, Activation):
        return False
    return options.compile and not (options.liger and module.work.gated)


def _in_place(one: ModuleWork) -> ModuleWork:
    """The work of an activation that torch.compile generates: it overwrites an input that is not needed later
    (torch 2.13's `inplace_buffers`, _inductor/config.py), so its output is not allocated."""
    output = one.forward_extra_bytes
    return _without_output(one, output) if one.saved_bytes >= output else one


def _without_output(one: ModuleWork, count: int) -> ModuleWork:
    forward = without(one.tensors.forward, count)
    return replace(one, tensors=replace(one.tensors, forward=forward))
