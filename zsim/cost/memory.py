"""The modules of checkpointed blocks that run again, and the tensors that are kept.

The bytes of a module by itself are its operation's (`zsim.operations`).
"""

from __future__ import annotations

from zsim.cost.kernels import int8
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.dtypes import DTYPE_BYTES
from zsim.operations import Exchange, Module
from zsim.operations.operation import Parameter, Role
from zsim.specs.model.spec import Block


def selective_op_modules(block: Block, options: WorkOptions) -> tuple[Module, ...]:
    """Modules whose outputs "selective-op" keeps: fused attention, reduce-scatters, all-to-alls, and the
    first, third, fifth ... product of a block (experts' and their gate's are not among them). Backward reads
    the last product's output, or what its reduce-scatter makes of it, only if a norm follows (Gemma 2).
    Otherwise torch.compile does not keep it. A product in fp8 is `aten._scaled_mm`, which is neither counted
    nor kept: all of them run again whose outputs backward reads.

    Source: torchtitan v0.1.0 to v0.2.2 `_op_sac_save_list` (models/llama3/infra/parallelize.py) and
    `_apply_op_sac` (distributed/activation_checkpoint.py), which runs every second `aten.mm` again (its main
    branch since February 2026, pull request 2357, keeps every `_scaled_mm`). torch 2.13's `solve_min_cut`
    (_functorch/partitioners.py) cuts only paths to backward: compiled with that list, a block of four
    products runs one again in bf16 and three in fp8.
    """
    modules = block.modules
    products = [module for module in modules if module.role is Role.PRODUCT]
    scatters = [module for module in modules if module.op_spec.scatters_output]
    if products and options.compile and not _feeds_norm(modules, products[-1]):
        products = products[:-1]
        scatters = [
            scatter for scatter in scatters if scatter is not scatters[-1] or _feeds_norm(modules, scatter)
        ]
    products = [module for module in products if not module.is_quantized(options)]
    cores = [module for module in modules if module.role is Role.MIXER]
    exchanges = [
        exchange
        for exchange in modules
        if isinstance(exchange.op_spec, Exchange) and exchange.op_spec.forward == "all_to_all"
    ]
    saved_modules = (*products[::2], *cores, *scatters, *exchanges)
    return tuple(dict.fromkeys(saved_modules))


def kept_quantised_input(module: Module, shape: BatchShape, options: WorkOptions) -> int:
    """Bytes of the input of a product in fp8 that "selective-op" keeps although it is set to make it again:
    one byte an element, once for the products that share it, of the rank's own part where it is gathered.

    Source: pytorch issue 128730 (2024): the partitioner keeps the inputs of `_scaled_mm`, as in the releases
    that these lists were written for. torch 2.13 does so no more.
    """
    return module.op_spec.quantized_input_bytes(module, shape, options)


def _feeds_norm(modules: tuple[Module, ...], module: Module) -> bool:
    """Whether a norm reads the module's output, and no exchange before it."""
    reader = _reader(modules, modules.index(module), Role.NORM, Role.EXCHANGE)
    return reader is not None and reader.role is Role.NORM


def shared_saved_bytes(block: Block, shape: BatchShape, options: WorkOptions) -> dict[str, int]:
    """Bytes by module of the saved tensors that are among the outputs "selective-op" keeps, so that
    recomputation does not allocate them again: inputs of fused attention, of the product after it, of
    activations and of a norm after the last product, and attention's log-sum-exp.
    """
    modules, shared = block.modules, dict.fromkeys((module.name for module in block.modules), 0)
    index_of_module = {module.name: index for index, module in enumerate(modules)}
    core = next((index for index, module in enumerate(modules) if module.role is Role.MIXER), -1)
    last = max((index for index in range(core) if modules[index].role is Role.PRODUCT), default=-1)
    for module in selective_op_modules(block, options):
        local_shape = shape.seen_by(module)
        index = index_of_module[module.name]
        size, *statistics = module.op_spec.kept_outputs(local_shape, options)
        if module.role is Role.MIXER:
            shared[module.name] += sum(statistics)
            reader = _reader(modules, index, Role.PRODUCT)
        elif index < core and module.role is Role.PRODUCT:
            reader = modules[core]
            size = reader.op_spec.shared_input_bytes(size, local_shape, options, is_last=index == last)
        else:
            reader = _reader(modules, index, Role.ACTIVATION) if module.role is Role.PRODUCT else None
            if reader is None and options.fuses_kernels:  # or keeps a copy in fp32
                reader = _reader(modules, index, Role.NORM) if _feeds_norm(modules, module) else None
        if reader is not None:
            shared[reader.name] += size
    return {name: size for name, size in shared.items() if size}


