"""A model whose products know how fp8 training treats them.

It says which weights are quantised, which norm writes what a product reads, and which layers stay in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.specs.model.spec import Block, Linear, ModelSpec, Module, Norm

ALIGNED = 16  # elements: dimensions of a product that may run in fp8


def with_fp8_layers(
    model: ModelSpec, *, first_in_bf16: int = 0, last_in_bf16: int = 0, fuses_norms: bool = False
) -> ModelSpec:
    """The model with the weights of its blocks' products marked, and with products in bf16 in the blocks at
    its ends.

    `fuses_norms` makes a norm and the product after it one layer, as Transformer Engine's LayerNormLinear.
    """
    count = len(model.blocks)
    known: dict[tuple[int, bool], Block] = {}
    blocks = []
    for number, block in enumerate(model.blocks):
        is_end = number < first_in_bf16 or number >= count - last_in_bf16
        key = id(block), is_end
        if key not in known:
            known[key] = _left_out(block) if is_end else _quantized(block, fuses_norms=fuses_norms)
        blocks.append(known[key])
    return replace(model, blocks=tuple(blocks))


def without_fp8_layers(model: ModelSpec) -> ModelSpec:
    """The model as it was before `mark_fp8_layers`."""
    return model.with_each_block(lambda block: replace(block, modules=tuple(map(_plain, block.modules))))


def _plain(module: Module) -> Module:
    work = module.work
    if isinstance(work, Linear):
        work = replace(work, in_bf16=False, follows_norm=False)
    elif isinstance(work, Norm):
        work = replace(work, writes_fp8=False)
    parameters = tuple(replace(parameter, in_fp8=False) for parameter in module.parameters)
    return replace(module, work=work, parameters=parameters)


def _left_out(block: Block) -> Block:
    modules = [
        replace(module, work=replace(module.work, in_bf16=True))
        if isinstance(module.work, Linear)
        else module
        for module in block.modules
    ]
    return replace(block, modules=tuple(modules))


def _quantized(block: Block, *, fuses_norms: bool) -> Block:
    modules: list[Module] = []
    for module in block.modules:
        work = module.work
        is_aligned = isinstance(work, Linear) and not (
            work.in_features % ALIGNED or work.out_features % ALIGNED
        )
        if isinstance(work, Linear) and is_aligned and ".lora_" not in module.name:
            marked = tuple(
                replace(parameter, in_fp8=True) if len(parameter.shape) == 2 else parameter
                for parameter in module.parameters
            )
            before = modules[-1].work if modules else None
            if fuses_norms and isinstance(before, Norm):
                modules[-1] = replace(modules[-1], work=replace(before, writes_fp8=True))
                work = replace(work, follows_norm=True)
            module = replace(module, work=work, parameters=marked)
        modules.append(module)
    return replace(block, modules=tuple(modules))
