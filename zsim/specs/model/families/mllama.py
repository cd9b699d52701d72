"""Llama 3.2 Vision: a decoder of Llama's, some of whose layers attend to the rows of an image.

Names, shapes and defaults as in transformers 5.24 (`modeling_mllama.py`, `configuration_mllama.py`,
`pack_images` of image_processing_mllama.py). Every sample has one image, filled up to the most tiles. Tables
of tiles are counted as parameters alone, and masks of tiles and tokens not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zsim.errors import NotSimulatedError
from zsim.operations.operation import Operation, Parameter
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    attention,
    attention_mlp_block,
    embedding,
    layer_norm,
    linear,
    replace_op_fields,
    residual,
    rms_norm,
    set_registration,
)
from zsim.specs.model.families.llama import (
    REGISTRATION,
    Shape,
    attention_modules,
    build_unique_blocks,
    decoder,
    gated_mlp,
    pre_norm_block,
)
from zsim.specs.model.families.tower_parts import clip_block, learned_scale, on_rows, patch_embedding
from zsim.specs.model.image_rules import ImageRule
from zsim.specs.model.spec import Block, ModelSpec, Module, Tower

_VISION = "model.vision_model"
_SIZES = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 40,
          "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
_CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
_SPARE_ROWS = 8  # of the embedding, for the token of images
_GATES = ("cross_attn_attn_gate", "cross_attn_mlp_gate")


def _rule(vision: ConfigReader) -> ImageRule:
    """An image's tiles, each with a class token."""
    side, patch = vision.side("image_size", 448), vision.side("patch_size", 14)
    return ImageRule(
        patch, 1, tile=side, max_tiles=vision.integer("max_num_tiles", 4), tiling="filled", class_tokens=1
    )


def mllama(config: ConfigReader) -> ModelSpec:
    """The language model. Raises NotSimulatedError without an image, where it leaves those layers out."""
    if not isinstance(config.values.get("vision_config"), Mapping):
        raise NotSimulatedError(
            f"{config.where}: Llama 3.2 Vision without images, whose layers of attention to them do not run, "
            "is not simulated; expected the config.json with its 'vision_config', and no text_only"
        )
    config = config.add_defaults(**_SIZES)
    shape, rule = Shape.read(config), _rule(config.nested("vision_config"))
    rows = round(rule.size_of(rule.tile, rule.tile).tokens)
    listed = config.integers("cross_attention_layers") or _CROSS_LAYERS

    def block(kind: str) -> Block:
        if kind == "self":
            return pre_norm_block("MllamaSelfAttentionDecoderLayer", shape, attention_modules(shape))
        return _cross_block(shape, rows, keeps_rows=kind == "first")

    kinds = ["first" if index == min(listed) else "cross" if index in listed else "self"
             for index in range(shape.layers)]  # fmt: skip
    model = decoder(config, shape, build_unique_blocks(kinds, block), max_positions=131_072)
    words = embedding("model.embed_tokens", shape.vocab + _SPARE_ROWS, shape.hidden)
    return replace(model, before=(words,))


