"""Vision towers: Qwen2-VL to Qwen 3.6, SigLIP (Gemma 3), InternViT and Llama 4's.

Names, shapes and defaults as in transformers 5.24 (`modeling_qwen2_vl.py`, `modeling_qwen2_5_vl.py`,
`modeling_qwen3_vl.py`, `modeling_qwen3_5.py`, `modeling_siglip.py`, `modeling_gemma3.py`,
`modeling_internvl.py`, `modeling_llama4.py` and their `configuration_*.py`). The bounds of pixels are those
of the checkpoints' `preprocessor_config.json`. Products stay in 16 bits under fp8 training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.errors import NotSimulatedError
from zsim.operations.image_features import ImageFeatures
from zsim.operations.operation import Parameter
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
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
from zsim.specs.model.families.llama import build_unique_blocks, gated_mlp
from zsim.specs.model.image_rules import ImageRule
from zsim.specs.model.spec import Block, Linear, Module, Tower
from zsim.specs.strategy.images import ImageRows

_VISUAL, _VISION = "model.visual", "model.vision_tower"
_PROJECTOR = "multi_modal_projector"
_CHANNELS = 3


def qwen2_vl_tower(config: ConfigReader, width: int) -> Tower:
    """Qwen2-VL's, with attention within images and no learned positions."""
    hidden = config.integer("embed_dim", 1280)
    inner = round(hidden * config.number("mlp_ratio", 4.0))
    act = config.string("hidden_act", "quick_gelu")
    mlp = plain_mlp(("mlp.fc1", "mlp.act", "mlp.fc2"), hidden, inner, act)
    block = _qwen_block(config, "Qwen2VLVisionBlock", hidden, mlp)
    return _qwen_tower(config, hidden, [block] * config.num_blocks("depth"), width, 14, (3136, 12_845_056))


def qwen2_5_vl_tower(config: ConfigReader, width: int) -> Tower:
    """Qwen2.5-VL's: RMSNorm and a gated MLP, attention within windows but for a few layers."""
    hidden, inner = config.integer("hidden_size", 3584), config.integer("intermediate_size", 3420)
    mlp = gated_mlp("mlp", hidden, inner, config.string("hidden_act", "silu"), bias=True)
    depth, full = config.integer("depth", 32), config.integers("fullatt_block_indexes") or [7, 15, 23, 31]

    def block(rows: ImageRows) -> Block:
        return _qwen_block(config, "Qwen2_5_VLVisionBlock", hidden, mlp, norm="rms", rows=rows)

    kinds: list[ImageRows] = ["patches" if index in full else "windows" for index in range(depth)]
    blocks = build_unique_blocks(kinds, block)
    window = config.integer("window_size", 112)
    return _qwen_tower(config, hidden, blocks, width, 14, (3136, 12_845_056), norm="rms", window=window)


def qwen3_vl_tower(config: ConfigReader, width: int) -> Tower:
    """Qwen3-VL's and Qwen 3.5's, with learned positions between which it interpolates. In Qwen3-VL layers in
    the middle have mergers too, whose features are added to the language model's first layers.
    """
    hidden, inner = config.integer("hidden_size", 1152), config.integer("intermediate_size", 4304)
    act = config.string("hidden_act", "gelu_pytorch_tanh")
    mlp = plain_mlp(("mlp.linear_fc1", "mlp.act_fn", "mlp.linear_fc2"), hidden, inner, act)
    block = _qwen_block(config, "Qwen3VLVisionBlock", hidden, mlp)
    blocks = [block] * config.integer("depth", 27)
    tower = _qwen_tower(config, hidden, blocks, width, 16, (65_536, 16_777_216))
    positions = embedding(f"{_VISUAL}.pos_embed", config.integer("num_position_embeddings", 2304), hidden)
    interpolation = [
        replace(_on(positions, "patches"), rows_per_token=4.0),
        _on(residual(f"{_VISUAL}.add_positions", hidden), "patches"),
    ]
    merged = hidden * config.integer("spatial_merge_size", 2) ** 2
    deep: list[Module] = []
    for number in range(num_deep_features(config)):
        root = f"{_VISUAL}.deepstack_merger_list.{number}"
        deep += [layer_norm(f"{root}.norm", merged), *_merger(root, merged, width)]
    after = (*tower.after[:-1], *(_on(module, "merged") for module in deep), tower.after[-1])
    return replace(tower, before=(*tower.before, *interpolation), after=after)


