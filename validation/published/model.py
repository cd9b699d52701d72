"""The Hugging Face config for the architecture columns of a published run."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from validation.published.hybrids import hybrid_model, is_hybrid
from validation.published.mixtures import expert_model, has_expert_settings, is_mixture
from validation.published.table import PublishedRun
from validation.published.vocabulary import names_of
from zsim.errors import NotSimulatedError
from zsim.specs.model.hub_names import preset_of
from zsim.specs.model.huggingface import read_model_config
from zsim.specs.presets import model_preset_names

_DECODERS = ("", "decoder", "dense", "transformer", "decoder-only", "causal-lm", "llama", "gpt")
_MIXTURES = r"|decoder(-only)?|(decoder|transformer|dense)?[- ]?moe|mixture( of experts)?|moe[- ]decoder"
_OTHERS = r"\b(gdn|hybridarch|dsv4|mhc|gemma4|csa|mamba\w*)\b[{= ]"  # notes on layers that columns cannot say
_SHAPE = ("n_layers", "hidden", "n_heads", "vocab")
_DROPPED = frozenset(
    ("instruct", "chat", "base", "it", "hf", "dense", "meta", "nvidia", "google", "openai", "preview")
)  # of a name, without a shape of their own
_GATED = r"swiglu|silu|geglu|gated|glu"
_GELU_NAMES = r"gpt(?!-?oss)|opt|bloom|megatron|turing|mpt|falcon|starcoder"


def model_config(run: PublishedRun, assumptions: list[str]) -> dict[str, Any]:
    """The row's model in the form of a `config.json`.

    GELU models are GPT-2's block with biases and learned positions (confirmed by the "exact" parameter counts
    of the tables). With grouped queries they are StarCoder 2's. SwiGLU models are Llama's or, with biases on
    q, k and v, Qwen 2's; with norms of queries and keys Qwen 3's. Those with squared ReLU are Nemotron's.
    Mixtures of experts are those of `expert_model`, models with other mixers than attention those
    of `hybrid_model`. What a row does not say of its shape is that of the
    preset of its name, or follows from the rest, and is named.

    Raises NotSimulatedError for other architectures, and for rows whose shape neither they nor a preset tell.
    """
    kind = run.text("arch_type").lower()
    if is_hybrid(run):
        return hybrid_model(run, _shape(run, assumptions))
    other = re.search(_OTHERS, run.text("notes"))
    preset = preset_of_name(run.text("model"))
    if preset is not None and _is_told_by_name(run, kind):
        assumptions.append(f"model: taken as the preset {preset}")
        return {**read_model_config(preset)[0]}
    if other is not None:
        raise NotSimulatedError(f"layers of '{other[1]}' in the notes are not simulated from a table")
    if is_mixture(run) and re.fullmatch(_MIXTURES, kind):
        return expert_model(run, _decoder_config(run, _shape(run, assumptions), "", assumptions))
    if kind not in _DECODERS:
        raise NotSimulatedError(f"architecture '{run.text('arch_type')}' is not simulated; only decoders are")
    shape = _shape(run, assumptions)
    mlp = _mlp_type(run, assumptions)
    if mlp == "gelu":
        return _gpt_config(run, shape, assumptions)
    if mlp == "swiglu":
        return _llama_config(run, shape, assumptions)
    if mlp == "relu2":
        return _decoder_config(run, shape, "nemotron", assumptions)
    raise NotSimulatedError(f"MLPs of type '{mlp}' are not simulated from a table")


def _is_told_by_name(run: PublishedRun, kind: str) -> bool:
    """Whether the preset of the row's name tells more than its columns: they have no whole shape, or are of a
    mixture without its experts, or of another architecture than the columns can say."""
    if any(not run.count(column) for column in _SHAPE):
        return True
    if is_mixture(run):
        return not has_expert_settings(run)
    return kind not in _DECODERS


@cache
def preset_of_name(name: str) -> str | None:
    """The preset of a model's name, Hub-like or not: "meta-llama/Llama-3.1-8B-Instruct" is llama-3.1-8b."""
    wanted = _plain_name(name)
    if not wanted or (preset := preset_of(name)) is not None:
        return preset if wanted else None
    for preset, ways in names_of("model").items():
        if wanted in {_plain_name(way) for way in ways}:
            return preset
    return next((preset for preset in model_preset_names() if _plain_name(preset) == wanted), None)


