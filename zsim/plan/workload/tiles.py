"""MLPs computed in tiles of their tokens, so that no tensor of the intermediate width is ever whole.

As `TiledMLP` (DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py; Bekman et al. 2025, "Arctic Long
Sequence Training", arXiv 2506.13996). Forward runs every tile without autograd and concatenates the outputs.
It keeps the input alone. Backward fills the gradient of the input with zeros. It then runs each tile forward
again, with autograd, and backward: gradients of weights are added up over the tiles, and that of the input
into its part of the whole. All gradients of weights are ready with the last tile.

Each tile's kernels are here in the order of its modules, but module by module: all tiles of the first product
are issued before those of the next. Left out: the host's number of tiles, on which ranks agree (an all-reduce
of one number).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zsim.cost.kernels.kernel import Kernel, elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.update import accumulate_kernels, fill_kernels
from zsim.errors import NotSimulatedError
from zsim.operations.operation import Role
from zsim.operations.tensors import ModuleTensors
from zsim.plan.builder import move_kernels
from zsim.plan.ops import Kernels
from zsim.plan.workload.issued_work import kernels_of, num_launches
from zsim.plan.workload.modules import ModuleWork, ModuleWorks, module_work
from zsim.specs.model.spec import Module

_KEY = "training.mlp_tiles"


def tiled_modules(modules: Sequence[Module]) -> range:
    """The indices of a block's MLP: the modules of one parent, around its activation.

    Raises NotSimulatedError for experts, and for an MLP that is cut over ranks or no module of its own.
    """
    if any(module.role in (Role.ROUTER, Role.EXPERTS) for module in modules):
        raise NotSimulatedError(
            f"{_KEY}: tiles of routed experts are not simulated; expected a dense model, or it left out"
        )
    activation = next((n for n, module in enumerate(modules) if module.role is Role.ACTIVATION), None)
    parent = "" if activation is None else modules[activation].name.rpartition(".")[0]
    indices = [
        n
        for n, module in enumerate(modules)
        if parent and module.name.startswith(f"{parent}.") and module.role in (Role.PRODUCT, Role.ACTIVATION)
    ]
    is_run = bool(indices) and indices[-1] - indices[0] == len(indices) - 1
    if not is_run or modules[indices[-1]].role is not Role.PRODUCT:
        raise NotSimulatedError(
            f"{_KEY}: found a model whose MLP is not a module of products and an activation alone; expected "
            "it left out"
        )
    return range(indices[0], indices[-1] + 1)


def tile_sizes(tokens: int, tiles: int) -> list[int]:
    """The tokens of each tile, as of `torch.chunk`: equal but for the last, and at most `tiles`."""
    size = -(-tokens // tiles)
    return [min(size, tokens - begin) for begin in range(0, tokens, size)]


def tile_mlp(
    modules: Sequence[Module], module_works: ModuleWorks, shape: BatchShape, options: WorkOptions, tiles: int
) -> ModuleWorks:
    """The work of a block's modules of which the MLP runs in `tiles`. Its activation is not Liger's."""
    run = tiled_modules(modules)
    members, options = [modules[n] for n in run], replace(options, liger=False)
    changed, e = list(module_works), options.activation_bytes
    tokens, width = shape.seen_by(members[0]).tokens, members[0].op_spec.product_features[0]
    sizes = tile_sizes(tokens, tiles)
    work_of_tile = {size: [_tile_work(member, size, options) for member in members] for size in set(sizes)}
    largest, stream_bytes = work_of_tile[sizes[0]], tokens * width * e
    tile_bytes = sum(work.forward_extra_bytes for work in largest)
    for number, index in enumerate(run):
        kernels = tuple(
            kernel for size in sizes for kernel in kernels_of(work_of_tile[size][number].forward).kernels
        )
        is_first, is_last = number == 0, number == len(members) - 1
        if is_last:
            kernels += move_kernels(stream_bytes, stream_bytes)
        changed[index] = ModuleWork(
            Kernels(kernels),
            Kernels(()),
            num_launches(kernels),
            0,
            tensors=ModuleTensors(
                saved=(stream_bytes,) if is_first else (),
                forward=(tile_bytes, stream_bytes, stream_bytes) if is_last else (tile_bytes, stream_bytes),
            ),
        )
    backward = tuple(_backward(members, work_of_tile, sizes, stream_bytes, options))
    last = run.stop - 1
    tensors = (
        stream_bytes,  # the gradient of the output, and of the input
        stream_bytes,
        sum(work.saved_bytes for work in largest),
        max(work.backward_extra_bytes for work in largest),
        max(module.trainable_numel for module in members) * e,
    )
    changed[last] = replace(
        changed[last],
        backward=Kernels(backward),
        backward_launches=num_launches(backward),
        tensors=replace(changed[last].tensors, backward=tensors),
    )
    for index in run:
        changed[index] = replace(changed[index], input_gradient=changed[index].backward)
    return tuple(changed)


def _tile_work(module: Module, tokens: int, options: WorkOptions) -> ModuleWork:
    """A module's work on so many tokens of a rank."""
    return module_work(module, BatchShape(1, tokens * module.token_shards), options)


def _backward(
    members: Sequence[Module],
    work_of_tile: dict[int, list[ModuleWork]],
    sizes: Sequence[int],
    stream_bytes: int,
    options: WorkOptions,
) -> Iterator[Kernel]:
    """The kernels of backward: zeros, then each tile forward, backward, and its sums."""
    yield from fill_kernels(stream_bytes)
    total_tokens = sum(sizes)
    for number, size in enumerate(sizes):
        for work in work_of_tile[size]:
            yield from kernels_of(work.forward).kernels
        for work in reversed(work_of_tile[size]):
            yield from kernels_of(work.backward).kernels
        yield elementwise(3 * stream_bytes * size / total_tokens, options.kernel_dtype)
        for module in members if number else ():
            for parameter in module.trainable_parameters:
                yield from accumulate_kernels(parameter.numel, options.kernel_dtype, options.kernel_dtype)
