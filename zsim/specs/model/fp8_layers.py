"""A model whose products know how fp8 training treats them.

It says which weights are quantised, which norm writes what a product reads, and which layers stay in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.specs.model.spec import Block, Linear, ModelSpec, Module, Norm


def mark_fp8_layers(
    model: ModelSpec, *, first_in_bf16: int = 0, last_in_bf16: int = 0, fuses_norms: bool = False
) -> ModelSpec:
    """The model with the weights of its blocks' products marked, and with products in bf16 in the blocks at
    its ends.

    `fuses_norms` makes a norm and the product after it one layer, as Transformer Engine's LayerNormLinear.
    """
    count = len(model.blocks)
    marked_blocks: dict[tuple[int, bool], Block] = {}
    blocks = []
    for number, block in enumerate(model.blocks):
        is_end = number < first_in_bf16 or number >= count - last_in_bf16
        key = id(block), is_end
        if key not in marked_blocks:
            marked_blocks[key] = (
                _keep_block_in_bf16(block) if is_end else _quantize_block(block, fuses_norms=fuses_norms)
            )
        blocks.append(marked_blocks[key])
    return replace(model, blocks=tuple(blocks))


def unmark_fp8_layers(model: ModelSpec) -> ModelSpec:
    """The model as it was before `mark_fp8_layers`."""
    return model.map_blocks(lambda block: replace(block, modules=tuple(map(_unmark_module, block.modules))))


def _unmark_module(module: Module) -> Module:
    parameters = tuple(replace(parameter, in_fp8=False) for parameter in module.parameters)
    return replace(module, op_spec=module.op_spec.unmark_fp8(), parameters=parameters)


def _keep_block_in_bf16(block: Block) -> Block:
    modules = [replace(module, op_spec=module.op_spec.keep_in_bf16()) for module in block.modules]
    return replace(block, modules=tuple(modules))


def _quantize_block(block: Block, *, fuses_norms: bool) -> Block:
    modules: list[Module] = []
    for module in block.modules:
        op_spec = module.op_spec
        if isinstance(op_spec, Linear) and op_spec.takes_fp8 and not module.is_adapter_product:
            marked = tuple(
                replace(parameter, in_fp8=True) if len(parameter.shape) == 2 else parameter
                for parameter in module.parameters
            )
            before = modules[-1].op_spec if modules else None
            if fuses_norms and isinstance(before, Norm):
                modules[-1] = replace(modules[-1], op_spec=replace(before, writes_fp8=True))
                op_spec = replace(op_spec, follows_norm=True)
            module = replace(module, op_spec=op_spec, parameters=marked)
        modules.append(module)
    return replace(block, modules=tuple(modules))
