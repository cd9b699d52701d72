"""Vision towers without tiles: Qwen2-VL's to Qwen 3.6's, GLM-4.1V's to 4.6V's and GLM-OCR's, MoonViT (Kimi)
and Pixtral (Mistral).

Names, shapes and defaults as in transformers 5.24 (`modeling_qwen2_vl.py`, `modeling_qwen2_5_vl.py`,
`modeling_qwen3_vl.py`, `modeling_qwen3_5.py`, `modeling_glm4v.py`, `modeling_glm_ocr.py`,
`modeling_kimi_k25.py`, `modeling_pixtral.py` and their `configuration_*.py`). The bounds of pixels are those
of the checkpoints' `preprocessor_config.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.operations.embedding import Embedding
from zsim.operations.operation import Parameter
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    embedding,
    layer_norm,
    linear,
    plain_mlp,
    residual,
    rms_norm,
    separate_qkv,
    set_registration,
)
from zsim.specs.model.families.llama import build_unique_blocks, gated_mlp
from zsim.specs.model.families.tower_parts import (
    check_feature_layer,
    on_rows,
    patch_embedding,
    product_names,
    projector_modules,
    tower_block,
    tower_core,
    two_products,
)
from zsim.specs.model.image_rules import ImageRule
from zsim.specs.model.spec import Block, Linear, Module, Tower
from zsim.specs.strategy.images import SampleRows

_VISUAL = "model.visual"
_MERGER = ("norm", "linear_fc1", "act_fn", "linear_fc2")
_OMNI_MERGER = ("ln_q", "mlp.0", "mlp.1", "mlp.2")  # Qwen2-VL's and Qwen2.5-VL's too


def qwen2_vl_tower(config: ConfigReader, width: int) -> Tower:
    """Qwen2-VL's, with attention within images and no learned positions."""
    hidden = config.integer("embed_dim", 1280)
    inner = round(hidden * config.number("mlp_ratio", 4.0))
    act = config.activation("hidden_act", "quick_gelu")
    mlp = plain_mlp(("mlp.fc1", "mlp.act", "mlp.fc2"), hidden, inner, act)
    block = _qwen_block(config, "Qwen2VLVisionBlock", hidden, mlp)
    return _qwen_tower(config, hidden, [block] * config.num_blocks("depth"), width, 14, (3136, 12_845_056))


def qwen2_5_vl_tower(config: ConfigReader, width: int) -> Tower:
    """Qwen2.5-VL's: RMSNorm and a gated MLP, attention within windows but for a few layers."""
    hidden, inner = config.integer("hidden_size", 3584), config.integer("intermediate_size", 3420)
    mlp = gated_mlp("mlp", hidden, inner, config.activation("hidden_act", "silu"), bias=True)
    depth, full = config.integer("depth", 32), config.integers("fullatt_block_indexes") or [7, 15, 23, 31]

    def block(rows: SampleRows) -> Block:
        return _qwen_block(config, "Qwen2_5_VLVisionBlock", hidden, mlp, norm="rms", rows=rows)

    kinds: list[SampleRows] = ["patches" if index in full else "windows" for index in range(depth)]
    blocks = build_unique_blocks(kinds, block)
    window = config.integer("window_size", 112)
    return _qwen_tower(config, hidden, blocks, width, 14, (3136, 12_845_056), norm="rms", window=window)


