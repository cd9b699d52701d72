"""Memory-centric tiling of linear layers.

# [Note: tiling]
Memory-centric tiling makes linear layers `deepspeed.zero.TiledLinear`, fetched and freed tile by tile. It is
part of the model's code, not of DeepSpeed's configuration. Only outputs are split (`out_splits`). The
concatenation of the outputs is left out.
"""

from __future__ import annotations

from math import ceil

from zsim.specs.model.spec import Block, Linear, ModelSpec, Module, Parameter


def tile_linears(model: ModelSpec, most_numel: int) -> ModelSpec:
    """The model with every linear layer of a block with more than `most_numel` weights cut along its outputs
    into equal tiles of at most `most_numel`."""
    return model.map_blocks(lambda block: _tile_block(block, most_numel))


def _tile_block(block: Block, most_numel: int) -> Block:
    tiles = {module.name: _tiles(module, most_numel) for module in block.modules}
    registration = block.registration
    if registration is not None:
        registration = tuple(tile.name for name in registration for tile in tiles[name])
    return Block(
        block.kind, tuple(tile for block_tiles in tiles.values() for tile in block_tiles), registration
    )


def _tiles(module: Module, most_numel: int) -> tuple[Module, ...]:
    op_spec = module.op_spec
    if not isinstance(op_spec, Linear) or module.numel <= most_numel:
        return (module,)
    splits = min(ceil(module.numel / most_numel), op_spec.out_features)
    tiles = []
    for number in range(splits):
        rows = op_spec.out_features * (number + 1) // splits - op_spec.out_features * number // splits
        parameters = tuple(
            Parameter(parameter.name, _shape(parameter, op_spec, rows)) for parameter in module.parameters
        )
        name = f"{module.name}.linears.{number}"
        is_reader = module.shares_input or number > 0
        tiles.append(Module(name, Linear(op_spec.in_features, rows), parameters, is_reader))
    return tuple(tiles)


def _shape(parameter: Parameter, op_spec: Linear, rows: int) -> tuple[int, ...]:
    """The tile's shape: outputs are the first dimension, in GPT-2's Conv1D the last."""
    if (
        parameter.shape == (op_spec.in_features, op_spec.out_features)
        and op_spec.in_features != op_spec.out_features
    ):
        return op_spec.in_features, rows
    return (rows, *parameter.shape[1:])