def num_deep_features(config: ConfigReader) -> int:
    """The layers of Qwen3-VL's tower whose features the language model's layers add."""
    if config.family.startswith("qwen3_5"):
        return 0
    return (
        len(config.integers("deepstack_visual_indexes")) if "deepstack_visual_indexes" in config.values else 3
    )


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
) -> Tower:
    """Patches of two frames (an image is taken twice), the blocks, and a merger of squares of patches."""
    patch, merge = config.side("patch_size", patch), config.integer("spatial_merge_size", 2)
    frames, is_qwen3 = config.integer("temporal_patch_size", 2), config.family.startswith("qwen3")
    merged = hidden * merge**2
    if is_qwen3:
        merger = [layer_norm(f"{_VISUAL}.merger.norm", hidden), *_merger(f"{_VISUAL}.merger", merged, width)]
    else:
        first = rms_norm if norm == "rms" else layer_norm
        root = f"{_VISUAL}.merger"
        names = f"{root}.mlp.0", f"{root}.mlp.1", f"{root}.mlp.2"
        merger = [first(f"{root}.ln_q", hidden), *_two_products(names, merged, merged, width)]
    return Tower(
        before=(
            _patch_embedding(f"{_VISUAL}.patch_embed.proj", (frames, patch, patch), hidden, bias=is_qwen3),
        ),
        blocks=tuple(blocks),
        after=_projector(merger, width, [merger[0].name]),
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
    rows: ImageRows = "patches",
) -> Block:
    heads = config.integer("num_heads", 16)
    first = rms_norm if norm == "rms" else layer_norm
    core = _core("attn.core", heads, hidden, splits_fused_qkv=True)
    modules = [
        first("norm1", hidden),
        linear("attn.qkv", hidden, 3 * hidden, bias=True),
        core,
        linear("attn.proj", hidden, hidden, bias=True),
        residual("attn.residual", hidden),
        first("norm2", hidden),
        *mlp,
        residual("mlp.residual", hidden),
    ]
    names = (module.name for module in mlp if module.parameters)
    return set_registration(
        _tower_block(kind, modules, rows), "norm1", "norm2", "attn.qkv", "attn.proj", *names
    )