def qwen3_vl_tower(config: ConfigReader, width: int) -> Tower:
    """Qwen3-VL's and Qwen 3.5's, with learned positions between which it interpolates. In Qwen3-VL layers in
    the middle have mergers too, whose features are added to the language model's first layers.
    """
    hidden, inner = config.integer("hidden_size", 1152), config.integer("intermediate_size", 4304)
    act = config.activation("hidden_act", "gelu_pytorch_tanh")
    mlp = plain_mlp(("mlp.linear_fc1", "mlp.act_fn", "mlp.linear_fc2"), hidden, inner, act)
    block = _qwen_block(config, "Qwen3VLVisionBlock", hidden, mlp)
    blocks = [block] * config.integer("depth", 27)
    is_omni = config.family.startswith("qwen3_omni")
    tower = _qwen_tower(
        config, hidden, blocks, width, 16, (65_536, 16_777_216), names=_OMNI_MERGER if is_omni else _MERGER
    )
    positions = embedding(f"{_VISUAL}.pos_embed", config.integer("num_position_embeddings", 2304), hidden)
    interpolation = [
        replace(on_rows(positions, "patches"), rows_per_token=4.0),
        on_rows(residual(f"{_VISUAL}.add_positions", hidden), "patches"),
    ]
    merged = hidden * config.integer("spatial_merge_size", 2) ** 2
    deep: list[Module] = []
    count = len(config.integers(layers)) if (layers := "deepstack_visual_indexes") in config.values else 3
    count = 0 if config.family.startswith("qwen3_5") else count
    for number in range(count):
        root = f"{_VISUAL}.{'merger_list' if is_omni else 'deepstack_merger_list'}.{number}"
        deep += _merger(root, merged, merged, width, _OMNI_MERGER if is_omni else _MERGER)
    after = (*tower.after[:-1], *(on_rows(module, "merged") for module in deep), tower.after[-1])
    before = (*tower.before, *interpolation)
    return replace(tower, before=before, after=after, num_deep_features=count)


def _qwen_tower(
    config: ConfigReader,
    hidden: int,
    blocks: Sequence[Block],
    width: int,
    patch: int,
    pixels: tuple[int, int],
    *,
    norm: str = "layer",
    window: int = 0,
    names: Sequence[str] = _OMNI_MERGER,
) -> Tower:
    """Patches of two frames (an image is taken twice), the blocks, and a merger of squares of patches."""
    patch, merge = config.side("patch_size", patch), config.integer("spatial_merge_size", 2)
    key = "hidden_size" if config.family == "qwen2_vl" else "out_hidden_size"
    config.check_width(key, 3584, width)
    frames, is_qwen3 = config.integer("temporal_patch_size", 2), config.family.startswith("qwen3")
    merged = hidden * merge**2
    merger = _merger(f"{_VISUAL}.merger", hidden, merged, width, names, norm=norm)
    return Tower(
        before=(
            patch_embedding(f"{_VISUAL}.patch_embed.proj", (frames, patch, patch), hidden, bias=is_qwen3),
        ),
        blocks=tuple(blocks),
        after=projector_modules(merger, width, [merger[0].name]),
        block_prefix=f"{_VISUAL}.blocks",
        hidden_size=hidden,
        rule=ImageRule(patch, merge, *pixels, window),
    )


def _qwen_block(
    config: ConfigReader,
    kind: str,
    hidden: int,
    mlp: Sequence[Module],
    *,
    norm: str = "layer",
    rows: SampleRows = "patches",
    heads: int = 16,
    biases: tuple[bool, bool] = (True, True),
    has_norms: bool = False,
) -> Block:
    """A block with one product to queries, keys and values. `heads` is the family's default, `biases` those
    of the products before and after attention. With `has_norms` each head of queries and keys is normed.
    """
    heads = config.integer("num_heads", heads)
    first = rms_norm if norm == "rms" else layer_norm
    groups = config.integer("num_key_value_heads", 8) if config.family == "exaone4_5" else heads
    head = config.head_dim(hidden, heads)
    config.check_kv_heads(heads, groups)
    products = [linear("attn.qkv", hidden, hidden + 2 * groups * head, bias=biases[0])]
    if config.family.startswith("qwen2_5_omni"):
        products = [
            linear(f"attn.{name}", hidden, hidden, bias=biases[0], shares_input=name != "q") for name in "qkv"
        ]
    core = tower_core("attn.core", heads, hidden, groups=groups, splits_fused_qkv=len(products) == 1)
    norms = [
        rms_norm(f"attn.{name}_norm", head, rows_per_token=rows)
        for name, rows in (("q", heads), ("k", groups))
        if has_norms
    ]
    modules = [
        first("norm1", hidden),
        *products,
        *norms,
        core,
        linear("attn.proj", hidden, hidden, bias=biases[1]),
        residual("attn.residual", hidden),
        first("norm2", hidden),
        *mlp,
        residual("mlp.residual", hidden),
    ]
    attention = (*products, modules[modules.index(core) + 1], *norms)
    names = (*(module.name for module in attention), *(m.name for m in mlp if m.parameters))
    return set_registration(tower_block(kind, modules, rows), "norm1", "norm2", *names)


