"""Towers of sounds: Whisper's encoder (Qwen2-Audio, Voxtral, Audio Flamingo 3), and Qwen's omni models'.

Names, shapes and defaults as in transformers 5.24 (`modeling_qwen2_audio.py`, `modeling_voxtral.py`,
`modeling_audioflamingo3.py`, `modeling_qwen2_5_omni.py`, `modeling_qwen3_omni_moe.py` and their
`configuration_*.py`). Positions are a table that is not trained, or a buffer. The
input that the average of Qwen2-Audio and Audio Flamingo keeps for backward is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.operations.image_features import ImageFeatures
from zsim.operations.operation import Operation, Parameter
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import activation, layer_norm, linear, residual, set_registration
from zsim.specs.model.families.tower_parts import clip_block, on_rows, tower_block
from zsim.specs.model.image_rules import SoundRule
from zsim.specs.model.spec import Linear, Module, Tower
from zsim.specs.strategy.images import SampleRows

_ROOT, _PROJECTOR = "model.audio_tower", "model.multi_modal_projector"
_NAMES = {
    "d_model": ("hidden_size",),
    "encoder_layers": ("num_hidden_layers",),
    "encoder_attention_heads": ("num_attention_heads",),
    "encoder_ffn_dim": ("intermediate_size",),
}
_SECONDS_30 = 3000  # frames


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
    _check_output(config, output, width)
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


def qwen3_omni_tower(config: ConfigReader, width: int) -> Tower:
    """Qwen3-Omni's: three convolutions over time and frequency of pieces of one second, attention among eight
    of those, and every row a token.
    """
    config = replace(config, aliases=_NAMES)
    hidden, output = config.integer("d_model", 1280), config.integer("output_dim", 3584)
    channels, piece = config.integer("downsample_hidden_size", 480), 2 * config.integer("n_window", 50)
    _check_output(config, output, width)
    bins, rule = config.integer("num_mel_bins", 128), SoundRule(piece, merge=1, halvings=3)
    rule = replace(rule, window=rule.rows_of(piece) * (config.integer("n_window_infer", 800) // piece))
    before, frames, inputs = list[Module](), piece, 1
    for number in (1, 2, 3):
        bins, frames = (bins + 1) // 2, (frames + 1) // 2
        ratio = bins * frames / rule.rows_of(piece)
        before += _convolution(f"{_ROOT}.conv2d{number}", (channels, inputs, 3, 3), ratio, overlap=9 / 4)
        inputs = channels
    before.append(linear(f"{_ROOT}.conv_out", channels * bins, hidden))
    after = [
        layer_norm(f"{_ROOT}.ln_post", hidden),
        linear(f"{_ROOT}.proj1", hidden, hidden, bias=True),
        activation(f"{_ROOT}.act", hidden, config.string("activation_function", "gelu")),
        linear(f"{_ROOT}.proj2", hidden, output, bias=True),
    ]
    return _tower(config, "Qwen3OmniMoeAudioEncoderLayer", before, after, width, rule, "frames")


def _check_output(config: ConfigReader, output: int, width: int) -> None:
    if output != width:
        raise config.error(
            f"'output_dim' is {output:,}; expected {width:,}, the language model's hidden size"
        )


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
    table = Module(
        f"{_ROOT}.embed_positions",
        residual("", hidden).op_spec,
        (Parameter("weight", (positions, hidden), trainable=False),),
    )
    bias = is_single or config.boolean("projector_bias", bias)
    inputs = hidden if is_averaged else config.integer("encoder_ffn_dim", 5120)
    if not is_averaged and inputs != hidden * rule.merge:
        raise config.error(f"'intermediate_size' is {inputs:,}; expected {rule.merge} x hidden_size")
    projector = [linear(f"{_PROJECTOR}.{names[0]}", inputs, width, bias=bias)]
    if not is_single:
        projector += [
            activation(f"{_PROJECTOR}.{names[1]}", width, config.string("projector_hidden_act", "gelu")),
            linear(f"{_PROJECTOR}.{names[2]}", width, width, bias=bias),
        ]
    norm = layer_norm(f"{_ROOT}.layer_norm", hidden)
    kind = {"qwen2_audio": "Qwen2Audio", "voxtral": "Voxtral", "audioflamingo3": "AudioFlamingo3"}
    return _tower(
        config, f"{kind[config.family]}EncoderLayer", [*_convolutions(config), table],
        [norm, *projector], width, rule, "merged frames" if is_averaged else "frames",
    )  # fmt: skip


def _weights(module: Module, kind: str) -> tuple[Parameter, ...]:
    """The parameters of a block's module. Whisper's keys have no bias."""
    has_none = module.name == "self_attn.k_proj" and not kind.startswith("Qwen3Omni")
    return module.parameters[:1] if has_none else module.parameters


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
    act, heads = config.string("activation_function", "gelu"), config.integer("encoder_attention_heads", 20)
    norms = "self_attn_layer_norm", "final_layer_norm"
    clip = clip_block(config, kind, hidden, inner, act, heads=heads, norms=norms)
    modules = [
        replace(module, name=module.name.removeprefix("mlp."), parameters=_weights(module, kind))
        for module in clip.modules
    ]
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