def _cross_block(shape: Shape, rows: int, *, keeps_rows: bool) -> Block:
    """Attention to the rows of an image and a gated MLP, both multiplied by the tanh of a number."""
    root, keys = "cross_attn", shape.kv_heads * shape.head_dim
    core = attention(f"{root}.core", shape.heads, shape.kv_heads, shape.head_dim, rotary=False)
    images = [
        linear(f"{root}.k_proj", shape.hidden, keys, shares_input=not keeps_rows),
        linear(f"{root}.v_proj", shape.hidden, keys, shares_input=True),
        rms_norm(f"{root}.k_norm", shape.head_dim, rows_per_token=shape.kv_heads),
    ]
    attend = [
        linear(f"{root}.q_proj", shape.hidden, shape.heads * shape.head_dim),
        rms_norm(f"{root}.q_norm", shape.head_dim, rows_per_token=shape.heads),
        *(replace(module, sample_rows="merged") for module in images),
        replace_op_fields(core, is_causal=False, sample_keys=rows),
        linear(f"{root}.o_proj", shape.heads * shape.head_dim, shape.hidden),
        learned_scale(_GATES[0], shape.hidden, 1),
    ]
    mlp = [*gated_mlp("mlp", shape.hidden, shape.ffn, shape.act), learned_scale(_GATES[1], shape.hidden, 1)]
    norms = rms_norm("input_layernorm", shape.hidden), rms_norm("post_attention_layernorm", shape.hidden)
    adds = residual(f"{root}.residual", shape.hidden), residual("mlp.residual", shape.hidden)
    built = attention_mlp_block("MllamaCrossAttentionDecoderLayer", norms, attend, mlp, adds)
    products = (f"{root}.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
    mlp_names = [name for name in REGISTRATION if name.startswith("mlp.")]
    return set_registration(
        built, *_GATES, *products, "input_layernorm", *mlp_names, "post_attention_layernorm"
    )


def mllama_tower(config: ConfigReader, width: int) -> Tower:
    """Blocks of CLIP's on all rows of an image, behind which are further ones with gates. The projector reads
    outputs of several.
    """
    hidden, inner = config.integer("hidden_size", 1280), config.integer("intermediate_size", 5120)
    rule, act = _rule(config), config.activation("hidden_act", "gelu")
    config = replace(config, aliases={"num_attention_heads": ("attention_heads",)})
    output, patch = config.integer("vision_output_dim", 7680), rule.patch
    local, further = (
        clip_block(
            config, "MllamaVisionEncoderLayer", hidden, inner, act, heads=16, bias=False, scale_width=1,
            norms=("input_layernorm", "post_attention_layernorm"), registers_norms="last",
            products=("q_proj", "k_proj", "v_proj", "o_proj"), scales=scales,
        )
        for scales in ((), ("gate_attn", "gate_ffn"))
    )  # fmt: skip
    counts = config.num_blocks("num_hidden_layers", 32), config.num_blocks("num_global_layers", 8)
    rows, ratios = (
        (rule.tile // patch) ** 2 + 1,
        len(config.values.get("supported_aspect_ratios") or [0] * 8) + 1,
    )
    positions, tiles = f"{_VISION}.gated_positional_embedding", rule.max_tiles * hidden
    gate = Parameter("gate", (1,))
    added = {
        f"{_VISION}.pre_tile_positional_embedding": (gate, Parameter("embedding.weight", (ratios, tiles))),
        positions: (
            gate, Parameter("embedding", (rows, hidden)),
            Parameter("tile_embedding.weight", (ratios, rows * tiles)),
        ),
        f"{_VISION}.post_tile_positional_embedding": (gate, Parameter("embedding.weight", (ratios, tiles))),
    }  # fmt: skip
    before, middle, last = (
        Module(name, residual("", hidden).op_spec, owned) for name, owned in added.items()
    )
    class_token = Module(
        f"{_VISION}.class_token",
        Operation(),
        (Parameter("class_embedding", (hidden,)),),
        parameter_owner=_VISION,
    )
    projector = linear("model.multi_modal_projector", output, width, bias=True)
    return Tower(
        before=tuple(
            on_rows(module, "patches")
            for module in (
                class_token,
                patch_embedding(f"{_VISION}.patch_embedding", (patch, patch), hidden, bias=False),
                before, middle, layer_norm(f"{_VISION}.layernorm_pre", hidden),
            )
        ),
        blocks=(*(local,) * counts[0], *(further,) * counts[1]),
        after=(
            on_rows(layer_norm(f"{_VISION}.layernorm_post", hidden), "patches"),
            on_rows(last, "patches"),
            on_rows(residual(f"{_VISION}.outputs", output), "patches"),
            on_rows(projector, "merged"),
        ),
        block_prefix=f"{_VISION}.transformer.layers",
        block_names=tuple(
            f"{_VISION}.{name}.layers.{number}"
            for name, count in zip(("transformer", "global_transformer"), counts, strict=True)
            for number in range(count)
        ),
        hidden_size=hidden,
        rule=rule,
        is_attended=True,
    )  # fmt: skip
