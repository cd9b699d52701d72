"""Megatron's flags of the network -> the content of a config.json.

Defaults as in Megatron-Core 0.16.1 (`training/arguments.py` `validate_args`, `transformer_config.py`).
"""

from __future__ import annotations

import re
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.megatron_lm.arguments import Arguments, refuse
from zsim.programs.megatron_lm.expert_flags import expert_architecture, layer_pattern
from zsim.programs.megatron_lm.flags import NOT_SIMULATED_ARCHITECTURES
from zsim.reading import parse_whole_number
from zsim.specs.model.hub_names import preset_of, preset_of_folder
from zsim.specs.model.huggingface import load_model

# Modules of `--spec` that are Megatron-Core's own, in both spellings of the hybrid's.
_SPECS = ("megatron.core.models.mamba.mamba_layer_specs", "megatron.core.models.hybrid.hybrid_layer_specs")
_HYBRID_FLAGS = ("hybrid-layer-pattern", "hybrid-override-pattern")
_SYMBOLS = "M*-E"
_POSITIONS = ("learned_absolute", "rope", "mrope", "relative", "none", "alibi", "rotary")
_MULTI_QUERY = "attention-head-type"  # of bigcode-project/Megatron-LM, megatron/arguments.py
_QUANTISED = re.compile(r"-(FP8|NVFP4|FP4|W4A16)$", re.IGNORECASE)  # checkpoints with the model's tokenizer
# Of the vocabulary files that its examples name: `len(encoder)` of gpt2-vocab.json, and Llama 2's.
_VOCABULARIES = {"GPT2BPETokenizer": ("GPT-2", 50_257), "Llama2Tokenizer": ("Llama 2", 32_000)}


# Of tokenizers whose models zsim has no presets of: pieces and 100 sentinels (transformers, T5Tokenizer).
_TOKENIZERS = {"t5-": 32_100, "google-t5/t5-": 32_100, "google/mt5-": 250_100}


def read_architecture(arguments: Arguments) -> dict[str, Any] | None:
    """The model of the flags, or None if they do not describe one (no `--num-layers`).

    Without a vocabulary the model has no `vocab_size`, and a later check requires it. Raises InputError for
    values that Megatron refuses, NotSimulatedError for architectures that zsim lacks.
    """
    for flag, feature in NOT_SIMULATED_ARCHITECTURES.items():
        refuse(arguments, flag, feature)
    if arguments.text("position-embedding-type") == "mrope":
        arguments.hint = (
            "--position-embedding-type mrope is of a model of images, whose tower no flag describes"
        )
        return None
    pattern = _hybrid_pattern(arguments)
    layers = arguments.integer("num-layers", len(pattern) or None)
    hidden = arguments.integer("hidden-size")
    heads = arguments.integer("num-attention-heads")
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
            raise InputError(f"{arguments.where}: --{missing[0]}: missing, as Megatron asks for it")
        return None
    _check_heads(arguments, hidden, heads)
    if pattern:
        return _hybrid(arguments, pattern, hidden, heads)
    is_gated = arguments.has("swiglu", "quick-geglu")
    ffn = arguments.integer("ffn-hidden-size")
    if ffn is None:  # 2/3 of the width for two products, in multiples of 64
        ffn = int((4 * hidden * 2 / 3) / 64) * 64 if arguments.has("swiglu") else 4 * hidden
    kv_heads = arguments.count("num-query-groups") if arguments.has("group-query-attention") else heads
    kv_heads = 1 if arguments.extra_flags.pop(_MULTI_QUERY, "") == "multiquery" else kv_heads
    arguments.read_flags.add("num-query-groups")
    bias = not arguments.has("disable-bias-linear")
    model: dict[str, Any] = {
        "model_type": "megatron",
        "_name_or_path": "model",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": arguments.integer("kv-channels", hidden // heads),
        "intermediate_size": ffn,
        "max_position_embeddings": _positions(arguments),
        "normalization": _normalization(arguments),
        "position_embedding_type": _position_type(arguments),
        "gated": is_gated,
        "activation": _activation(arguments),
        "bias": bias,
        "qkv_bias": arguments.has("add-qkv-bias") or bias,
        "qk_layernorm": arguments.has("qk-layernorm"),
        "attention_dropout": arguments.number("attention-dropout", 0.1),
        "hidden_dropout": arguments.number("hidden-dropout", 0.1),
        "tie_word_embeddings": not arguments.has("untie-embeddings-and-output-weights"),
    }
    if arguments.extra_flags.pop("embed-layernorm", None) is not None:
        model["embedding_layernorm"] = True
    model |= _latent_attention(arguments)
    model |= expert_architecture(arguments, layers, ffn)
    window = arguments.text("window-size")
    if window is not None:
        model["sliding_window"] = _window(arguments, window)
        skipped = arguments.text("window-attn-skip-freq")
        if skipped is not None:  # its period, or 1 for each layer with a window
            model["window_layer_pattern"] = layer_pattern(arguments, "window-attn-skip-freq", skipped, layers)
    vocabulary = _vocabulary(arguments)
    return model if vocabulary is None else {**model, "vocab_size": vocabulary}