def _merger(
    root: str, normed: int, merged: int, width: int, names: Sequence[str], *, norm: str = "layer"
) -> list[Module]:
    """A norm of `normed` features and two products, with these `names`."""
    first = rms_norm if norm == "rms" else layer_norm
    full = [f"{root}.{name}" for name in names]
    return [first(full[0], normed), *two_products((full[1], full[2], full[3]), merged, merged, width)]


def glm_ocr_tower(config: ConfigReader, width: int) -> Tower:
    """GLM-OCR's: GLM-4.1V's with norms of queries and keys, biases and an MLP of its own width, without a
    norm behind the patches and a table of positions.
    """
    config = config.add_defaults(
        hidden_size=1024, intermediate_size=4096, out_hidden_size=1536, num_heads=16, attention_bias=True
    )
    inner, act = config.integer("intermediate_size"), config.activation("hidden_act", "silu")
    tower = glm4v_tower(config.override(intermediate_size=3 * config.integer("out_hidden_size")), width)
    hidden, has_bias = tower.hidden_size, config.boolean("attention_bias", True)
    block = _qwen_block(
        config, "GlmOcrVisionBlock", hidden, gated_mlp("mlp", hidden, inner, act, bias=has_bias), norm="rms",
        biases=(has_bias, has_bias), has_norms=True,
    )  # fmt: skip
    return replace(tower, before=tower.before[:1], blocks=(block,) * len(tower.blocks))


