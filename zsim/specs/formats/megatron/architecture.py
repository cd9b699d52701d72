"""Megatron's flags of the network -> the content of a config.json.

Defaults as in Megatron-Core 0.16.1 (`training/arguments.py` `validate_args`, `transformer_config.py`).
"""

from __future__ import annotations

from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.formats.megatron.arguments import Arguments, refuse
from zsim.specs.formats.megatron.expert_flags import expert_architecture

_POSITIONS = ("learned_absolute", "rope", "mrope", "relative", "none")
# Of the vocabulary files that its examples name: `len(encoder)` of gpt2-vocab.json.
_GPT2_VOCABULARY = 50_257
_REFUSED = {
    "experimental-attention-variant": "attention that is not softmax attention",
    "is-hybrid-model": "layers of Mamba",
    "hybrid-override-pattern": "layers of Mamba",
    "hybrid-layer-pattern": "layers of Mamba",
    "heterogeneous-layers-config-path": "layers that differ",
    "heterogeneous-layers-config-encoded-json": "layers that differ",
    "decoder-num-layers": "encoders with decoders",
    "apply-residual-connection-post-layernorm": "a residual stream behind the norm",
    "fp32-residual-connection": "a residual stream in fp32",
    "attention-output-gate": "a gate on attention's output",
    "qk-l2-norm": "L2 norms of queries and keys",
    "qk-clip": "clipped queries and keys",
    "window-attn-skip-freq": "windows on some layers only",
    "vision-pretraining": "vision models",
    "retro-add-retriever": "retrievers",
}


def read_architecture(found: Arguments) -> dict[str, Any] | None:
    """The model of the flags, or None if they do not describe one (no `--num-layers`).

    Without a vocabulary the model has no `vocab_size`, and a later check requires it. Raises InputError for
    values that Megatron refuses, NotSimulatedError for architectures that zsim lacks.
    """
    for flag, what in _REFUSED.items():
        refuse(found, flag, what)
    layers, hidden = found.integer("num-layers"), found.integer("hidden-size")
    heads = found.integer("num-attention-heads")
    if layers is None or hidden is None or heads is None:
        missing = [
            flag
            for flag, value in (
                ("num-layers", layers),
                ("hidden-size", hidden),
                ("num-attention-heads", heads),
            )
            if value is None
        ]
        if len(missing) < 3:
            raise InputError(f"{found.where}: --{missing[0]}: missing, as Megatron asks for it")
        return None
    _check_heads(found, hidden, heads)
    is_gated = found.has("swiglu", "quick-geglu")
    ffn = found.integer("ffn-hidden-size")
    if ffn is None:  # 2/3 of the width for two products, in multiples of 64
        ffn = int((4 * hidden * 2 / 3) / 64) * 64 if found.has("swiglu") else 4 * hidden
    kv_heads = found.count("num-query-groups") if found.has("group-query-attention") else heads
    found.asked.add("num-query-groups")
    bias = not found.has("disable-bias-linear")
    model: dict[str, Any] = {
        "model_type": "megatron",
        "_name_or_path": "model",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": found.integer("kv-channels", hidden // heads),
        "intermediate_size": ffn,
        "max_position_embeddings": _positions(found),
        "normalization": found.text("normalization", "LayerNorm", ("LayerNorm", "RMSNorm")),
        "position_embedding_type": _position_type(found),
        "gated": is_gated,
        "activation": _activation(found),
        "bias": bias,
        "qkv_bias": found.has("add-qkv-bias") or bias,
        "qk_layernorm": found.has("qk-layernorm"),
        "attention_dropout": found.number("attention-dropout", 0.1),
        "hidden_dropout": found.number("hidden-dropout", 0.1),
        "tie_word_embeddings": not found.has("untie-embeddings-and-output-weights"),
    }
    model |= _latent_attention(found)
    model |= expert_architecture(found, layers, ffn)
    window = found.text("window-size")
    if window is not None:
        model["sliding_window"] = _window(found, window)
    vocabulary = _vocabulary(found)
    return model if vocabulary is None else {**model, "vocab_size": vocabulary}


