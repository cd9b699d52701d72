"""The Hugging Face config for the architecture columns of a published run."""

from __future__ import annotations

import re
from typing import Any

from validation.published.hybrids import hybrid_model, is_hybrid
from validation.published.mixtures import expert_model, is_mixture
from validation.published.table import PublishedRun
from zsim.errors import NotSimulatedError

_DECODERS = ("", "decoder")


def model_config(run: PublishedRun) -> dict[str, Any]:
    """The row's model in the form of a `config.json`.

    GELU models are GPT-2's block with biases and learned positions (confirmed by the "exact" parameter counts
    of the tables). With grouped queries they are StarCoder 2's. SwiGLU models are Llama's or, with biases on
    q, k and v, Qwen 2's. Those with squared ReLU are Nemotron's. Mixtures of experts are those of
    `expert_model`, models with other mixers than attention those of `hybrid_model`. Raises NotSimulatedError
    for other architectures, and for rows whose shape is not published.
    """
    kind = run.text("arch_type")
    if is_hybrid(run):
        return hybrid_model(run, _shape(run))
    if is_mixture(run):
        return expert_model(run, _decoder_config(run, _shape(run), ""))
    if kind not in _DECODERS:
        raise NotSimulatedError(f"architecture '{kind}' is not simulated; only decoders are")
    shape = _shape(run)
    mlp = run.text("mlp_type")
    if not mlp:
        raise NotSimulatedError("the shape is not published: no mlp_type")
    if mlp == "gelu":
        return _gpt_config(run, shape)
    if mlp == "swiglu":
        return _llama_config(run, shape)
    if mlp == "relu2":
        return _decoder_config(run, shape, "nemotron")
    raise NotSimulatedError(f"MLPs of type '{mlp}' are not simulated from a table")


def _shape(run: PublishedRun) -> dict[str, int]:
    shape = {column: run.count(column) for column in ("n_layers", "hidden", "n_heads", "vocab", "seq_len")}
    missing = [column for column, value in shape.items() if not value]
    if missing:
        raise NotSimulatedError(f"the shape is not published: no {', '.join(missing)}")
    return {column: value for column, value in shape.items() if value}


def _gpt_config(run: PublishedRun, shape: dict[str, int]) -> dict[str, Any]:
    hidden, heads = shape["hidden"], shape["n_heads"]
    kv_heads = run.count("n_kv_heads") or heads
    if kv_heads not in (1, heads):
        grouped = _decoder_config(run, shape, "starcoder2")
        grouped["residual_dropout"] = grouped["attention_dropout"] = run.number("dropout") or 0.0
        return {**grouped, "tie_word_embeddings": run.text("tied_emb") != "False"}
    if run.text("qk_layernorm"):
        dropout = run.number("dropout") or 0.0
        dropouts = {"attention_dropout": dropout, "hidden_dropout": dropout}
        return {**_decoder_config(run, shape, "megatron"), "qk_layernorm": True, **dropouts}
    # Megatron, minGPT and DeepSpeed's examples train with dropout; llm-foundry and later recipes do not.
    is_early = re.search(r"unfused|no flash|local impl", run.text("attn_kernel"))
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


def _llama_config(run: PublishedRun, shape: dict[str, int]) -> dict[str, Any]:
    return _decoder_config(run, shape, "qwen2" if "qwen2" in run.text("model").lower() else "llama")


def _decoder_config(run: PublishedRun, shape: dict[str, int], family: str) -> dict[str, Any]:
    ffn = run.count("ffn")
    if not ffn:
        raise NotSimulatedError("the shape is not published: no ffn")
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
    }


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
