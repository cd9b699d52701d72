"""RWKV-7 as fla has it.

Names, shapes and defaults as in flash-linear-attention 0315a70e (`layers/rwkv7.py`, `models/rwkv7/`).
"""

from __future__ import annotations

from zsim.operations.mixers.rwkv7 import GeneralizedDelta
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    embedding,
    language_model,
    layer_norm,
    linear,
    residual,
    set_registration,
)
from zsim.specs.model.families.llama import build_unique_blocks
from zsim.specs.model.spec import Block, ModelSpec, Module, Parameter

_MIXES = tuple(f"x_{name}" for name in "rwkvag")


def rwkv7(config: ConfigReader) -> ModelSpec:
    """A recurrence and a plain MLP in every block. The first has a norm of the embeddings, and its values are
    read by all others.
    """
    if config.values.get("attn") is not None:
        raise config.error("'attn' is not null; expected null: zsim knows RWKV-7 without layers of attention")
    config = config.add_defaults(vocab_size=32_000)
    hidden, layers = config.integer("hidden_size", 2048), config.num_blocks("num_hidden_layers", 24)
    has_bias, is_first = config.boolean("norm_bias", True), config.boolean("norm_first", True)
    inner = config.optional_integer("intermediate_size")
    if inner is None:
        inner = -(-config.integer("hidden_ratio", 4) * hidden // 32) * 32

    def block(is_initial: bool) -> Block:
        norms = ["pre_norm", "attn_norm"] if is_initial and is_first else ["attn_norm"]
        mixer = _mixer(config, hidden, is_initial=is_initial)
        mixes = Module("ffn", activation("", hidden, "learned_scale").op_spec, (Parameter("x_k", (hidden,)),))
        modules = (
            *(layer_norm(name, hidden, bias=has_bias) for name in norms),
            *mixer,
            residual("attn.residual", hidden),
            layer_norm("ffn_norm", hidden, bias=has_bias),
            mixes,
            linear("ffn.key", hidden, inner),
            activation("ffn.act_fn", inner, "relu2"),
            linear("ffn.value", inner, hidden),
            residual("ffn.residual", hidden),
        )
        products = [f"attn.{name}_proj" for name in "rkvo"]
        loras = [f"attn.{name}_lora.lora.{part}" for name in "wvag" for part in (0, 2)]
        order = (
            *norms, "attn", *products, *loras, "attn.g_norm", "ffn_norm", "ffn", "ffn.key", "ffn.value",
        )  # fmt: skip
        return set_registration(Block("RWKV7Block", modules), *order)

    return language_model(
        config,
        hidden,
        [embedding("model.embeddings", config.integer("vocab_size"), hidden)],
        build_unique_blocks([index == 0 for index in range(layers)], block),
        None,
        root="model.layers",
        final=[layer_norm("model.norm", hidden, bias=has_bias)],
    )


def _mixer(config: ConfigReader, hidden: int, *, is_initial: bool) -> list[Module]:
    """Products of the mixed tokens, and low-rank ones for the decay, the removed part, the gate and, but in
    the first layer, the part of the first layer's values.
    """
    head = config.integer("head_dim", 64)
    heads = config.head_dim(hidden, head)
    vectors = [Parameter(name, (1, 1, hidden)) for name in _MIXES]
    vectors += [Parameter("k_k", (hidden,)), Parameter("k_a", (hidden,)), Parameter("r_k", (heads, head))]
    modules = [linear(f"attn.{name}_proj", hidden, hidden) for name in "rkv"]
    ranks = {
        "w": ("decay", 64, "tanh"),
        "v": ("v", 16, ""),
        "a": ("a", 64, ""),
        "g": ("gate", 128, "sigmoid"),
    }
    for name, (key, default, act) in ranks.items():
        if name == "v" and is_initial:
            continue
        rank, root = config.integer(f"{key}_low_rank_dim", default), f"attn.{name}_lora.lora"
        modules += [
            linear(f"{root}.0", hidden, rank, shares_input=name == "v"),
            *([activation(f"{root}.1", rank, act)] if act else []),
            linear(f"{root}.2", rank, hidden, bias=name != "g"),
        ]
    return [
        *modules,
        Module("attn", GeneralizedDelta(heads, head, reads_values=not is_initial), tuple(vectors)),
        layer_norm("attn.g_norm", hidden),
        linear("attn.o_proj", hidden, hidden),
    ]