def _plain_name(name: str) -> str:
    """Letters and digits of a name without its owner and the words that tell no shape."""
    words = re.findall(r"[a-z]+|\d+", name.lower().rpartition("/")[2])
    return "".join(word for word in words if word not in _DROPPED)


def _mlp_type(run: PublishedRun, assumptions: list[str]) -> str:
    """ "gelu", "swiglu", "relu2" or as the row has it; where it does not say, by the model's name, else
    gated."""
    text = run.text("mlp_type").lower()
    if not text:
        mlp = "gelu" if re.search(_GELU_NAMES, run.text("model").lower()) else "swiglu"
        assumptions.append(f"model: mlp_type not published, taken as {mlp}")
        return mlp
    if re.search(r"relu ?\^?2|relu2|squared", text):
        return "relu2"
    if re.search(_GATED, text):
        return "swiglu"
    return "gelu" if "gelu" in text else text


def _shape(run: PublishedRun, assumptions: list[str]) -> dict[str, int]:
    """The columns of the shape. Heads are 128 wide, and the vocabulary is Llama's or GPT's, where a row with
    layers and a width does not say."""
    shape = {column: run.count(column) for column in (*_SHAPE, "seq_len")}
    missing = [column for column in ("n_layers", "hidden", "seq_len") if not shape[column]]
    hidden = shape["hidden"] or 0
    if not shape["n_heads"] and not missing:
        width = run.count("head_dim") or 128
        if hidden % width:
            missing.append("n_heads")
        else:
            shape["n_heads"] = hidden // width
            assumptions.append(f"model: heads not published, taken as {hidden // width}")
    if not shape["vocab"] and not missing:
        is_gpt = re.search(_GELU_NAMES, run.text("model").lower()) or run.text("mlp_type") == "gelu"
        shape["vocab"] = 50304 if is_gpt else 32000
        assumptions.append(f"model: vocabulary not published, taken as {shape['vocab']}")
    if missing:
        raise NotSimulatedError(f"the shape is not published: no {', '.join(missing)}")
    return {column: value for column, value in shape.items() if value}


def _gpt_config(run: PublishedRun, shape: dict[str, int], assumptions: list[str]) -> dict[str, Any]:
    hidden, heads = shape["hidden"], shape["n_heads"]
    kv_heads = run.count("n_kv_heads") or heads
    if kv_heads not in (1, heads):
        grouped = _decoder_config(run, shape, "starcoder2", assumptions)
        grouped["residual_dropout"] = grouped["attention_dropout"] = run.number("dropout") or 0.0
        return {**grouped, "tie_word_embeddings": run.text("tied_emb") != "False"}
    if run.text("qk_layernorm"):
        dropout = run.number("dropout") or 0.0
        dropouts = {"attention_dropout": dropout, "hidden_dropout": dropout}
        return {**_decoder_config(run, shape, "megatron", assumptions), "qk_layernorm": True, **dropouts}
    # Megatron, minGPT and DeepSpeed's examples train with dropout; llm-foundry and later recipes do not.
    is_early = re.search(r"(?i)unfused|no flash|local impl", run.text("attn_kernel"))
    dropout = run.number("dropout") or (0.1 if is_early else 0.0)
    return {
        "model_type": "gpt2" if kv_heads == heads else "gpt_bigcode",
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": shape["n_layers"],
        "n_inner": run.count("ffn") or 4 * hidden,
        "vocab_size": shape["vocab"],
        "n_positions": shape["seq_len"],
        "activation_function": "gelu",
        "tie_word_embeddings": run.text("tied_emb") != "False",
        "resid_pdrop": dropout,
        "attn_pdrop": dropout,
        "embd_pdrop": dropout,
    }


