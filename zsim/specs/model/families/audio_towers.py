"""Towers of sounds: Whisper's encoder (also of Qwen2-Audio, Voxtral, Audio Flamingo 3), those of Qwen's omni
models, Qwen3-ASR and Gemma 4, and Gemma 4 12B's product.

Names, shapes and defaults as in transformers 5.24 (`modeling_*.py` and `configuration_*.py` of each).
Positions are a table that is not trained, or a buffer. The input that the average of Qwen2-Audio and Audio
Flamingo keeps for backward is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from zsim.operations.attention.chunks import ChunkedAttention
from zsim.operations.image_features import ImageFeatures
from zsim.operations.operation import Operation, Parameter
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    layer_norm,
    linear,
    replace_op_fields,
    residual,
    rms_norm,
    set_registration,
)
from zsim.specs.model.families.gemma4 import NORM
from zsim.specs.model.families.mixers import convolution
from zsim.specs.model.families.tower_parts import clip_block, clipped_linear, on_rows, tower_block
from zsim.specs.model.image_rules import SoundRule
from zsim.specs.model.spec import Linear, Module, Norm, Tower
from zsim.specs.strategy.images import SampleRows

_ROOT, _PROJECTOR = "model.audio_tower", "model.multi_modal_projector"
_NAMES = {
    "d_model": ("hidden_size",),
    "encoder_layers": ("num_hidden_layers",),
    "encoder_attention_heads": ("num_attention_heads",),
    "encoder_ffn_dim": ("intermediate_size",),
}
_SECONDS_30 = 3000  # frames
_MEL_BINS = 128  # of Gemma4AudioFeatureExtractor


def qwen2_audio_tower(config: ConfigReader, width: int) -> Tower:
    """Whisper's, of 30 seconds, whose rows are averaged by twos."""
    return _whisper_tower(config, width, ("linear",), SoundRule(_SECONDS_30, padded=True, max_pieces=1))


def voxtral_tower(config: ConfigReader, width: int) -> Tower:
    """Whisper's, of pieces of 30 seconds with their padding, of which four rows are one token."""
    rule = SoundRule(_SECONDS_30, merge=4, padded=True, counts_padding=True)
    return _whisper_tower(config, width, ("linear_1", "act", "linear_2"), rule)


def audio_flamingo_tower(config: ConfigReader, width: int) -> Tower:
    """Whisper's, of pieces of 30 seconds, ten minutes at most."""
    rule = SoundRule(_SECONDS_30, padded=True, max_pieces=20)
    return _whisper_tower(config, width, ("linear_1", "act", "linear_2"), rule, bias=True)