def siglip_tower(config: ConfigReader, width: int) -> Tower:
    """Gemma 3's: SigLIP on 896 x 896 pixels, whose patches are averaged to 256 tokens."""
    hidden, patch = config.integer("hidden_size", 768), config.integer("patch_size", 16)
    heads, side = config.integer("num_attention_heads", 12), config.integer("image_size", 224)
    if config.boolean("vision_use_head", True):
        raise NotSimulatedError(
            f"{config.where}: 'vision_use_head' is not false: a tower with a pooling head, which Gemma 3 "
            "does not use, is not simulated; expected false, as its checkpoints say"
        )
    root, act = f"{_VISION}.embeddings", config.string("hidden_act", "gelu_pytorch_tanh")
    modules = [
        layer_norm("layer_norm1", hidden),
        *separate_qkv("self_attn", hidden, bias=True),
        _core("self_attn.core", heads, hidden, rotary=False),
        linear("self_attn.out_proj", hidden, hidden, bias=True),
        residual("self_attn.residual", hidden),
        layer_norm("layer_norm2", hidden),
        *plain_mlp(
            ("mlp.fc1", "mlp.activation_fn", "mlp.fc2"),
            hidden,
            config.integer("intermediate_size", 3072),
            act,
        ),
        residual("mlp.residual", hidden),
    ]
    block = set_registration(
        _tower_block("SiglipEncoderLayer", modules, "patches"),
        "layer_norm1", *(f"self_attn.{name}_proj" for name in ("k", "v", "q", "out")), "layer_norm2",
        "mlp.fc1", "mlp.fc2",
    )  # fmt: skip
    weight = Parameter("mm_input_projection_weight", (hidden, width))
    projector = [
        rms_norm(f"model.{_PROJECTOR}.mm_soft_emb_norm", hidden, kind="gemma_rms"),
        Module(
            f"model.{_PROJECTOR}.mm_input_projection",
            Linear(hidden, width),
            (weight,),
            parameter_owner=f"model.{_PROJECTOR}",
        ),
    ]
    norm = layer_norm(f"{_VISION}.post_layernorm", hidden)
    merge = side // patch // 16  # 256 tokens in all
    return Tower(
        before=(
            _patch_embedding(f"{root}.patch_embedding", (patch, patch), hidden),
            _on(embedding(f"{root}.position_embedding", (side // patch) ** 2, hidden), "patches"),
            _on(residual(f"{root}.add_positions", hidden), "patches"),
        ),
        blocks=(block,) * config.integer("num_hidden_layers", 12),
        after=_projector([norm, *projector], width, [norm.name]),
        block_prefix=f"{_VISION}.encoder.layers",
        hidden_size=hidden,
        rule=ImageRule(patch, merge, tile=side),
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
    act = config.string("hidden_act", "gelu")
    modules = [
        norm("layernorm_before", hidden),
        *separate_qkv("attention", hidden, bias=has_bias),
        *norms,
        _core("attention.core", heads, hidden, rotary=False),
        linear("attention.projection_layer", hidden, hidden, bias=True),
        _learned_scale("lambda_1", hidden),
        residual("attention.residual", hidden),
        norm("layernorm_after", hidden),
        *plain_mlp(
            ("mlp.fc1", "mlp.activation_fn", "mlp.fc2"),
            hidden,
            config.integer("intermediate_size", 4096),
            act,
        ),
        _learned_scale("lambda_2", hidden),
        residual("mlp.residual", hidden),
    ]
    block = set_registration(
        _tower_block("InternVLVisionLayer", modules, "patches"),
        "lambda_1", "lambda_2", "attention.q_proj", "attention.k_proj", "attention.v_proj",
        "attention.projection_layer", "attention.q_norm", "attention.k_norm", "mlp.fc1", "mlp.fc2",
        "layernorm_before", "layernorm_after",
    )  # fmt: skip
    root, merged = f"{_VISION}.embeddings", 4 * hidden
    embeddings = Module(
        f"{root}.position_embeddings",
        residual("", hidden).op_spec,
        (
            Parameter("cls_token", (1, 1, hidden)),
            Parameter("position_embeddings", (1, (side // patch) ** 2 + 1, hidden)),
        ),
        parameter_owner=root,
    )
    has_norm = not config.boolean("use_mean_pooling", True)
    final = [layer_norm(f"{_VISION}.layernorm", hidden)] if has_norm else []
    root_projector = f"model.{_PROJECTOR}"
    names = f"{root_projector}.linear_1", f"{root_projector}.act", f"{root_projector}.linear_2"
    projector = [
        layer_norm(f"{root_projector}.layer_norm", merged),
        *_two_products(names, merged, width, width),
    ]
    return Tower(
        before=(
            _on(embeddings, "patches"),
            _patch_embedding(f"{root}.patch_embeddings.projection", (patch, patch), hidden),
        ),
        blocks=(block,) * config.integer("num_hidden_layers", 24),
        after=_projector([*final, *projector], width, [module.name for module in final]),
        block_prefix=f"{_VISION}.encoder.layer",
        hidden_size=hidden,
        rule=ImageRule(patch, 2, tile=side, max_tiles=12, tiling="nearest aspect", class_tokens=1),
    )


def llama4_tower(config: ConfigReader, width: int) -> Tower:
    """Llama 4's: tiles of 336 x 336 pixels with a class token, and an adapter before the projector."""
    hidden, heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 16)
    patch, side = config.integer("patch_size", 14), config.integer("image_size", 448)
    inner = config.integer("intermediate_size", 5632)
    modules = [
        layer_norm("input_layernorm", hidden),
        *separate_qkv("self_attn", hidden, bias=True),
        _core("self_attn.core", heads, hidden),
        linear("self_attn.o_proj", hidden, hidden, bias=True),
        residual("self_attn.residual", hidden),
        layer_norm("post_attention_layernorm", hidden),
        *plain_mlp(("mlp.fc1", "mlp.activation_fn", "mlp.fc2"), hidden, inner, "gelu"),
        residual("mlp.residual", hidden),
    ]
    block = set_registration(
        _tower_block("Llama4VisionEncoderLayer", modules, "patches"),
        *(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.fc1", "mlp.fc2", "input_layernorm",
        "post_attention_layernorm",
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
            _on(embeddings, "patches"),
            _patch_embedding(f"{root}.patch_embedding.linear", (patch * patch,), hidden, is_flat=True),
            _on(layer_norm(f"{root}.layernorm_pre", hidden), "patches"),
        ),
        blocks=(block,) * config.integer("num_hidden_layers", 34),
        after=_projector([norm, *adapter], width, [norm.name]),
        block_prefix=f"{root}.model.layers",
        hidden_size=hidden,
        rule=ImageRule(
            patch, round(1 / ratio), tile=side, max_tiles=16, tiling="largest scale", class_tokens=1
        ),
    )


# -- parts ---------------------------------------------------------------------------------------------------


def _on(module: Module, rows: ImageRows) -> Module:
    """The module on rows of images, in 16 bits."""
    return replace(module, op_spec=module.op_spec.keep_in_bf16(), image_rows=rows)


def _tower_block(kind: str, modules: Sequence[Module], rows: ImageRows) -> Block:
    """A block whose attention sees `rows` that see each other."""
    return Block(
        kind,
        tuple(_on(module, rows if module.name.endswith(".core") else "patches") for module in modules),
    )


def _core(
    name: str, heads: int, hidden: int, *, rotary: bool = True, splits_fused_qkv: bool = False
) -> Module:
    """Attention that sees all patches."""
    core = attention(name, heads, heads, hidden // heads, rotary=rotary, splits_fused_qkv=splits_fused_qkv)
    return replace_op_fields(core, is_causal=False)


def _patch_embedding(
    name: str, kernel: tuple[int, ...], hidden: int, *, bias: bool = True, is_flat: bool = False
) -> Module:
    """A convolution whose windows do not overlap: a product of each patch. Pixels need no gradient."""
    features = _CHANNELS
    for side in kernel:
        features *= side
    shape = (hidden, features) if is_flat else (hidden, _CHANNELS, *kernel)
    parameters = [Parameter("weight", shape)]
    if bias and not is_flat:
        parameters.append(Parameter("bias", (hidden,)))
    return _on(Module(name, Linear(features, hidden), tuple(parameters), input_gradient=False), "patches")


def _merger(root: str, merged: int, width: int) -> list[Module]:
    names = f"{root}.linear_fc1", f"{root}.act_fn", f"{root}.linear_fc2"
    return _two_products(names, merged, merged, width)


def _two_products(names: tuple[str, str, str], inputs: int, inner: int, outputs: int) -> list[Module]:
    return [
        linear(names[0], inputs, inner, bias=True),
        activation(names[1], inner, "gelu"),
        linear(names[2], inner, outputs, bias=True),
    ]


def _projector(modules: Sequence[Module], width: int, on_patches: Sequence[str]) -> tuple[Module, ...]:
    """The projector's modules, all but those `on_patches` on merged rows, and the scatter among the
    tokens.
    """
    projected = [_on(module, "patches" if module.name in on_patches else "merged") for module in modules]
    return (*projected, Module("image_features", ImageFeatures(width)))


def _learned_scale(name: str, width: int) -> Module:
    """A branch times a learned vector, which is a parameter of the block."""
    scale = activation(name, width, "learned_scale")
    return replace(scale, parameters=(Parameter(name, (width,)),), parameter_owner="")
