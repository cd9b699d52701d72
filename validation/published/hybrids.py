"""Models of published runs with other mixers than attention, from `hybridarch{...}` of the notes, with the
vision tower of `vlm{...}`.

What samples hold is not in the table: rules of `published_sources.toml` have it from the runs' own commands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from validation.published.table import PublishedRun
from zsim.errors import NotSimulatedError


def is_hybrid(run: PublishedRun) -> bool:
    """Whether the row describes a pattern of mixers."""
    return "hybridarch{" in run.text("notes")


def hybrid_model(run: PublishedRun, shape: Mapping[str, int]) -> dict[str, Any]:
    """The row's model in the form of a config.json: Nemotron's by the pattern of symbols, Qwen 3.5's by
    layers of Gated DeltaNet. Raises NotSimulatedError for others, and where the notes lack a part of either.
    """
    try:
        return _hybrid_config(run, shape)
    except KeyError as missing:
        raise NotSimulatedError(f"the shape is not published: no {missing.args[0]} in the notes") from None


def _hybrid_config(run: PublishedRun, shape: Mapping[str, int]) -> dict[str, Any]:
    arch, moe = _note(run, "hybridarch"), _note(run, "moe")
    config: dict[str, Any] = {
        "hidden_size": shape["hidden"],
        "num_attention_heads": shape["n_heads"],
        "num_key_value_heads": run.count("n_kv_heads") or shape["n_heads"],
        "intermediate_size": run.count("ffn") or shape["hidden"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": run.count("seq_len") or 4096,
        "tie_word_embeddings": run.text("tied_emb") == "True",
        "head_dim": int(arch["head_dim"]),
    }
    if "pattern" in arch:
        return config | _nemotron(arch, moe)
    if "gdn_layers" in arch:
        return config | _qwen(run, arch, moe, shape)
    raise NotSimulatedError(f"a model of {', '.join(arch)} is not simulated from a table")


def _nemotron(arch: Mapping[str, str], moe: Mapping[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": arch["pattern"],
        "mamba_num_heads": int(arch["mamba_heads"]),
        "mamba_head_dim": int(arch["mamba_head_dim"]),
        "ssm_state_size": int(arch["state"]),
        "n_groups": int(arch["groups"]),
        "conv_kernel": int(arch["conv"]),
        "chunk_size": int(arch["chunk"]),
    }
    if arch.get("mtp_pattern"):
        config["mtp_hybrid_override_pattern"] = arch["mtp_pattern"]
    if moe:
        latent = int(moe.get("latent", "0"))
        config |= {
            "n_routed_experts": int(moe["experts"]),
            "num_experts_per_tok": int(moe["topk"]),
            "moe_intermediate_size": int(moe["moe_ffn"]),
            "moe_shared_expert_intermediate_size": int(moe["shared_ffn"]),
            **({"moe_latent_size": latent} if latent else {}),
        }
    return config


def _qwen(
    run: PublishedRun, arch: Mapping[str, str], moe: Mapping[str, str], shape: Mapping[str, int]
) -> dict[str, Any]:
    layers = shape["n_layers"]
    config: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "num_hidden_layers": layers,
        "full_attention_interval": layers // int(arch["attn_layers"]),
        "linear_num_key_heads": int(arch["k_heads"]),
        "linear_num_value_heads": int(arch["v_heads"]),
        "linear_key_head_dim": int(arch["k_dim"]),
        "linear_value_head_dim": int(arch["v_dim"]),
        "linear_conv_kernel_dim": int(arch["conv"]),
    }
    if moe:
        config |= {
            "num_experts": int(moe["experts"]),
            "num_experts_per_tok": int(moe["topk"]),
            "moe_intermediate_size": int(moe["moe_ffn"]),
            "shared_expert_intermediate_size": int(moe["shared_ffn"]),
        }
    return config | _qwen_tower(_note(run, "vlm"), shape["hidden"], is_routed=bool(moe))


def _qwen_tower(tower: Mapping[str, str], width: int, *, is_routed: bool) -> dict[str, Any]:
    """Keys of a model with a tower, none for a model of text."""
    if "tower_layers" not in tower:
        return {}
    keys = {
        "depth": "tower_layers", "hidden_size": "hidden", "intermediate_size": "ffn", "num_heads": "heads",
        "patch_size": "patch", "temporal_patch_size": "temporal", "spatial_merge_size": "merge",
    }  # fmt: skip
    return {
        "model_type": "qwen3_5_moe" if is_routed else "qwen3_5",
        "vision_config": {
            "out_hidden_size": width,
            **{key: int(tower[name]) for key, name in keys.items()},
        },
    }


def _note(run: PublishedRun, name: str) -> dict[str, str]:
    """{"pattern": "M-M*", ...} of a note `name{...}`, empty without one."""
    match = re.search(rf"{name}\{{([^}}]*)\}}", run.text("notes"))
    pairs = (item.partition("=") for item in match[1].split(",")) if match else ()
    return {key.strip(): value.strip() for key, _, value in pairs}
