"""The stages of a pipeline: the model cut between its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.operations.operation import Role, operations_of
from zsim.specs.model.spec import Block, Embedding, ModelSpec, Module, Parameter


def cut_into_stages(model: ModelSpec, layers_per_stage: Sequence[int]) -> list[ModelSpec]:
    """The stages in model order: the first has the modules before the blocks and a tower, the last those
    after them. A tied head gets its own copy of the embedding's weight, whose gradients the two stages sum
    up, as does the embedding of multi-token prediction. Fewer than two numbers of layers, or none, are one
    stage with all blocks."""
    if len(layers_per_stage) < 2:
        return [replace(model, after=_name_lenders(model.after))] if model.num_prediction_layers else [model]
    stages, first, last = [], 0, len(layers_per_stage) - 1
    for number, layers in enumerate(layers_per_stage):
        stages.append(
            replace(
                model,
                name=f"{model.name}, stage {number}",
                before=model.before if number == 0 else (),
                towers=model.towers if number == 0 else (),
                blocks=_require_input_gradients(model.blocks[first : first + layers])
                if number
                else model.blocks[:layers],
                after=_modules_after_blocks(model) if number == last else (),
                is_tied=False,
                first_block=model.first_block + first,
                registered_before_blocks=model.registered_before_blocks if number in (0, last) else None,
            )
        )
        first += layers
    return stages


def _require_input_gradients(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Blocks after a message. What is received needs a gradient, whatever is trained before it."""
    changed = {
        id(block): replace(
            block, modules=tuple(replace(module, input_gradient=True) for module in block.modules)
        )
        for block in blocks
        if not all(module.input_gradient for module in block.modules)
    }
    return tuple(changed.get(id(block), block) for block in blocks)


def register_head_first(stage: ModelSpec) -> ModelSpec:
    """The last stage with its head registered before the blocks, where DeepSpeed's PipelineModule has its
    tied layers (`tied_modules`, DeepSpeed 0.19.8 `runtime/pipe/module.py`)."""
    heads = tuple(module.name for module in stage.after if module.role is Role.PRODUCT and module.parameters)
    return replace(stage, registered_before_blocks=heads)


def tied_numel(model: ModelSpec) -> int:
    """Elements of the weight that the embedding shares with a tied head, or with that of multi-token
    prediction, on this rank. 0 if it shares none.
    """
    is_shared = model.is_tied or model.num_prediction_layers > 0
    return next((module.numel for module in model.before if is_shared and module.role is Role.EMBEDDING), 0)


def _modules_after_blocks(model: ModelSpec) -> tuple[Module, ...]:
    """The last stage's modules after the blocks. Of several that share a weight, one has a copy of it."""
    modules = list(model.after)
    readers = Role.PRODUCT if model.is_tied else Role.EMBEDDING
    numbers = [number for number, module in enumerate(modules) if module.role is readers]
    if model.is_tied:
        modules[numbers[-1]] = _add_head_weight(modules[numbers[-1]])
    elif numbers:
        (table,) = operations_of([modules[numbers[0]]], Embedding)
        modules[numbers[0]] = replace(
            modules[numbers[0]], parameters=(Parameter("weight", (table.rows, table.width)),)
        )
    return _name_lenders(modules, is_tied=model.is_tied)


def _name_lenders(modules: Sequence[Module], *, is_tied: bool = False) -> tuple[Module, ...]:
    """Modules after the blocks, of which heads and embeddings of multi-token prediction name the module among
    them whose weight they use. A tied stage's head has the weight of both.
    """
    names = {module.role: module.name for module in modules if module.has_weight}
    head = names.get(Role.PRODUCT, "")
    lenders = {Role.PRODUCT: head, Role.EMBEDDING: head if is_tied else names.get(Role.EMBEDDING, "")}
    return tuple(
        replace(module, lender=lenders[module.role])
        if module.role in lenders and not module.has_weight
        else module
        for module in modules
    )


def _add_head_weight(module: Module) -> Module:
    if not module.op_spec.may_borrow_weight or module.has_weight:
        return module
    inputs, outputs = module.op_spec.product_features
    weight = Parameter("weight", (outputs, inputs))
    return replace(module, parameters=(weight, *module.parameters))