def glm4v_tower(config: ConfigReader, width: int) -> Tower:
    """GLM-4.1V's, 4.5V's and 4.6V's: a norm behind the patches, a gated MLP as wide as the language model,
    and a convolution that joins four patches before the merger. Its positions are read between sixteen of the
    table, in fp32.
    """
    hidden, act = config.integer("hidden_size", 1536), config.activation("hidden_act", "silu")
    patch, merge = config.side("patch_size", 14), config.integer("spatial_merge_size", 2)
    output, inner = config.integer("out_hidden_size", 4096), config.integer("intermediate_size", 13696)
    has_bias = config.boolean("attention_bias", False)
    frames = config.integer("temporal_patch_size", 2)
    block = _qwen_block(
        config, "Glm4vVisionBlock", hidden, gated_mlp("mlp", hidden, output, act), norm="rms", heads=12,
        biases=(has_bias, False),
    )  # fmt: skip
    positions = embedding(
        f"{_VISUAL}.embeddings.position_embedding", (config.side("image_size", 336) // patch) ** 2, hidden
    )
    root, kernel = f"{_VISUAL}.merger", (output, hidden, merge, merge)
    downsample = Module(
        f"{_VISUAL}.downsample",
        Linear(hidden * merge**2, output),
        (Parameter("weight", kernel), Parameter("bias", (output,))),
    )
    norm = rms_norm(f"{_VISUAL}.post_layernorm", hidden)
    after = [
        norm,
        downsample,
        linear(f"{root}.proj", output, output),
        layer_norm(f"{root}.post_projection_norm", output),
        activation(f"{root}.act1", output, "gelu"),
        *gated_mlp(root, output, inner, act),
    ]
    return Tower(
        before=(
            patch_embedding(f"{_VISUAL}.patch_embed.proj", (frames, patch, patch), hidden),
            on_rows(rms_norm(f"{_VISUAL}.post_conv_layernorm", hidden), "patches"),
            replace(on_rows(positions, "patches"), rows_per_token=16.0),
            on_rows(residual(f"{_VISUAL}.add_positions", hidden), "patches"),
        ),
        blocks=(block,) * config.num_blocks("depth", 24),
        after=projector_modules(after, width, [norm.name]),
        block_prefix=f"{_VISUAL}.blocks",
        hidden_size=hidden,
        rule=ImageRule(patch, merge, 6272, 5_880_000),  # of the image taken as two frames
    )


@dataclass(frozen=True, slots=True)
class _MoonVit:
    """The names of one release's modules."""

    root: str
    blocks: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    out: str
    mlp: tuple[str, str, str]
    final: str
    positions: tuple[str, str]
    """(the module that has the positions' table, its parameter)."""
    projector: tuple[str, str, str]


_KIMI_K25 = _MoonVit(
    "model.vision_tower", "layers", ("norm1", "norm2"), ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attn.proj", ("mlp.fc1", "mlp.act", "mlp.fc2"), "final_layernorm",
    ("patch_embed.pos_emb", "position_embeddings"),
    ("model.mm_projector.pre_norm", "model.mm_projector.in_proj", "model.mm_projector.out_proj"),
)  # fmt: skip
_KIMI_VL = _MoonVit(
    "vision_tower", "encoder.blocks", ("norm0", "norm1"), ("wqkv",), "wo",
    ("mlp.fc0", "mlp.activation", "mlp.fc1"), "encoder.final_layernorm", ("patch_embed.pos_emb", "weight"),
    ("multi_modal_projector.pre_norm", "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
)  # fmt: skip


def kimi_k25_tower(config: ConfigReader, width: int) -> Tower:
    """MoonViT of Kimi K2.5 and K2.6."""
    hidden, sides = config.integer("hidden_size", 1152), ("pos_emb_height", "pos_emb_width")
    config.check_width("projection_hidden_size", 1152, hidden, "tower")
    return _moonvit_tower(config, width, _KIMI_K25, sides, max_patches=16_384)


def kimi_vl_tower(config: ConfigReader, width: int) -> Tower:
    """MoonViT of Kimi-VL (`modeling_kimi_vl.py` of its repository, by vllm/model_executor/models/moonvit.py
    and kimi_vl.py)."""
    sides = "init_pos_emb_height", "init_pos_emb_width"
    return _moonvit_tower(config, width, _KIMI_VL, sides, max_patches=4096)


def _moonvit_tower(
    config: ConfigReader, width: int, names: _MoonVit, sides: tuple[str, str], *, max_patches: int
) -> Tower:
    """Learned positions, read between sixteen of the table, and an average over frames, one of an image."""
    hidden, inner = config.integer("hidden_size", 1152), config.integer("intermediate_size", 4304)
    patch = config.side("patch_size", 14)
    merge = (config.integers("merge_kernel_size") or (2, 2))[0]
    core = tower_core(
        "attn.core", config.integer("num_attention_heads", 16), hidden, splits_fused_qkv=len(names.qkv) == 1
    )
    products = [
        linear(name, hidden, 3 * hidden // len(names.qkv), bias=True, shares_input=number > 0)
        for number, name in enumerate(names.qkv)
    ]
    act = config.activation("hidden_act", "gelu_pytorch_tanh")
    modules = [
        layer_norm(names.norms[0], hidden),
        *products,
        core,
        linear(names.out, hidden, hidden, bias=True),
        residual("attn.residual", hidden),
        layer_norm(names.norms[1], hidden),
        *plain_mlp(names.mlp, hidden, inner, act),
        residual("mlp.residual", hidden),
    ]
    block = set_registration(
        tower_block("Kimi_K25VisionEncoderLayer", modules, "patches"),
        *names.norms, names.out, *names.qkv, names.mlp[0], names.mlp[2],
    )  # fmt: skip
    (owner, table), (rows, columns) = names.positions, (config.integer(side, 64) for side in sides)
    positions = Module(
        f"{names.root}.{owner}",
        Embedding(rows * columns, hidden),
        (Parameter(table, (rows, columns, hidden)),),
        rows_per_token=8.0,  # sixteen are read and one is written
    )
    norm = layer_norm(f"{names.root}.{names.final}", hidden)
    first, second, third = names.projector
    merged = hidden * merge**2
    after = [
        norm,
        residual(f"{names.root}.temporal_merge", hidden),
        layer_norm(first, hidden),
        *two_products((second, f"{second.rpartition('.')[0]}.act", third), merged, merged, width),
    ]
    return Tower(
        before=(
            patch_embedding(f"{names.root}.patch_embed.proj", (patch, patch), hidden),
            on_rows(positions, "patches"),
            on_rows(residual(f"{names.root}.add_positions", hidden), "patches"),
        ),
        blocks=(block,) * config.num_blocks("num_hidden_layers", 27),
        after=projector_modules(after, width, [module.name for module in after[:3]]),
        block_prefix=f"{names.root}.{names.blocks}",
        hidden_size=hidden,
        rule=ImageRule(patch, merge, 0, max_patches * patch**2, resizing="never up", max_side=512 * patch),
    )


def lighton_ocr_tower(config: ConfigReader, width: int) -> Tower:
    """LightOnOCR's: Mistral's under other names."""
    return pixtral_tower(config, width, "model.vision_encoder", "model.vision_projection")


def pixtral_tower(
    config: ConfigReader,
    width: int,
    vision: str = "model.vision_tower",
    projector: str = "model.multi_modal_projector",
) -> Tower:
    """Mistral Small 3.1's and later, Ministral 3's, Magistral's and Devstral's: Pixtral, of images of any
    size, and a product that joins four patches. The tokens that end the rows of an image are text.
    """
    hidden, heads = config.integer("hidden_size", 1024), config.integer("num_attention_heads", 16)
    patch, side = config.side("patch_size", 16), config.side("image_size", 1024)
    merge = config.integer("spatial_merge_size", 2)
    has_bias = config.boolean("multimodal_projector_bias", False)
    check_feature_layer(config)
    inner, act = config.integer("intermediate_size", 4096), config.activation("hidden_act", "gelu")
    root = "attention"
    modules = [
        rms_norm("attention_norm", hidden),
        *separate_qkv(root, hidden),
        tower_core(f"{root}.core", heads, hidden, head_dim=config.optional_integer("head_dim")),
        linear(f"{root}.o_proj", hidden, hidden),
        residual(f"{root}.residual", hidden),
        rms_norm("ffn_norm", hidden),
        *gated_mlp("feed_forward", hidden, inner, act),
        residual("feed_forward.residual", hidden),
    ]
    block = set_registration(
        tower_block("PixtralAttentionLayer", modules, "patches"),
        "attention_norm", *(f"feed_forward.{name}_proj" for name in ("gate", "up", "down")),
        *(f"{root}.{name}_proj" for name in "kvqo"), "ffn_norm",
    )  # fmt: skip
    projector_act = config.activation("projector_hidden_act", "gelu")
    after = [
        rms_norm(f"{projector}.norm", hidden),
        linear(f"{projector}.patch_merger.merging_layer", merge**2 * hidden, hidden),
        *two_products(product_names(f"{projector}."), hidden, width, width, act=projector_act, bias=has_bias),
    ]
    return Tower(
        before=(
            patch_embedding(f"{vision}.patch_conv", (patch, patch), hidden, bias=False),
            on_rows(rms_norm(f"{vision}.ln_pre", hidden), "patches"),
        ),
        blocks=(block,) * config.num_blocks("num_hidden_layers", 24),
        after=projector_modules(after, width, [after[0].name]),
        block_prefix=f"{vision}.transformer.layers",
        hidden_size=hidden,
        rule=ImageRule(patch, merge, 0, side * side, resizing="never up", max_side=side),
    )
