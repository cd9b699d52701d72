"""Memory-centric tiling: linear layers as `deepspeed.zero.TiledLinear`, fetched and freed tile by tile.

It is part of the model's code, not of DeepSpeed's configuration. Only outputs are split (`out_splits`). The
concatenation of the outputs is left out.
"""

from __future__ import annotations

from math import ceil

from zsim.specs.model.spec import Block, Linear, ModelSpec, Module, Parameter


def with_tiled_linears(model: ModelSpec, most_numel: int) -> ModelSpec:
    """The model with every linear layer of a block with more than `most_numel` weights cut along its outputs
    into equal tiles of at most `most_numel`."""
    return model.with_each_block(lambda block: _tiled_block(block, most_numel))


def _tiled_block(block: Block, most_numel: int) -> Block:
    tiles = {module.name: _tiles(module, most_numel) for module in block.modules}
    registration = block.registration
    if registration is not None:
        registration = tuple(tile.name for name in registration for tile in tiles[name])
    return Block(block.kind, tuple(tile for parts in tiles.values() for tile in parts), registration)


def _tiles(module: Module, most_numel: int) -> tuple[Module, ...]:
    work = module.work
    if not isinstance(work, Linear) or module.numel <= most_numel:
        return (module,)
    splits = min(ceil(module.numel / most_numel), work.out_features)
    parts = []
    for number in range(splits):
        rows = work.out_features * (number + 1) // splits - work.out_features * number // splits
        parameters = tuple(
            Parameter(parameter.name, _shape(parameter, work, rows)) for parameter in module.parameters
        )
        name = f"{module.name}.linears.{number}"
        is_reader = module.shares_input or number > 0
        parts.append(Module(name, Linear(work.in_features, rows), parameters, is_reader))
    return tuple(parts)


def _shape(parameter: Parameter, work: Linear, rows: int) -> tuple[int, ...]:
    """The tile's shape: outputs are the first dimension, in GPT-2's Conv1D the last."""
    if parameter.shape == (work.in_features, work.out_features) and work.in_features != work.out_features:
        return work.in_features, rows
    return (rows, *parameter.shape[1:])