def qwen2_5_omni_tower(config: ConfigReader, width: int) -> Tower:
    """Qwen2.5-Omni's: pieces of two seconds, inside of which rows see each other."""
    config = replace(config, aliases=_NAMES)
    hidden, output = config.integer("d_model", 1280), config.integer("output_dim", 3584)
    piece = 2 * config.integer("n_window", 100)
    config.check_width("output_dim", 3584, width)
    marks = Module(
        f"{_ROOT}.audio_bos_eos_token", Operation(), (Parameter("weight", (2, output)),)
    )  # which no forward reads
    after = [layer_norm(f"{_ROOT}.ln_post", hidden), linear(f"{_ROOT}.proj", hidden, output, bias=True)]
    rule = SoundRule(piece, window=piece // 2)
    return _tower(
        config,
        "Qwen2_5OmniAudioEncoderLayer",
        [*_convolutions(config), marks],
        after,
        width,
        rule,
        "merged frames",
    )


def qwen3_asr_tower(config: ConfigReader, width: int) -> Tower:
    """Qwen3-ASR's: Qwen3-Omni's, of other sizes, whose last products are the projector's."""
    config = replace(config, aliases=_NAMES)
    sizes = {"d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096}
    absent = {key: size for key, size in sizes.items() if config.optional_integer(key) is None}
    return qwen3_omni_tower(config.add_defaults(**absent), width)


def qwen3_omni_tower(config: ConfigReader, width: int) -> Tower:
    """Qwen3-Omni's: three convolutions over time and frequency of pieces of one second, attention among eight
    of those, and every row a token.
    """
    config = replace(config, aliases=_NAMES)
    hidden, output = config.integer("d_model", 1280), config.integer("output_dim", 3584)
    channels, piece = config.integer("downsample_hidden_size", 480), 2 * config.integer("n_window", 50)
    config.check_width("output_dim", 3584, width)
    bins, rule = config.integer("num_mel_bins", 128), SoundRule(piece, merge=1, halvings=3)
    rule = replace(rule, window=rule.rows_of(piece) * (config.integer("n_window_infer", 800) // piece))
    before, frames, inputs = list[Module](), piece, 1
    for number in (1, 2, 3):
        bins, frames = (bins + 1) // 2, (frames + 1) // 2
        ratio = bins * frames / rule.rows_of(piece)
        before += _convolution(f"{_ROOT}.conv2d{number}", (channels, inputs, 3, 3), ratio, overlap=9 / 4)
        inputs = channels
    before.append(linear(f"{_ROOT}.conv_out", channels * bins, hidden))
    is_asr = config.family == "qwen3_asr"
    first, last = (
        f"{_PROJECTOR}.linear_{number}" if is_asr else f"{_ROOT}.proj{number}" for number in (1, 2)
    )
    after = [
        layer_norm(f"{_ROOT}.ln_post", hidden),
        linear(first, hidden, hidden, bias=True),
        activation(f"{_ROOT}.act", hidden, config.activation("activation_function", "gelu")),
        linear(last, hidden, output, bias=True),
    ]
    kind = "Qwen3ASR" if is_asr else "Qwen3OmniMoe"
    return _tower(config, f"{kind}AudioEncoderLayer", before, after, width, rule, "frames")


def gemma4_unified_sounds(config: ConfigReader, width: int) -> Tower:
    """Gemma 4 12B's, which has no blocks: a product of the samples of 40 ms."""
    samples, root = config.integer("audio_embed_dim", 640), "model.embed_audio"
    modules = [
        Module(f"{root}.embedding_pre_projection_norm", Norm(samples, "l2"), input_gradient=False),
        replace(linear(f"{root}.embedding_projection", samples, width), input_gradient=False),
    ]
    return Tower(
        before=(),
        blocks=(),
        after=(*(on_rows(module, "merged frames") for module in modules),
               Module("audio_features", ImageFeatures(width))),
        block_prefix=root,
        hidden_size=samples,
        rule=SoundRule(_SECONDS_30, merge=1, halvings=2, max_pieces=1),
    )  # fmt: skip


def gemma4_sounds(config: ConfigReader, width: int) -> Tower:
    """Gemma 4 E2B's and E4B's: convolutions over time and frequency, and blocks of attention in chunks of
    frames, a convolution and two MLPs.
    """
    hidden, is_clipped = config.integer("hidden_size", 1024), config.boolean("use_clipped_linears", True)
    heads, act = config.integer("num_attention_heads", 8), config.activation("hidden_act", "silu")
    chunk = config.integer("attention_chunk_size", 12)
    context = chunk + config.integer("attention_context_left", 13) - 1
    context += config.integer("attention_context_right", 0, minimum=0)
    product = partial(clipped_linear, is_clipped=is_clipped)
    channels, before = list(config.integers("subsampling_conv_channels")) or [128, 32], list[Module]()
    bins, convolutions = _MEL_BINS, f"{_ROOT}.subsample_conv_projection"
    for number, outputs in enumerate(channels):
        bins, inputs = bins // 2, channels[number - 1] if number else 1
        layer = f"{convolutions}.layer{number}"
        work = Linear(9 * inputs, outputs, overlap=9 / 4)
        weight = Parameter("weight", (outputs, inputs, 3, 3))
        modules = [
            Module(f"{layer}.conv", work, (weight,), input_gradient=number > 0),
            layer_norm(f"{layer}.norm", outputs, bias=False),
            activation(f"{layer}.act", outputs, "relu_kept"),
            activation(f"{layer}.masked", outputs, "scale"),  # what the next product reads
        ]
        rows_per_frame = float(bins * 2 ** (len(channels) - 1 - number))
        before += [replace(module, rows_per_token=rows_per_frame) for module in modules]
    features = channels[0] // 4 * channels[-1]
    before.append(linear(f"{convolutions}.input_proj_linear", features, hidden))
    head, has_remainder = divmod(hidden, heads)
    if has_remainder:
        raise config.error(f"'num_attention_heads' is {heads}; expected a divisor of {hidden}")
    core = Module(
        "self_attn",
        ChunkedAttention(heads, heads, head, head, rotary=False, is_causal=False, queries=chunk, keys=context,
                         positions=context // 2 + 1),
        (Parameter("per_dim_scale", (head,)),),
    )  # fmt: skip
    position_weight = Parameter("weight", (hidden, hidden))
    modules = [
        *_gemma4_mlp("feed_forward1", hidden, act, is_clipped=is_clipped),
        activation("clamp_before_attention", hidden, "clamp"),
        rms_norm("norm_pre_attn", hidden, kind=NORM),
        *product("self_attn.q_proj", hidden, hidden),
        *product("self_attn.k_proj", hidden, hidden, shares_input=True),
        *product("self_attn.v_proj", hidden, hidden, shares_input=True),
        Module("self_attn.relative_k_proj", Operation(), (position_weight,)),
        core,
        *product("self_attn.post", hidden, hidden),
        activation("clamp_after_attention", hidden, "clamp"),
        rms_norm("norm_post_attn", hidden, kind=NORM),
        residual("self_attn.residual", hidden),
        rms_norm("lconv1d.pre_layer_norm", hidden, kind=NORM),
        *product("lconv1d.linear_start", hidden, 2 * hidden),
        activation("lconv1d.glu", hidden, "sigmoid", gated=True),
        convolution("lconv1d.depthwise_conv1d", hidden, config.integer("conv_kernel_size", 5)),
        activation("lconv1d.clamp", hidden, "clamp"),
        rms_norm("lconv1d.conv_norm", hidden, kind=NORM),
        activation("lconv1d.act_fn", hidden, act),
        *product("lconv1d.linear_end", hidden, hidden),
        residual("lconv1d.residual", hidden),
        *_gemma4_mlp("feed_forward2", hidden, act, is_clipped=is_clipped),
        activation("clamp_last", hidden, "clamp"),
        rms_norm("norm_out", hidden, kind=NORM),
    ]
    mlp = ("ffw_layer_1.linear", "ffw_layer_2.linear", "pre_layer_norm", "post_layer_norm")
    attention = ("q_proj.linear", "k_proj.linear", "v_proj.linear", "post.linear", "relative_k_proj")
    short = ("linear_start.linear", "linear_end.linear", "depthwise_conv1d", "pre_layer_norm", "conv_norm")
    block = set_registration(
        tower_block("Gemma4AudioLayer", modules, "frames", "frames"),
        *(f"feed_forward{number}.{name}" for number in (1, 2) for name in mlp), core.name,
        *(f"self_attn.{name}" for name in attention), *(f"lconv1d.{name}" for name in short),
        "norm_pre_attn", "norm_post_attn", "norm_out",
    )  # fmt: skip
    output, root = config.integer("output_proj_dims", 1536), "model.embed_audio"
    after = [
        linear(f"{_ROOT}.output_proj", hidden, output, bias=True),
        Module(f"{root}.embedding_pre_projection_norm", Norm(output, "l2")),
        linear(f"{root}.embedding_projection", output, width),
    ]
    return Tower(
        before=tuple(on_rows(module, "frames") for module in before),
        blocks=(block,) * config.num_blocks("num_hidden_layers", 12),
        after=(*(on_rows(module, "frames") for module in after),
               Module("audio_features", ImageFeatures(width))),
        block_prefix=f"{_ROOT}.layers",
        hidden_size=hidden,
        rule=SoundRule(_SECONDS_30, merge=1, halvings=len(channels), max_pieces=1),
    )  # fmt: skip


def _gemma4_mlp(name: str, hidden: int, act: str, *, is_clipped: bool) -> list[Module]:
    """An MLP between clamps and norms, half of which is added."""
    return [
        activation(f"{name}.clamp_first", hidden, "clamp"),
        rms_norm(f"{name}.pre_layer_norm", hidden, kind=NORM),
        *clipped_linear(f"{name}.ffw_layer_1", hidden, 4 * hidden, is_clipped=is_clipped),
        activation(f"{name}.act_fn", 4 * hidden, act),
        *clipped_linear(f"{name}.ffw_layer_2", 4 * hidden, hidden, is_clipped=is_clipped),
        activation(f"{name}.clamp_last", hidden, "clamp"),
        rms_norm(f"{name}.post_layer_norm", hidden, kind=NORM),
        residual(f"{name}.residual", hidden, scales=True),
    ]


def _convolution(name: str, shape: tuple[int, ...], rows_per_row: float, *, overlap: float) -> list[Module]:
    """A convolution of so many outputs for each row of the blocks, and GELU."""
    outputs, inputs, *kernel = shape
    for side in kernel:
        inputs *= side
    work = Linear(inputs, outputs, overlap=overlap)
    product = Module(name, work, (Parameter("weight", shape), Parameter("bias", (outputs,))))
    return [
        replace(module, rows_per_token=rows_per_row)
        for module in (product, activation(f"{name}.gelu", outputs, "gelu"))
    ]


def _convolutions(config: ConfigReader) -> list[Module]:
    """Whisper's two, over time."""
    hidden, bins = config.integer("d_model", 1280), config.integer("num_mel_bins", 128)
    return [
        *_convolution(f"{_ROOT}.conv1", (hidden, bins, 3), 2.0, overlap=3.0),
        *_convolution(f"{_ROOT}.conv2", (hidden, hidden, 3), 1.0, overlap=1.5),
    ]


def _whisper_tower(
    config: ConfigReader, width: int, names: Sequence[str], rule: SoundRule, *, bias: bool = False
) -> Tower:
    """Whisper's encoder and a projector of one product, or of two with an activation. Qwen2-Audio's has a
    bias, Voxtral's none. Voxtral's reads so many rows as are a token, the others' their average.
    """
    config = replace(config, aliases=_NAMES)
    hidden, positions = config.integer("d_model", 1280), config.integer("max_source_positions", 1500)
    is_single, is_averaged = len(names) == 1, rule.merge == 2
    table = _positions(hidden, positions)
    bias = is_single or config.boolean("projector_bias", bias)
    inputs = hidden if is_averaged else config.integer("encoder_ffn_dim", 5120)
    if not is_averaged and inputs != hidden * rule.merge:
        raise config.error(f"'intermediate_size' is {inputs:,}; expected {rule.merge} x hidden_size")
    projector = [linear(f"{_PROJECTOR}.{names[0]}", inputs, width, bias=bias)]
    if not is_single:
        projector += [
            activation(f"{_PROJECTOR}.{names[1]}", width, config.activation("projector_hidden_act", "gelu")),
            linear(f"{_PROJECTOR}.{names[2]}", width, width, bias=bias),
        ]
    norm = layer_norm(f"{_ROOT}.layer_norm", hidden)
    kind = {"qwen2_audio": "Qwen2Audio", "voxtral": "Voxtral", "audioflamingo3": "AudioFlamingo3"}
    return _tower(
        config, f"{kind[config.family]}EncoderLayer", [*_convolutions(config), table],
        [norm, *projector], width, rule, "merged frames" if is_averaged else "frames",
    )  # fmt: skip


def whisper_encoder(config: ConfigReader, rows: int) -> Tower:
    """Whisper's, of one sound of so many rows, to which a decoder attends."""
    sizes = {"encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536, "num_mel_bins": 80}
    config, hidden = config.add_defaults(**sizes), config.integer("d_model", 384)
    before = [*_convolutions(config.add_defaults(d_model=hidden)), _positions(hidden, rows)]
    rule = SoundRule(2 * rows, merge=1, padded=True, counts_padding=True, max_pieces=1)
    norm = [layer_norm(f"{_ROOT}.layer_norm", hidden)]
    tower = _tower(
        config.add_defaults(d_model=hidden), "WhisperEncoderLayer", before, norm, hidden, rule, "frames"
    )
    before, after = (
        [replace(module, name=module.name.replace(_ROOT, "model.encoder")) for module in modules]
        for modules in (tower.before, tower.after[:1])
    )
    return replace(
        tower, before=tuple(before), after=tuple(after), block_prefix="model.encoder.layers", is_attended=True
    )


def _positions(hidden: int, rows: int) -> Module:
    work, weight = residual("", hidden).op_spec, Parameter("weight", (rows, hidden), trainable=False)
    return Module(f"{_ROOT}.embed_positions", work, (weight,))


def _block_module(module: Module, kind: str) -> Module:
    """A block's module. Whisper's keys have no bias, but for Qwen3's, and its softmax is in 16 bits, but for
    Qwen's omni models and Qwen3's.
    """
    module = replace(module, name=module.name.removeprefix("mlp."))
    if module.name == "self_attn.core":
        return replace_op_fields(module, upcasts_softmax=kind.startswith(("Qwen3", "Qwen2_5")))
    has_none = module.name == "self_attn.k_proj" and not kind.startswith("Qwen3")
    return replace(module, parameters=module.parameters[:1]) if has_none else module


def _tower(
    config: ConfigReader,
    kind: str,
    before: Sequence[Module],
    after: Sequence[Module],
    width: int,
    rule: SoundRule,
    norm_rows: SampleRows,
) -> Tower:
    """`after` is the last norm, on `norm_rows`, and the projector on those of tokens."""
    hidden, inner = config.integer("d_model", 1280), config.integer("encoder_ffn_dim", 5120)
    rows: SampleRows = "frame windows" if rule.window else "frames"
    act = config.activation("activation_function", "gelu")
    heads = config.integer("encoder_attention_heads", 20)
    norms = "self_attn_layer_norm", "final_layer_norm"
    clip = clip_block(config, kind, hidden, inner, act, heads=heads, norms=norms)
    modules = [_block_module(module, kind) for module in clip.modules]
    order = (name.removeprefix("mlp.") for name in clip.registration or ())
    block = set_registration(tower_block(kind, modules, rows, "frames"), *order)
    norm, *projector = after
    return Tower(
        before=tuple(on_rows(module, "frames") for module in before),
        blocks=(block,) * config.num_blocks("encoder_layers", 32),
        after=(
            on_rows(norm, norm_rows),
            *(on_rows(module, "merged frames") for module in projector),
            Module("audio_features", ImageFeatures(width)),
        ),
        block_prefix=f"{_ROOT}.layers",
        hidden_size=hidden,
        rule=rule,
    )