def _llama_config(run: PublishedRun, shape: dict[str, int], assumptions: list[str]) -> dict[str, Any]:
    name = run.text("model").lower()
    family = (
        "qwen2"
        if re.search(r"qwen ?-?2", name)
        else "qwen3"
        if re.search(r"qwen ?-?3(?!\.)", name)
        else "llama"
    )
    return _decoder_config(run, shape, family, assumptions)


def _decoder_config(
    run: PublishedRun, shape: dict[str, int], family: str, assumptions: list[str]
) -> dict[str, Any]:
    ffn = run.count("ffn")
    if not ffn:
        ffn = _derived_ffn(run, shape, assumptions)
    width = {"head_dim": run.count("head_dim")} if run.count("head_dim") else {}
    return {
        "model_type": family,
        "hidden_size": shape["hidden"],
        "num_attention_heads": shape["n_heads"],
        "num_key_value_heads": run.count("n_kv_heads") or shape["n_heads"],
        "num_hidden_layers": shape["n_layers"],
        "intermediate_size": ffn,
        "vocab_size": shape["vocab"],
        "max_position_embeddings": shape["seq_len"],
        "tie_word_embeddings": run.text("tied_emb") == "True",
        **width,
    }


def _derived_ffn(run: PublishedRun, shape: dict[str, int], assumptions: list[str]) -> int:
    """The MLP's width of a gated decoder by its parameters n: each of L layers has 3 h f + h (2 q + 2 k) of
    them, where q and k are the widths of queries and of keys, and embedding and head have V h each. Without
    parameters it is 8/3 h in whole 256s, as Llama's first."""
    hidden, heads = shape["hidden"], shape["n_heads"]
    if is_mixture(run):
        return hidden
    numel, head_dim = run.number("n_params"), run.count("head_dim") or hidden // heads
    ffn = -(-8 * hidden // 3 // 256) * 256
    if numel:
        tables = shape["vocab"] * hidden * (1 if run.text("tied_emb") == "True" else 2)
        attention = 2 * hidden * head_dim * (heads + (run.count("n_kv_heads") or heads))
        derived = ((numel - tables) / shape["n_layers"] - attention) / (3 * hidden)
        ffn = max(256, round(derived / 256) * 256)
    assumptions.append(f"model: ffn not published, taken as {ffn}")
    return ffn


def adapt_model(run: PublishedRun, config: dict[str, Any], assumptions: list[str]) -> dict[str, Any]:
    """The row's model with its vocabulary padded to the row's `vocab_multiple` times its tensor ranks.

    Where `width_multiple` is "n_gpus", the width is the nearest multiple of the number of GPUs. The number of
    layers is adapted to keep the parameters, the number of heads to keep their dimension.
    """
    multiple = (run.count("vocab_multiple") or 0) * (run.count("tp") or 1)
    if multiple:
        config = {**config, "vocab_size": -(-int(config["vocab_size"]) // multiple) * multiple}
    if run.text("width_multiple") != "n_gpus" or "n_embd" not in config:
        return config
    width, gpus = int(config["n_embd"]), run.count("n_gpus") or 1
    if width % gpus == 0:
        return config
    nearest = max(round(width / gpus), 1) * gpus
    layers = round(int(config["n_layer"]) * (width / nearest) ** 2)
    assumptions.append(f"{layers} layers of {nearest} (qgZ cannot divide {config['n_layer']} of {width})")
    return {
        **config,
        "n_embd": nearest,
        "n_inner": 4 * nearest,
        "n_layer": layers,
        "n_head": nearest * int(config["n_head"]) // width,
    }
