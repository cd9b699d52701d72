"""Vision towers on tiles and padded images: CLIP (LLaVA, MiniMax M3), SigLIP (PaliGemma, Gemma 3,
Idefics 3, SmolVLM, LFM2-VL, LLaVA-OneVision, Cohere), Gemma 4's, InternViT, Llama 4's and Step 3.7's.

Names, shapes and defaults as in transformers 5.24 (`modeling_*.py` and `configuration_*.py` of each). The
bounds of pixels are those of the checkpoints' `preprocessor_config.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from zsim.errors import NotSimulatedError
from zsim.operations.embedding import Embedding
from zsim.operations.operation import Parameter
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families import gemma4
from zsim.specs.model.families.builders import (
    activation,
    embedding,
    layer_norm,
    linear,
    plain_mlp,
    replace_op_fields,
    residual,
    rms_norm,
    separate_qkv,
    set_registration,
)
from zsim.specs.model.families.tower_parts import (
    check_feature_layer,
    clip_block,
    clipped_linear,
    learned_scale,
    on_rows,
    patch_embedding,
    product_names,
    projector_modules,
    tower_block,
    tower_core,
    two_products,
)
from zsim.specs.model.image_rules import ImageRule
from zsim.specs.model.spec import Linear, Module, Norm, Tower

_VISION = "model.vision_tower"
_PROJECTOR = "multi_modal_projector"
_GEMMA4_TOKENS = 280  # of an image, `max_soft_tokens` of image_processing_gemma4.py


def siglip_tower(config: ConfigReader, width: int) -> Tower:
    """Gemma 3's: SigLIP on 896 x 896 pixels, whose patches are averaged to 256 tokens."""
    hidden, patch = config.integer("hidden_size", 768), config.integer("patch_size", 16)
    side, root = config.integer("image_size", 224), f"model.{_PROJECTOR}"
    if side // patch < 16:
        raise config.error(
            f"'image_size' {side:,} has {side // patch} x {side // patch} patches of {patch}, which are "
            f"averaged to 16 x 16 tokens; expected at least {16 * patch:,}, or model.text_only = true for "
            "the language model alone"
        )
    weight = Parameter("mm_input_projection_weight", (hidden, width))
    product = Module(f"{root}.mm_input_projection", Linear(hidden, width), (weight,), parameter_owner=root)
    projector = [rms_norm(f"{root}.mm_soft_emb_norm", hidden, kind="gemma_rms"), product]
    rule = ImageRule(patch, side // patch // 16, tile=side)  # 256 tokens in all
    return _siglip(config, width, projector, rule)


def paligemma_tower(config: ConfigReader, width: int) -> Tower:
    """PaliGemma's: SigLIP, of which every patch is a token."""
    config.check_width("projection_dim", 2048, width)
    projector = linear(f"model.{_PROJECTOR}.linear", config.integer("hidden_size", 768), width, bias=True)
    rule = ImageRule(config.integer("patch_size", 16), 1, tile=config.integer("image_size", 224))
    return _siglip(config, width, [projector], rule)


def cohere_tower(config: ConfigReader, width: int) -> Tower:
    """Aya Vision's and Command A Vision's: SigLIP on tiles, four patches shuffled to a token, and a product
    of which one half is the other's gate. Aya's tokens are normed before it.
    """
    check_feature_layer(config)
    root, is_aya = f"model.{_PROJECTOR}", config.family == "aya_vision"
    merge = config.integer("downsample_factor", 2)
    merged = config.integer("hidden_size", 768) * merge**2
    inner = config.integer("alignment_intermediate_size", width if is_aya else 36_864)
    projector = [
        *([layer_norm(f"{root}.layernorm", merged)] if is_aya else []),
        linear(f"{root}.linear_1", merged, inner, bias=True),
        activation(f"{root}.act", inner // 2, "silu", gated=True),
        linear(f"{root}.linear_2", inner // 2, width, bias=True),
    ]
    rule = ImageRule(
        config.side("patch_size", 16), merge, tile=config.side("image_size", 224), max_tiles=12,
        tiling="nearest aspect" if is_aya else "largest scale",
    )  # fmt: skip
    return _siglip(config, width, projector, rule)


def lfm2_vl_tower(config: ConfigReader, width: int) -> Tower:
    """LFM2-VL's: SigLIP 2 on tiles and small images, all with the rows of a tile, and four patches a token.
    Scaling its table of positions is priced as reading it.
    """
    hidden, merge = config.integer("hidden_size", 768), config.integer("downsample_factor", 2)
    inner, has_bias = config.integer("projector_hidden_size", 2560), config.boolean("projector_bias", True)
    root, merged = f"model.{_PROJECTOR}", hidden * merge**2
    has_norm = config.boolean("projector_use_layernorm", True)
    act = config.activation("projector_hidden_act", "gelu")
    projector = [
        *([layer_norm(f"{root}.layer_norm", merged)] if has_norm else []),
        *two_products(product_names(f"{root}."), merged, inner, width, act=act, bias=has_bias),
    ]
    patch = config.side("patch_size", 16)
    token = (merge * patch) ** 2
    rule = ImageRule(
        patch, merge, 64 * token, 256 * token, tile=512, max_tiles=10, tiling="nearest aspect", min_tiles=2
    )
    return _siglip(config, width, projector, rule, kind="Siglip2", rows=config.integer("num_patches", 256))


def _siglip(
    config: ConfigReader,
    width: int,
    projector: list[Module],
    rule: ImageRule,
    *,
    kind: str = "Siglip",
    root: str = _VISION,
    rows: int = 0,
) -> Tower:
    """SigLIP, whose patches have learned positions. With `rows` of those it multiplies patches that are cut
    already.
    """
    if config.boolean("vision_use_head", True):
        raise NotSimulatedError(
            f"{config.where}: 'vision_use_head' is not false: a tower with a pooling head, which a language "
            "model does not use, is not simulated; expected false, as the checkpoints say"
        )
    hidden, inner = config.integer("hidden_size", 768), config.integer("intermediate_size", 3072)
    act, patch = config.activation("hidden_act", "gelu_pytorch_tanh"), rule.patch
    block = clip_block(
        config, f"{kind}EncoderLayer", hidden, inner, act, heads=12,
        registers_norms="before" if root == _VISION else "behind",
    )  # fmt: skip
    norm = layer_norm(f"{root}.post_layernorm", hidden)
    names = [
        f"{root}.embeddings.{name}" for name in ("patch_embedding", "position_embedding", "add_positions")
    ]
    table = embedding(names[1], rows or (rule.tile // patch) ** 2, hidden)
    kernel = (patch * patch,) if rows else (patch, patch)
    return Tower(
        before=(
            patch_embedding(names[0], kernel, hidden, is_flat=bool(rows)),
            on_rows(table, "patches"),
            on_rows(residual(names[2], hidden), "patches"),
        ),
        blocks=(block,) * config.num_blocks("num_hidden_layers", 12),
        after=projector_modules([norm, *projector], width, [norm.name]),
        block_prefix=f"{root}.encoder.layers",
        hidden_size=hidden,
        rule=rule,
    )


def internvit_tower(config: ConfigReader, width: int) -> Tower:
    """InternVL's: tiles with a class token, branches scaled by learned vectors, patches shuffled four to a
    token.
    """
    hidden, heads = config.integer("hidden_size", 1024), config.integer("num_attention_heads", 16)
    patch, side = config.side("patch_size", 14), config.side("image_size", 448)
    kind = config.string("norm_type", "layer_norm")
    norm = rms_norm if kind == "rms_norm" else layer_norm
    has_bias = config.boolean("attention_bias", False)
    norms = [
        rms_norm(f"attention.{name}_norm", hidden) for name in "qk" if config.boolean("use_qk_norm", False)
    ]
    act = config.activation("hidden_act", "gelu")
    modules = [
        norm("layernorm_before", hidden),
        *separate_qkv("attention", hidden, bias=has_bias),
        *norms,
        replace_op_fields(tower_core("attention.core", heads, hidden, rotary=False), upcasts_softmax=False),
        linear("attention.projection_layer", hidden, hidden, bias=True),
        learned_scale("lambda_1", hidden),
        residual("attention.residual", hidden),
        norm("layernorm_after", hidden),
        *plain_mlp(
            ("mlp.fc1", "mlp.activation_fn", "mlp.fc2"),
            hidden,
            config.integer("intermediate_size", 4096),
            act,
        ),
        learned_scale("lambda_2", hidden),
        residual("mlp.residual", hidden),
    ]
    block = set_registration(
        tower_block("InternVLVisionLayer", modules, "patches"),
        "lambda_1", "lambda_2", "attention.q_proj", "attention.k_proj", "attention.v_proj",
        "attention.projection_layer", "attention.q_norm", "attention.k_norm", "mlp.fc1", "mlp.fc2",
        "layernorm_before", "layernorm_after",
    )  # fmt: skip
    root, merged = f"{_VISION}.embeddings", 4 * hidden
    rows = {
        "cls_token": 1,
        "mask_token": int(config.boolean("use_mask_token", False)),
        "position_embeddings": (side // patch) ** 2 + 1
        if config.boolean("use_absolute_position_embeddings", True)
        else 0,
    }
    embeddings = Module(
        f"{root}.position_embeddings",
        residual("", hidden).op_spec,
        tuple(Parameter(name, (1, count, hidden)) for name, count in rows.items() if count),
        parameter_owner=root,
    )
    has_norm = not config.boolean("use_mean_pooling", True)
    final = [layer_norm(f"{_VISION}.layernorm", hidden)] if has_norm else []
    root_projector = f"model.{_PROJECTOR}"
    projector = [
        layer_norm(f"{root_projector}.layer_norm", merged),
        *two_products(product_names(f"{root_projector}."), merged, width, width),
    ]
    return Tower(
        before=(
            on_rows(embeddings, "patches"),
            patch_embedding(f"{root}.patch_embeddings.projection", (patch, patch), hidden),
        ),
        blocks=(block,) * config.integer("num_hidden_layers", 24),
        after=projector_modules([*final, *projector], width, [module.name for module in final]),
        block_prefix=f"{_VISION}.encoder.layer",
        hidden_size=hidden,
        rule=ImageRule(patch, 2, tile=side, max_tiles=12, tiling="nearest aspect", class_tokens=1),
    )


def llama4_tower(config: ConfigReader, width: int) -> Tower:
    """Llama 4's: tiles of 336 x 336 pixels with a class token, and an adapter before the projector."""
    hidden, inner = config.integer("hidden_size", 768), config.integer("intermediate_size", 5632)
    patch, side = config.integer("patch_size", 14), config.integer("image_size", 448)
    block = clip_block(
        config, "Llama4VisionEncoderLayer", hidden, inner, "gelu", heads=16, rotary=True,
        norms=("input_layernorm", "post_attention_layernorm"), registers_norms="last",
        products=("q_proj", "k_proj", "v_proj", "o_proj"),
    )  # fmt: skip
    root, rows = "vision_model", (side // patch) ** 2 + 1
    embeddings = Module(
        f"{root}.positions",
        residual("", hidden).op_spec,
        (Parameter("class_embedding", (hidden,)), Parameter("positional_embedding_vlm", (rows, hidden))),
        parameter_owner=root,
    )
    adapted, output = config.integer("projector_output_dim", 4096), config.integer("vision_output_dim", 7680)
    norm = layer_norm(f"{root}.layernorm_post", hidden)
    ratio = config.number("pixel_shuffle_ratio", 0.5)
    names = tuple(f"{root}.vision_adapter.mlp.{name}" for name in ("fc1", "act", "fc2", "act_2"))
    shuffled = config.integer("projector_input_dim", 4096)
    adapter = [
        linear(names[0], inner, shuffled),
        activation(names[1], shuffled, "gelu"),
        linear(names[2], adapted, adapted),
        activation(names[3], adapted, "gelu"),
        linear(f"{_PROJECTOR}.linear_1", output, width),
    ]
    return Tower(
        before=(
            on_rows(embeddings, "patches"),
            patch_embedding(
                f"{root}.patch_embedding.linear", (patch * patch,), hidden, bias=False, is_flat=True
            ),
            on_rows(layer_norm(f"{root}.layernorm_pre", hidden), "patches"),
        ),
        blocks=(block,) * config.integer("num_hidden_layers", 34),
        after=projector_modules([norm, *adapter], width, [norm.name]),
        block_prefix=f"{root}.model.layers",
        hidden_size=hidden,
        rule=ImageRule(
            patch, round(1 / ratio), tile=side, max_tiles=16, tiling="largest scale", class_tokens=1
        ),
    )


def gemma4_tower(config: ConfigReader, width: int) -> Tower:
    """Gemma 4's, with rotary positions, norms on queries, keys and values, and rows for the largest image in
    each. Its average over squares of patches, a product in fp32 of about a hundredth of the tower, is not
    counted.
    """
    hidden, patch = config.integer("hidden_size", 768), config.integer("patch_size", 16)
    heads, groups = config.integer("num_attention_heads", 12), config.integer("num_key_value_heads", 12)
    config.check_kv_heads(heads, groups)
    head, inner = config.integer("head_dim", 64), config.integer("intermediate_size", 3072)
    act = config.activation("hidden_activation", "gelu_pytorch_tanh")
    product = partial(clipped_linear, is_clipped=config.boolean("use_clipped_linears", False))

    def norm(name: str) -> Module:
        return rms_norm(name, hidden, kind=gemma4.NORM)

    core = tower_core("self_attn.core", heads, hidden, groups=groups, head_dim=head)
    modules = [
        norm("input_layernorm"),
        *product("self_attn.q_proj", hidden, heads * head),
        rms_norm("self_attn.q_norm", head, rows_per_token=heads, kind=gemma4.NORM),
        *product("self_attn.k_proj", hidden, groups * head, shares_input=True),
        rms_norm("self_attn.k_norm", head, rows_per_token=groups, kind=gemma4.NORM),
        *product("self_attn.v_proj", hidden, groups * head, shares_input=True),
        Module("self_attn.v_norm", Norm(groups * head, "l2")),
        core,
        *product("self_attn.o_proj", heads * head, hidden),
        norm("post_attention_layernorm"),
        residual("self_attn.residual", hidden),
        norm("pre_feedforward_layernorm"),
        *product("mlp.gate_proj", hidden, inner),
        *product("mlp.up_proj", hidden, inner, shares_input=True),
        activation("mlp.act_fn", inner, act, gated=True),
        *product("mlp.down_proj", inner, hidden),
        norm("post_feedforward_layernorm"),
        residual("mlp.residual", hidden),
    ]
    block = set_registration(
        tower_block("Gemma4VisionEncoderLayer", modules, "patches"),
        *(f"self_attn.{name}_proj.linear" for name in "qkvo"), "self_attn.q_norm", "self_attn.k_norm",
        *(f"mlp.{name}_proj.linear" for name in ("gate", "up", "down")), "input_layernorm",
        "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip
    root, rows = f"{_VISION}.patch_embedder", config.integer("position_embedding_size", 10_240)
    positions = Module(
        f"{root}.positions",
        Embedding(2 * rows, hidden),
        (Parameter("position_embedding_table", (2, rows, hidden)),),
        parameter_owner=root,
        rows_per_token=2.0,
    )
    merge = config.integer("pooling_kernel_size", 3)
    projected = [
        Module("model.embed_vision.embedding_pre_projection_norm", Norm(hidden, "l2")),
        linear("model.embed_vision.embedding_projection", hidden, width),
    ]
    return Tower(
        before=(
            on_rows(positions, "patches"),
            patch_embedding(f"{root}.input_proj", (patch * patch,), hidden, bias=False, is_flat=True),
            on_rows(residual(f"{root}.add_positions", hidden), "patches"),
        ),
        blocks=(block,) * config.num_blocks("num_hidden_layers", 16),
        after=projector_modules(projected, width, []),
        block_prefix=f"{_VISION}.encoder.layers",
        hidden_size=hidden,
        rule=ImageRule(patch, merge, 0, _GEMMA4_TOKENS * (merge * patch) ** 2, resizing="fills"),
    )


def gemma4_unified_tower(config: ConfigReader, width: int) -> Tower:
    """Gemma 4 12B's, which has no blocks: a product of each square of patches, and norms around it. All its
    modules see the padding to `max_soft_tokens`.
    """
    hidden, root = config.integer("mm_embed_dim", 3840), "model.embed_vision"
    config.check_width("output_proj_dims", 3840, hidden, "tower")
    side = config.integer("patch_size", 16) * config.integer("pooling_kernel_size", 3)
    features = 3 * side * side
    positions = Module(
        f"{root}.positions",
        Embedding(2 * config.integer("mm_posemb_size", 1120), hidden),
        (Parameter("pos_embedding", (config.integer("mm_posemb_size", 1120), 2, hidden)),),
        parameter_owner=root,
        rows_per_token=2.0,
    )
    embedder = f"{root}.multimodal_embedder"
    modules = [
        positions,
        replace(layer_norm(f"{root}.patch_ln1", features), input_gradient=False),
        linear(f"{root}.patch_dense", features, hidden, bias=True),
        layer_norm(f"{root}.patch_ln2", hidden),
        residual(f"{root}.add_positions", hidden),
        layer_norm(f"{root}.pos_norm", hidden),
        Module(f"{embedder}.embedding_pre_projection_norm", Norm(hidden, "l2")),
        linear(f"{embedder}.embedding_projection", hidden, width),
    ]
    return Tower(
        before=(),
        blocks=(),
        after=projector_modules(modules, width, [module.name for module in modules]),
        block_prefix=root,
        hidden_size=hidden,
        rule=ImageRule(side, 1, 0, _GEMMA4_TOKENS * side**2, resizing="fills"),
    )


def llava_tower(config: ConfigReader, width: int) -> Tower:
    """LLaVA 1.5's: CLIP on 336 x 336 pixels with a class token, which the projector does not see. What comes
    behind the layer that it reads (`vision_feature_layer`) is counted as if it were read too.
    """
    check_feature_layer(config)
    if (strategy := config.string("vision_feature_select_strategy", "default")) != "default":
        raise config.error(f"'vision_feature_select_strategy' is '{strategy}'; expected 'default'")
    hidden, inner = config.integer("hidden_size", 768), config.integer("intermediate_size", 3072)
    patch, side = config.integer("patch_size", 32), config.integer("image_size", 224)
    block = clip_block(
        config, "CLIPEncoderLayer", hidden, inner, config.activation("hidden_act", "quick_gelu"), heads=12
    )
    has_bias = config.boolean("multimodal_projector_bias", True)
    root, projector = f"{_VISION}.embeddings", f"model.{_PROJECTOR}"
    projector_act = config.activation("projector_hidden_act", "gelu")
    class_token = Module(
        f"{root}.class_token",
        residual("", hidden).op_spec,
        (Parameter("class_embedding", (hidden,)),),
        parameter_owner=root,
    )
    norm = layer_norm(f"{_VISION}.post_layernorm", hidden)
    after = [
        norm,
        *two_products(product_names(f"{projector}."), hidden, width, width, act=projector_act, bias=has_bias),
    ]
    return Tower(
        before=(
            on_rows(class_token, "patches"),
            patch_embedding(f"{root}.patch_embedding", (patch, patch), hidden, bias=False),
            on_rows(embedding(f"{root}.position_embedding", (side // patch) ** 2 + 1, hidden), "patches"),
            on_rows(layer_norm(f"{_VISION}.pre_layrnorm", hidden), "patches"),
        ),
        blocks=(block,) * config.num_blocks("num_hidden_layers", 12),
        after=projector_modules(after, width, [norm.name]),
        block_prefix=f"{_VISION}.encoder.layers",
        hidden_size=hidden,
        rule=ImageRule(patch, 1, tile=side, class_tokens=1),
    )


def llava_next_tower(config: ConfigReader, width: int) -> Tower:
    """LLaVA-NeXT's (LLaVA 1.6's): LLaVA 1.5's on all of an image and on tiles of it."""
    sides = (1, 2), (2, 1), (2, 2), (3, 1), (1, 3)
    return _add_canvases(config, llava_tower(config, width), width, sides)


def llava_onevision_tower(config: ConfigReader, width: int) -> Tower:
    """LLaVA-OneVision's: SigLIP on all of an image and on tiles of it. Of samples with several images, which
    it does not cut into tiles, it is counted as if they were alone.
    """
    has_bias = config.boolean("multimodal_projector_bias", True)
    act = config.activation("projector_hidden_act", "gelu")
    names, hidden = product_names(f"model.{_PROJECTOR}."), config.integer("hidden_size", 768)
    projector = two_products(names, hidden, width, width, act=act, bias=has_bias)
    rule = ImageRule(config.integer("patch_size", 16), 1, tile=config.integer("image_size", 224))
    sides = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
    area = config.string("vision_aspect_ratio", "anyres_max_9")
    if not (most := area.removeprefix("anyres_max_")).isdecimal():
        raise config.error(f"'vision_aspect_ratio' is '{area}'; expected 'anyres_max_9' or another number")
    tower = _siglip(config, width, projector, rule)
    return _add_canvases(config, tower, width, sides, max_area=int(most))


def _add_canvases(
    config: ConfigReader, tower: Tower, width: int, sides: Sequence[tuple[int, int]], *, max_area: int = 0
) -> Tower:
    """The tower on tiles of the canvases in the file, or of those with so many tiles on their `sides`. Its
    projector sees padding too, and a parameter of the model ends rows of tokens.
    """
    rule, key = tower.image_rule, "image_grid_pinpoints"
    default = [[rule.tile * side for side in canvas] for canvas in sides]
    canvases = default if (value := config.values.get(key)) is None else value
    if not isinstance(canvases, list) or not all(
        isinstance(canvas, list) and len(canvas) == 2 and all(isinstance(side, int) for side in canvas)
        for canvas in canvases
    ):
        raise config.error(f"'{key}' is {canvases!r}; expected a list of heights and widths")
    newline = (Parameter("image_newline", (width,)),)
    return replace(
        tower,
        after=(
            *(on_rows(module, "patches") for module in tower.after[:-1]),
            replace(tower.after[-1], parameters=newline, parameter_owner="model"),
        ),
        rule=replace(rule, canvases=tuple(map(tuple, canvases)), max_area=max_area),
    )


def idefics3_tower(config: ConfigReader, width: int) -> Tower:
    """Idefics 3's and SmolVLM's: SigLIP on tiles, four on the longer side of an image, and one product of
    squares of patches.
    """
    config = config.add_defaults(hidden_size=1152, num_attention_heads=16, vision_use_head=False)
    scale, name = config.integer("scale_factor", 2), "model.connector.modality_projection.proj"
    projector = linear(name, config.integer("hidden_size") * scale**2, width)
    patch, side = config.side("patch_size", 32), config.side("image_size", 224)
    rule = ImageRule(patch, scale, tile=side, max_tiles=4, tiling="longer side")
    kind = "Idefics3" if config.family == "idefics3" else "SmolVLM"
    return _siglip(config, width, [projector], rule, kind=kind, root="model.vision_model")


def minimax_m3_tower(config: ConfigReader, width: int) -> Tower:
    """MiniMax M3's: CLIP with rotary positions on images of any size taken as two frames, and a projector of
    patches before one of squares of four.
    """
    hidden, inner = config.integer("hidden_size", 1280), config.integer("intermediate_size", 5120)
    patch, merge = config.side("patch_size", 14), config.integer("spatial_merge_size", 2)
    act, frames = config.activation("hidden_act", "gelu"), config.integer("temporal_patch_size", 2)
    block = clip_block(config, "MiniMaxM3VLVisionEncoderLayer", hidden, inner, act, heads=16, rotary=True)
    root, projected = f"model.{_PROJECTOR}", config.integer("projector_hidden_size", 6144)
    first = two_products(product_names(f"{root}."), hidden, projected, width)
    after = [*first, *two_products(product_names(f"{root}.merge_"), merge**2 * width, projected, width)]
    return Tower(
        before=(
            patch_embedding(f"{_VISION}.embeddings.proj", (frames, patch, patch), hidden, bias=False),
            on_rows(layer_norm(f"{_VISION}.pre_layrnorm", hidden), "patches"),
        ),
        blocks=(block,) * config.num_blocks("num_hidden_layers", 32),
        after=projector_modules(after, width, [module.name for module in first]),
        block_prefix=f"{_VISION}.layers",
        hidden_size=hidden,
        rule=ImageRule(patch, merge, 4 * 28 * 28, 451_584),
    )


def step3p7_tower(config: ConfigReader, width: int) -> Tower:
    """Step 3.7's: all of an image and its crops, branches scaled by learned vectors, and two convolutions
    that halve the sides.
    """
    names = {"hidden_size": ("width",), "num_hidden_layers": ("layers",), "num_attention_heads": ("heads",)}
    config = replace(config, aliases=names)
    hidden = config.integer("hidden_size", 1536)
    inner = int(hidden * config.number("mlp_ratio", 8960 / 1536))
    patch, side = config.integer("patch_size", 14), config.integer("image_size", 728)
    block = clip_block(
        config, "Step3p7VisionEncoderLayer", hidden, inner, config.activation("hidden_act", "quick_gelu"),
        heads=16, rotary=True, norms=("layernorm_before", "layernorm_after"), registers_norms="last",
        scales=("lambda_1", "lambda_2"),
    )  # fmt: skip
    root = "model.vision_model"
    downsamplers = [
        Module(
            f"{root}.downsampler{number}",
            Linear(9 * features, 2 * features, overlap=9 / 4),
            (Parameter("weight", (2 * features, features, 3, 3)), Parameter("bias", (2 * features,))),
            rows_per_token=0.25**number,
        )
        for number, features in ((1, hidden), (2, 2 * hidden))
    ]
    projector = linear(f"model.{_PROJECTOR}", 4 * hidden, width, bias=config.boolean("projector_bias", False))
    return Tower(
        before=(
            patch_embedding(f"{root}.embeddings.patch_embedding", (patch, patch), hidden, bias=False),
            on_rows(
                embedding(f"{root}.embeddings.position_embedding", (side // patch) ** 2, hidden), "patches"
            ),
            on_rows(residual(f"{root}.embeddings.add_positions", hidden), "patches"),
            on_rows(layer_norm(f"{root}.pre_layernorm", hidden), "patches"),
        ),
        blocks=(block,) * config.num_blocks("num_hidden_layers", 47),
        after=projector_modules([*downsamplers, projector], width, [module.name for module in downsamplers]),
        block_prefix=f"{root}.layers",
        hidden_size=hidden,
        rule=ImageRule(patch, 4, tile=side, crop=504, max_side=3024),
    )
