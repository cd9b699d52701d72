"""Vision towers of multimodal files: parameters, names, and what is done with a file that has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.operations.image_features import ImageFeatures
from zsim.specs.model.freezing import FrozenParameters, freeze_parameters
from zsim.specs.model.huggingface import load_model, model_from_config
from zsim.specs.model.image_rules import ImageRule
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.images import ImageSize

COUNTED = json.loads((Path(__file__).parent / "published_towers.json").read_text())["models"]
TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 16,
}  # fmt: skip
STEP = {"model_type": "step3p7", "text_config": {}, "vision_config": {}}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": TEXT,
    "vision_config": {**VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
}


def build(**changes: Any) -> ModelSpec:
    return model_from_config({**QWEN3_VL, **changes}, "tiny", "tiny.json")


@pytest.mark.parametrize("entry", COUNTED, ids=lambda entry: entry["name"])
def test_parameters_are_those_of_the_published_model(entry: dict[str, Any]) -> None:
    """With tower and projector, counted by transformers 5.24 on the meta device."""
    model = model_from_config(entry["config"], entry["name"], "config.json")
    assert (model.numel, sum(tower.numel for tower in model.towers)) == (entry["total"], entry["tower"])


def test_presets_are_the_published_models() -> None:
    """Qwen2.5-VL-7B has 8,292,166,656 parameters, by transformers' class of its config.json."""
    totals = {entry["name"]: entry["total"] for entry in COUNTED}
    names = {
        "qwen3-vl-8b": "Qwen/Qwen3-VL-8B-Instruct",
        "qwen3-vl-30b-a3b": "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "qwen3.6-27b": "Qwen/Qwen3.5-27B",
        "qwen3.6-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    }
    assert {preset: load_model(preset).numel for preset in names} == {
        preset: totals[name] for preset, name in names.items()
    }
    assert load_model("qwen2.5-vl-7b").numel == 8_292_166_656


def test_text_alone_is_taken_where_it_is_asked_for() -> None:
    model = build(text_only=True)
    assert model.vision_tower is None
    assert model.block_prefix == "model.layers"
    with_tower = build()
    assert with_tower.vision_tower is not None
    assert with_tower.numel - with_tower.vision_tower.numel == model.numel
    assert with_tower.block_prefix == "model.language_model.layers"


def test_an_omni_model_is_its_thinker_whose_language_model_is_asked_for_by_name() -> None:
    """Their talkers are not trained with it. The tower of sounds runs before that of images."""
    thinker = {
        "model_type": "qwen2_5_omni_thinker", "audio_config": {"output_dim": 64},
        "vision_config": {"hidden_size": 32, "out_hidden_size": 64},
        "text_config": {**TEXT, "model_type": "qwen2_5_omni_text"},
    }  # fmt: skip
    config = {"model_type": "qwen2_5_omni", "thinker_config": thinker, "talker_config": {}}
    whole = model_from_config(config, "tiny", "tiny.json")
    assert [tower.block_prefix for tower in whole.towers] == [
        "model.audio_tower.layers",
        "model.visual.blocks",
    ]
    text = model_from_config({**config, "text_only": True}, "tiny", "tiny.json")
    alone = model_from_config({**TEXT, "model_type": "qwen2"}, "tiny", "tiny.json")
    assert text.blocks == alone.blocks


def test_a_merger_of_another_width_than_the_language_models_is_refused() -> None:
    with pytest.raises(InputError, match="'out_hidden_size' is 96; expected 64, the language model's"):
        build(vision_config={**VISION, "out_hidden_size": 96})


def test_flat_files_of_older_releases_have_the_same_model() -> None:
    """Qwen2.5-VL's own config.json has the language model's keys beside `vision_config`."""
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    nested = {"model_type": "qwen2_5_vl", "text_config": TEXT, "vision_config": vision}
    flat = {**TEXT, "model_type": "qwen2_5_vl", "vision_config": vision}
    models = [model_from_config(config, "tiny", "tiny.json") for config in (nested, flat)]
    assert [name for name, _ in models[0].named_parameters()] == [
        name for name, _ in models[1].named_parameters()
    ]


def test_deep_features_are_added_in_as_many_layers_as_the_tower_gives_them() -> None:
    blocks = build().blocks
    assert [isinstance(block.modules[-1].op_spec, ImageFeatures) for block in blocks] == [True] * 2 + [
        False
    ] * 2
    assert blocks[0] is blocks[1]


def test_a_pooling_head_that_gemma_does_not_use_is_refused() -> None:
    tower = {"hidden_size": 32, "image_size": 896, "patch_size": 14}
    config = {"model_type": "gemma3", "text_config": TEXT, "vision_config": tower}
    with pytest.raises(NotSimulatedError, match="vision_use_head"):
        model_from_config(config, "tiny", "tiny.json")


def test_a_frozen_tower_has_no_backward_and_a_trained_projector_has() -> None:
    """Pixels need no gradient, so that nothing before the first trained parameter has a backward; the
    language model's embedding is trained, so the features that are put among its rows have one.
    """
    frozen = FrozenParameters(("model.visual.blocks", "model.visual.patch_embed", "model.visual.pos_embed"))
    tower = freeze_parameters(build(), frozen).vision_tower
    assert tower is not None
    assert not any(module.has_backward for block in tower.blocks for module in block.modules)
    assert all(module.has_backward for module in tower.after if module.parameters)
    first_product = next(module for module in tower.after if module.name.endswith("merger.linear_fc1"))
    assert first_product.has_backward
    whole = FrozenParameters(("model.visual",))
    tower = freeze_parameters(build(), whole).vision_tower
    assert tower is not None
    assert [module.name for module in tower.modules if module.has_backward] == ["image_features"]


def test_a_trained_tower_before_a_frozen_language_model_has_a_backward() -> None:
    model = freeze_parameters(build(), FrozenParameters(("model.language_model", "lm_head")))
    assert model.vision_tower is not None
    with_parameters = [module for module in model.vision_tower.modules if module.parameters]
    assert all(module.has_backward for module in with_parameters)
    assert all(module.has_backward for block in model.blocks for module in block.modules)


QWEN = ImageRule(16, 2, 65_536, 16_777_216)
GLM = ImageRule(14, 2, 6272, 5_880_000)
KIMI = ImageRule(14, 2, 0, 16_384 * 14**2, resizing="never up", max_side=512 * 14)
GEMMA4 = ImageRule(16, 3, 0, 280 * 48**2, resizing="fills")
LFM2 = ImageRule(16, 2, 64 * 32**2, 256 * 32**2, tile=512, max_tiles=10, tiling="nearest aspect", min_tiles=2)
TILES: dict[str, Any] = {"tile": 448, "max_tiles": 12, "class_tokens": 1}


@pytest.mark.parametrize(
    ("rule", "pixels", "expected"),
    [
        (QWEN, (448, 448), (1, 784, 196)),  # 28 x 28 patches, 14 x 14 tokens
        (QWEN, (1024, 768), (1, 64 * 48, 32 * 24)),
        (QWEN, (100, 100), (1, 256, 64)),  # enlarged to 256 x 256: 65,536 pixels at least
        (ImageRule(14, 2, 3136, 1_003_520), (4000, 3000), (1, 82 * 60, 41 * 30)),  # 1,156 x 867, then down
        (GLM, (3100, 4000), (1, 152 * 196, 76 * 98)),  # 2,134 x 2,754 keep the area
        (KIMI, (100, 30), (1, 8 * 4, 4 * 2)),  # padded to 112 x 56
        (KIMI, (4000, 3000), (1, 150 * 112, 75 * 56)),  # 285 x 214 patches, scaled by 0.518, and padded
        (GEMMA4, (500, 500), (1, 2520, 16 * 16)),  # 803 pixels a side would fill it: 16.7 tokens of 48
        (GEMMA4.set_bounds(max_pixels=70 * 48**2), (10, 1000), (1, 630, 70)),  # 40 pixels wide: one token
        (LFM2, (64, 64), (1, 1024, 8 * 8)),  # enlarged to 64 tokens at least, on the rows of a tile
        (LFM2, (640, 480), (1, 1024, 18 * 13)),  # not above two tiles' pixels: 20 x 15 tokens over 1.08
        (LFM2, (1024, 768), (7, 1024, 6 * 256 + 18 * 13)),  # 3 x 2 are nearest to 4 : 3, and all of it
        (ImageRule(14, 4, tile=896), (300, 5000), (1, 4096, 256)),  # Gemma 3: always 896 x 896
        (ImageRule(14, 2, **TILES, tiling="nearest aspect"), (448, 448), (1, 1025, 256)),
        (
            ImageRule(14, 2, **TILES, tiling="nearest aspect"),
            (896, 448),
            (3, 1025, 768),
        ),  # 2 x 1 and a thumbnail
        (
            ImageRule(14, 2, tile=336, max_tiles=16, class_tokens=1, tiling="largest scale"),
            (700, 300),
            (4, 577, 4 * 144),
        ),  # 3 x 1 tiles enlarge it 1.12 times, 2 x 1 would shrink it; and the whole image
    ],
)
def test_an_image_is_cut_as_the_models_processor_does(
    rule: ImageRule, pixels: tuple[int, int], expected: tuple[int, int, int]
) -> None:
    """(tiles, patches of each with its class token, tokens), by hand from the processors' rules."""
    size = rule.size_of(*pixels)
    assert (size.tiles, size.patches, size.tokens) == expected


def test_windows_are_squares_of_tokens() -> None:
    """112 pixels are four tokens of 28 pixels, of two patches each: 8 x 8 patches."""
    assert ImageRule(14, 2, 3136, 10**7, window=112).size_of(560, 560).window == 64


def test_smolvlm_cuts_an_image_into_four_tiles_on_its_longer_side_and_one_of_all() -> None:
    """1000 x 500 pixels: 4 x 2 tiles of 384 and the whole, each of (384 // 14)^2 = 729 patches and 729 / 9 =
    81 tokens. LLaVA scales each image to 336 pixels, 24^2 tokens, of which the tower has one more."""
    tower = load_model("smolvlm2-2.2b").vision_tower
    assert tower is not None
    assert tower.image_rule.size_of(1000, 500) == ImageSize(9, 729, 9 * 81)
    assert tower.image_rule.size_of(500, 2000) == ImageSize(5, 729, 5 * 81)
    llava = load_model("llava-1.5-7b").vision_tower
    assert llava is not None
    assert llava.image_rule.size_of(1000, 500) == ImageSize(1, 577, 576)


def test_step_sees_all_of_an_image_and_crops_of_it() -> None:
    """(728 // 14)^2 patches are 13^2 tokens, and of a crop (504 // 14)^2 are 9^2. 2000 x 500 pixels have 4
    crops, whose last is more than a fifth of one. 700 x 300 are long, and have 3 crops as wide as they are
    high. A square of 700 has none.
    """
    rule = model_from_config(STEP, "step", "config.json").vision_tower.image_rule  # type: ignore[union-attr]
    sizes = [rule.size_of(*sides) for sides in ((2000, 500), (700, 300), (700, 700))]
    assert [size.rows for size in sizes] == pytest.approx([2704 + 4 * 1296, 2704 + 3 * 1296, 2704])
    assert [size.tokens for size in sizes] == [169 + 4 * 81, 169 + 3 * 81, 169]