def _latent_attention(found: Arguments) -> dict[str, Any]:
    """The keys of multi-latent attention. The mapping is empty without `--multi-latent-attention`."""
    if not found.has("multi-latent-attention"):
        return {}
    if found.has("group-query-attention"):
        raise InputError(
            f"{found.where}: --group-query-attention: Megatron refuses it beside --multi-latent-attention; "
            "leave it out"
        )
    found.has("rotary-scaling-factor", "mscale", "mscale-all-dim", "rope-type", "cache-mla-latents")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": found.integer("q-lora-rank"),
        "kv_lora_rank": found.integer("kv-lora-rank", 32),
        "qk_nope_head_dim": found.integer("qk-head-dim", 128),
        "qk_rope_head_dim": found.integer("qk-pos-emb-head-dim", 64),
        "v_head_dim": found.integer("v-head-dim", 128),
    }


def _check_heads(found: Arguments, hidden: int, heads: int) -> None:
    if hidden % heads and not found.has("kv-channels"):
        divisors = [one for one in range(1, 4 * heads) if hidden % one == 0]
        nearest = min(divisors, key=lambda one: abs(one - heads))
        raise InputError(
            f"{found.where}: --num-attention-heads: found {heads}, which does not divide --hidden-size "
            f"{hidden}, as Megatron asks without --kv-channels; the nearest that does is {nearest}"
        )


def _positions(found: Arguments) -> int:
    length = found.integer("seq-length")
    longest = found.integer("max-position-embeddings", length)
    if longest is None:
        raise InputError(f"{found.where}: --max-position-embeddings: missing, as Megatron asks for it")
    if length is not None and longest < length:
        raise InputError(
            f"{found.where}: --max-position-embeddings: found {longest}, which Megatron refuses below "
            f"--seq-length {length}; expected at least {length}"
        )
    return longest


def _position_type(found: Arguments) -> str:
    found.has("no-position-embedding", "rotary-percent", "rotary-base")
    kind = found.text("position-embedding-type", "learned_absolute", _POSITIONS)
    if kind == "relative":
        raise NotSimulatedError(
            f"{found.where}: --position-embedding-type: zsim does not simulate relative positions yet"
        )
    return "rope" if kind == "mrope" else str(kind)


def _activation(found: Arguments) -> str:
    """The name of the activation.

    Megatron's GELU is fused, or torch's own. With `--openai-gelu` it is written out in Python.
    """
    chosen = [flag for flag in ("swiglu", "squared-relu", "quick-geglu", "openai-gelu") if found.has(flag)]
    if len(chosen) > 1:
        raise InputError(f"{found.where}: --{chosen[1]}: Megatron refuses it beside --{chosen[0]}; give one")
    names = {
        "swiglu": "silu",
        "squared-relu": "relu2",
        "quick-geglu": "quick_gelu",
        "openai-gelu": "gelu_new",
    }
    return names[chosen[0]] if chosen else "gelu"


def _window(found: Arguments, text: str) -> int:
    """The number of keys that a query sees, itself and those before it, from `--window-size 1023,0`."""
    first = text.strip("()[] ").partition(",")[0]
    if not first.isdecimal():
        raise InputError(f"{found.where}: --window-size: found '{text}', expected two numbers as in 1023,0")
    return int(first) + 1


def _vocabulary(found: Arguments) -> int | None:
    padded, given = found.integer("padded-vocab-size"), found.integer("vocab-size")
    tokenizer = found.text("tokenizer-type", "GPT2BPETokenizer")
    extra = found.integer("vocab-extra-ids", 0, minimum=0) or 0
    if padded is not None or given is not None:
        # NullTokenizer adds the end of a document.
        own = 1 if tokenizer == "NullTokenizer" and padded is None else 0
        return (padded or given or 0) + own + (0 if padded else extra)
    if tokenizer == "GPT2BPETokenizer":
        found.notes.append(f"no --vocab-size: GPT-2's {_GPT2_VOCABULARY:,} entries are assumed")
        return _GPT2_VOCABULARY
    found.notes.append(f"no --vocab-size: {tokenizer}'s file has it; give it as model.vocab_size")
    return None