def _reader(modules: tuple[Module, ...], index: int, *roles: Role) -> Module | None:
    """The next module after `index` that has one of `roles`."""
    return next((module for module in modules[index + 1 :] if module.role in roles), None)


def checkpoint_bytes(hidden_size: int, shape: BatchShape, options: WorkOptions) -> int:
    """Bytes that a block keeps under full recomputation: its input, 2sbh bytes in bf16."""
    return shape.tokens * hidden_size * options.stream_bytes


def recomputed_modules(block: Block, *, stops_early: bool = True) -> tuple[Module, ...]:
    """The modules that run a second time before the block's backward under full recomputation.

    `stops_early`: torch's non-reentrant checkpoint (the default of transformers 5 and torchtitan) stops once
    the last tensor that backward needs exists again. A Linear keeps its input, not its output, so a block
    that ends in a Linear does not repeat that product, nor the add after it.
    """
    modules = list(block.modules)
    if stops_early:
        while modules and modules[-1].op_spec.saves_nothing:
            modules.pop()
        if modules and modules[-1].role in (Role.PRODUCT, Role.EXPERT_PRODUCT):
            modules.pop()
    return tuple(modules)


def saves_only_block_input(module: Module, options: WorkOptions) -> bool:
    """Whether the module, as the first of a block, keeps only the block's input. (Under autocast a product
    keeps a cast copy.)"""
    is_kept_as_it_is = module.role is Role.NORM or not options.autocast
    return is_kept_as_it_is and module.op_spec.saves_only_its_input(options)


def runs_before_recomputation(block: Block) -> int:
    """The number of modules at the block's end whose backward needs nothing that forward keeps, up to an
    exchange: torch's non-reentrant checkpoint recomputes when the first kept tensor is asked for, so the
    backward of these, and its collective, comes before (`_checkpoint_hook` of torch 2.13
    utils/checkpoint.py). 0 without an exchange there."""
    count = 0
    for number, module in enumerate(reversed(block.modules), 1):
        if not module.op_spec.saves_nothing:
            break
        if module.role is Role.EXCHANGE:
            count = number
    return count


_BLOCK, _SCALE_BLOCK = 64, 256
_MAP_BYTES, _SCALE_MAP_BYTES, _OFFSET_BYTES = 16 * 4, 256 * 4, 4


def stored_bytes(parameter: Parameter, dtype: str, numel: int | None = None) -> int:
    """Bytes of a parameter, or of `numel` elements of it, in its own type, or else in `dtype`. 4-bit weights
    are two to a byte (bitsandbytes 0.50.2 functional.py `quantize_4bit`)."""
    count = parameter.numel if numel is None else numel
    return -(-count // 2) if parameter.is_packed else count * DTYPE_BYTES[parameter.stored_dtype or dtype]


def flat_numel(parameter: Parameter) -> int:
    """Elements of a parameter as a framework flattens or partitions it: 4-bit weights are kept as 16-bit
    numbers (`bnb_4bit_quant_storage`)."""
    return -(-parameter.numel // 4) if parameter.is_packed else parameter.numel


def quantisation_bytes(parameter: Parameter) -> int:
    """Bytes that come with a quantised weight and are no parameter, so that every rank has all of them.

    In 4 bits they are a scale for 64 elements, and the map of the 16 values. The scale is fp32. If it is
    quantised again, it is a byte, with an fp32 scale for 256 of them, their map and their mean. An 8-bit
    weight has a scale for a row. Source: bitsandbytes 0.50.2 functional.py `quantize_4bit`, `QuantState`.
    """
    if parameter.stored_dtype == int8.TYPE:
        return int8.scale_bytes(parameter.shape[0])
    if not parameter.is_packed:
        return 0
    scales = -(-parameter.numel // _BLOCK)
    if parameter.stored_dtype != "nf4":
        return 4 * scales + _MAP_BYTES
    return scales + 4 * -(-scales // _SCALE_BLOCK) + _MAP_BYTES + _SCALE_MAP_BYTES + _OFFSET_BYTES