def _hybrid_pattern(arguments: Arguments) -> str:
    """The kinds of the layers of a hybrid model, a symbol each. Empty for other models.

    Read in core/models/hybrid/hybrid_layer_allocation.py.
    """
    spec = arguments.texts("spec")
    if spec and spec[0] not in _SPECS:
        raise NotSimulatedError(f"{arguments.where}: --spec: zsim does not simulate layers of one's own yet")
    pattern = next((text for flag in _HYBRID_FLAGS if (text := arguments.text(flag)) is not None), "")
    if not pattern and (spec or arguments.has("is-hybrid-model")):
        raise NotSimulatedError(
            f"{arguments.where}: a hybrid model by ratios of its layers is not simulated; expected "
            "--hybrid-layer-pattern"
        )
    if unknown := next((symbol for symbol in pattern if symbol not in _SYMBOLS), ""):
        raise NotSimulatedError(
            f"{arguments.where}: --hybrid-layer-pattern: zsim does not simulate '{unknown}' of it yet; "
            f"expected {' '.join(_SYMBOLS)}"
        )
    return pattern


def _hybrid(arguments: Arguments, pattern: str, hidden: int, heads: int) -> dict[str, Any]:
    """A hybrid model, whose blocks are Nemotron-H's.

    Read in core/ssm/mamba_mixer.py: four taps, twice the width where no heads are given, chunks of 128.
    """
    positions = _position_type(arguments)
    act = _activation(arguments)
    if act not in ("relu2", "gelu") or not arguments.has("disable-bias-linear"):
        raise NotSimulatedError(
            f"{arguments.where}: --hybrid-layer-pattern: zsim simulates such models with a plain MLP and "
            "with --disable-bias-linear alone"
        )
    arguments.has("is-hybrid-model")
    if positions == "rope" and "*" in pattern:
        arguments.notes.append(
            "--position-embedding-type rope: the rotation in a hybrid's attention is left out"
        )
    if positions == "learned_absolute" and not arguments.has("no-position-embedding"):
        arguments.notes.append(
            "--position-embedding-type learned_absolute: a hybrid's learned positions are left out"
        )
    if _normalization(arguments) == "LayerNorm":
        arguments.notes.append("--normalization LayerNorm: a hybrid's norms are simulated as RMSNorm")
    is_grouped = arguments.has("group-query-attention")
    head_dim, ffn = arguments.count("mamba-head-dim", 64), arguments.count("ffn-hidden-size", 4 * hidden)
    model: dict[str, Any] = {
        "model_type": "nemotron_h",
        "_name_or_path": "model",
        "hidden_size": hidden,
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "num_attention_heads": heads,
        "num_key_value_heads": arguments.count("num-query-groups") if is_grouped else heads,
        "head_dim": arguments.integer("kv-channels", hidden // heads),
        "intermediate_size": ffn,
        "max_position_embeddings": _positions(arguments),
        "mlp_hidden_act": act,
        "tie_word_embeddings": not arguments.has("untie-embeddings-and-output-weights"),
        "mamba_head_dim": head_dim,
        "mamba_num_heads": arguments.integer("mamba-num-heads", 2 * hidden // head_dim),
        "n_groups": arguments.integer("mamba-num-groups", 8),
        "ssm_state_size": arguments.integer("mamba-state-dim", 128),
        "n_routed_experts": arguments.integer("num-experts", 8),
        "num_experts_per_tok": arguments.count("moe-router-topk", 2),
        "moe_intermediate_size": arguments.integer("moe-ffn-hidden-size", ffn),
        "moe_shared_expert_intermediate_size": arguments.integer("moe-shared-expert-intermediate-size", ffn),
    }
    vocabulary = _vocabulary(arguments)
    if vocabulary is None:
        raise InputError(
            f"{arguments.where}: --vocab-size: missing, as its tokenizer's file has it; "
            f"'{arguments.where} --vocab-size N' gives it"
        )
    return {**model, "vocab_size": vocabulary}


def _latent_attention(arguments: Arguments) -> dict[str, Any]:
    """The keys of multi-latent attention. The mapping is empty without `--multi-latent-attention`."""
    if not arguments.has("multi-latent-attention"):
        return {}
    if arguments.has("group-query-attention"):
        raise InputError(
            f"{arguments.where}: --group-query-attention: Megatron refuses it beside "
            "--multi-latent-attention; leave it out"
        )
    arguments.has("rotary-scaling-factor", "mscale", "mscale-all-dim", "rope-type", "cache-mla-latents")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": arguments.integer("q-lora-rank"),
        "kv_lora_rank": arguments.integer("kv-lora-rank", 32),
        "qk_nope_head_dim": arguments.integer("qk-head-dim", 128),
        "qk_rope_head_dim": arguments.integer("qk-pos-emb-head-dim", 64),
        "v_head_dim": arguments.integer("v-head-dim", 128),
    }


def _check_heads(arguments: Arguments, hidden: int, heads: int) -> None:
    if hidden % heads and not arguments.has("kv-channels"):
        divisors = [divisor for divisor in range(1, 4 * heads) if hidden % divisor == 0]
        nearest = min(divisors, key=lambda divisor: abs(divisor - heads))
        raise InputError(
            f"{arguments.where}: --num-attention-heads: found {heads}, which does not divide --hidden-size "
            f"{hidden}, as Megatron asks without --kv-channels; the nearest that does is {nearest}"
        )


def _positions(arguments: Arguments) -> int:
    length = arguments.integer("seq-length")
    max_positions = arguments.integer("max-position-embeddings", length)
    if max_positions is None:
        raise InputError(f"{arguments.where}: --max-position-embeddings: missing, as Megatron asks for it")
    if length is not None and max_positions < length:
        raise InputError(
            f"{arguments.where}: --max-position-embeddings: found {max_positions}, which Megatron refuses "
            f"below --seq-length {length}; expected at least {length}"
        )
    return max_positions


def _position_type(arguments: Arguments) -> str:
    arguments.has("no-position-embedding", "rotary-percent", "rotary-base")
    kind = arguments.text("position-embedding-type", "learned_absolute", _POSITIONS)
    if kind == "relative":
        raise NotSimulatedError(
            f"{arguments.where}: --position-embedding-type: zsim does not simulate relative positions yet"
        )
    return "rope" if kind == "rotary" else str(kind)


def _normalization(arguments: Arguments) -> str | None:
    return arguments.text("normalization", "LayerNorm", ("LayerNorm", "RMSNorm"))


def _activation(arguments: Arguments) -> str:
    """The name of the activation.

    Megatron's GELU is fused, or torch's own. With `--openai-gelu` it is written out in Python.
    """
    chosen = [
        flag for flag in ("swiglu", "squared-relu", "quick-geglu", "openai-gelu") if arguments.has(flag)
    ]
    if len(chosen) > 1:
        raise InputError(
            f"{arguments.where}: --{chosen[1]}: Megatron refuses it beside --{chosen[0]}; give one"
        )
    names = {
        "swiglu": "silu",
        "squared-relu": "relu2",
        "quick-geglu": "quick_gelu",
        "openai-gelu": "gelu_new",
    }
    return names[chosen[0]] if chosen else "gelu"


def _window(arguments: Arguments, text: str) -> int:
    """The number of keys that a query sees, itself and those before it, from `--window-size 1023,0`."""
    first = text.strip("()[] ").partition(",")[0]
    if not first.isdecimal():
        raise InputError(
            f"{arguments.where}: --window-size: found '{text}', expected two numbers as in 1023,0"
        )
    return int(first) + 1


def _vocabulary(arguments: Arguments) -> int | None:
    padded_size, vocab_size = arguments.integer("padded-vocab-size"), arguments.integer("vocab-size")
    extra_size = arguments.extra_flags.pop("pad-vocab-size-to", "")  # Megatron-DeepSpeed's
    if extra_size and not parse_whole_number(extra_size):
        raise InputError(
            f"{arguments.where}: --pad-vocab-size-to: found '{extra_size}', expected a whole number"
        )
    padded_size = padded_size or parse_whole_number(extra_size)
    tokenizer = arguments.text("tokenizer-type", "GPT2BPETokenizer")
    extra = arguments.integer("vocab-extra-ids", 0, minimum=0) or 0
    if padded_size is not None or vocab_size is not None:
        # NullTokenizer adds the end of a document.
        num_end_tokens = 1 if tokenizer == "NullTokenizer" and padded_size is None else 0
        return (padded_size or vocab_size or 0) + num_end_tokens + (0 if padded_size else extra)
    if tokenizer in _VOCABULARIES:
        owner, size = _VOCABULARIES[tokenizer]
        arguments.notes.append(f"no --vocab-size: {owner}'s {size:,} entries are assumed")
        return size
    variable = arguments.environment.get("TOKENIZER_MODEL", "")  # of files that only set variables
    forks = arguments.extra_flags.pop("tokenizer-name-or-path", "")
    named = _QUANTISED.sub("", arguments.text("tokenizer-model") or forks or variable)
    if size := next((size for prefix, size in _TOKENIZERS.items() if named.startswith(prefix)), 0):
        arguments.notes.append(f"no --vocab-size: the {size:,} entries of {named} are taken")
        return size
    if preset := preset_of(named) or preset_of_folder(named):
        size = load_model(preset).vocab_size
        arguments.notes.append(f"no --vocab-size: the {size:,} entries of {named}'s config.json are taken")
        return size
    arguments.notes.append(f"no --vocab-size: {tokenizer}'s file has it; give it as model.vocab_size")
    return None
