"""Memory-centric tiling cuts large linear layers and changes nothing else."""

from __future__ import annotations

from zsim.frameworks.deepspeed.resolver import tile_linears
from zsim.operations.operation import operations_of
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import Linear


def test_tiles_have_all_the_weights_and_are_small_enough() -> None:
    """GPT-2's feed-forward weights (2,359,296 and 2,362,368 with bias) become three tiles of at most 1e6."""
    model = load_model("gpt2")
    tiled = tile_linears(model, 10**6)
    assert tiled.numel == model.numel
    modules = tiled.blocks[0].modules
    assert max(module.numel for module in modules if isinstance(module.op_spec, Linear)) <= 10**6
    names = [module.name for module in modules if module.name.startswith("mlp.c_fc")]
    assert names == ["mlp.c_fc.linears.0", "mlp.c_fc.linears.1", "mlp.c_fc.linears.2"]
    widths = [
        product.out_features
        for product in operations_of([module for module in modules if module.name in names], Linear)
    ]
    assert sum(widths) == 3072


def test_equal_blocks_stay_one_object() -> None:
    tiled = tile_linears(load_model("gpt2"), 10**6)
    assert len({id(block) for block in tiled.blocks}) == 1


def test_small_layers_stay_whole() -> None:
    model = load_model("gpt2")
    assert tile_linears(model, 10**9) == model


def test_registration_names_the_tiles() -> None:
    """Llama registers its norms after the rest: the order of named_parameters() keeps every tile."""
    model = load_model("llama-3.2-1b")
    tiled = tile_linears(model, 10**6)
    assert sum(parameter.numel for _, parameter in tiled.named_parameters()) == model.numel
