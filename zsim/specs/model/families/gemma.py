"""Gemma 2 and 3: heads of a width of their own, norms before and after attention and MLP, and windows.

Names, shapes and defaults as in transformers 5.23 (`modeling_gemma2.py`, `modeling_gemma3.py` and their
`configuration_*.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.operations.operation import Role
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import replace_op_fields, residual, rms_norm, set_registration
from zsim.specs.model.families.llama import (
    REGISTRATION,
    QkNorm,
    Shape,
    attention_modules,
    build_unique_blocks,
    decoder,
    gated_mlp,
    layer_windows,
)
from zsim.specs.model.spec import Block, ModelSpec

_NORM = "gemma_rms"


def gemma2(config: ConfigReader) -> ModelSpec:
    """Gemma 2 has a window in every other layer and caps scores and logits. Its head is tied."""
    shape = Shape.read(config, kv_default=4, head_dim=256)
    window = config.integer("sliding_window", 4096)
    every_other = [index % 2 == 0 for index in range(shape.layers)]
    windows = layer_windows(config, shape.layers, window, every_other)
    return _model(config, shape, "Gemma2DecoderLayer", windows, caps=(50.0, 30.0), max_positions=8192)


def gemma3(config: ConfigReader) -> ModelSpec:
    """Gemma 3's text models have five layers with a window and one without, norms on query and key heads, and
    no caps.

    A multimodal file leaves out what is as in the class.
    """
    config = config.add_defaults(
        vocab_size=262_208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
        num_attention_heads=8,
    )  # fmt: skip
    shape = Shape.read(config, kv_default=4, head_dim=256)
    pattern = config.integer("sliding_window_pattern", 6)
    local = [(index + 1) % pattern != 0 for index in range(shape.layers)]
    window: int | None = None
    if "sliding_window" not in config.values or config.values["sliding_window"] is not None:
        window = config.integer("sliding_window", 4096)
    is_causal = not config.boolean("use_bidirectional_attention", False)
    if not is_causal and window is not None:
        window //= 2
    windows = layer_windows(config, shape.layers, window, local)
    return _model(
        config, shape, "Gemma3DecoderLayer", windows,
        qk_norm="each head", max_positions=131_072, is_causal=is_causal,
    )  # fmt: skip


def _model(
    config: ConfigReader,
    shape: Shape,
    kind: str,
    windows: Sequence[int | None],
    *,
    max_positions: int,
    qk_norm: QkNorm = "none",
    caps: tuple[float | None, float | None] = (None, None),
    is_causal: bool = True,
) -> ModelSpec:
    """The model of a family. `caps` are its defaults for scores and logits."""
    act = config.string("hidden_activation", "gelu_pytorch_tanh")
    has_bias = config.boolean("attention_bias", False)
    caps_scores = config.values.get("attn_logit_softcapping", caps[0]) is not None
    caps_logits = config.values.get("final_logit_softcapping", caps[1]) is not None

    def block(window: int | None) -> Block:
        core = attention_modules(
            shape, qkv_bias=has_bias, o_bias=has_bias, qk_norm=qk_norm, norm=_NORM, window=window
        )
        modules = (
            rms_norm("input_layernorm", shape.hidden, kind=_NORM),
            *(
                replace_op_fields(module, softcaps=caps_scores, is_causal=is_causal)
                if module.role is Role.MIXER
                else module
                for module in core
            ),
            rms_norm("post_attention_layernorm", shape.hidden, kind=_NORM),
            residual("self_attn.residual", shape.hidden),
            rms_norm("pre_feedforward_layernorm", shape.hidden, kind=_NORM),
            *gated_mlp("mlp", shape.hidden, shape.ffn, act),
            rms_norm("post_feedforward_layernorm", shape.hidden, kind=_NORM),
            residual("mlp.residual", shape.hidden),
        )
        return set_registration(Block(kind, modules), *REGISTRATION)

    return decoder(
        config,
        shape,
        build_unique_blocks(windows, block),
        is_tied=True,
        max_positions=max_positions,
        softcaps_logits=caps_logits,
        norm=_NORM,
    )
