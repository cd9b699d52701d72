"""Hugging Face `config.json` -> ModelSpec, for the families in `FAMILIES`.

Field names, defaults and module shapes are as in transformers 5.23. zsim itself never imports it. Keys that
do not affect shapes (token ids, initialisation, dtypes, rotary parameters) are ignored.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean, unreadable_reason
from zsim.reading import parse_json, read_text
from zsim.specs import presets
from zsim.specs.model import hub_names
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families import LazyFunction, decoders
from zsim.specs.model.multimodal import add_towers, split_config
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.registry import kinds_with, role_of


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The builder of one `model_type`, and other spellings of its keys (transformers' `attribute_map`)."""

    build: Callable[[ConfigReader], ModelSpec]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    listed_before: str = ""
    """The family before which messages list it. Empty for the place where it is."""


_N_NAMES = {
    "n_embd": ("hidden_size", "n_embed"),
    "n_layer": ("num_hidden_layers", "num_layers"),
    "n_head": ("num_attention_heads", "num_heads"),
    "n_positions": ("max_position_embeddings", "n_ctx"),
}
_T5_NAMES = {
    "d_model": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "d_kv": ("head_dim",),
}
_MOE_NAMES = {"num_experts": ("num_local_experts",), "num_local_experts": ("num_experts",)}

_ROUTED = {"n_routed_experts": ("num_local_experts",)}

_FAMILIES: dict[str, ModelFamily] = {
    "qwen": ModelFamily(LazyFunction("classic.qwen")),
    "gpt_oss": ModelFamily(LazyFunction("moe_variants.gpt_oss"), _MOE_NAMES),
    "llama4_text": ModelFamily(LazyFunction("moe_variants.llama4"), _MOE_NAMES),
    "longcat_flash": ModelFamily(LazyFunction("moe_variants.longcat_flash"), {
        **_ROUTED, "moe_topk": ("num_experts_per_tok",), "ffn_hidden_size": ("intermediate_size",),
        "expert_ffn_hidden_size": ("moe_intermediate_size",),
    }),
    "gemma4_text": ModelFamily(LazyFunction("gemma4.gemma4")),
    "gemma4_unified_text": ModelFamily(LazyFunction("gemma4.gemma4_unified")),
    "gemma3n_text": ModelFamily(LazyFunction("gemma4.gemma3n")),
    "gpt2": ModelFamily(LazyFunction("gpt.gpt2"), _N_NAMES),
    "gpt_bigcode": ModelFamily(LazyFunction("gpt.gpt_bigcode"), _N_NAMES),
    "gptj": ModelFamily(LazyFunction("gpt.gptj"), _N_NAMES),
    "gpt_neo": ModelFamily(LazyFunction("gpt.gpt_neo"), {
        "num_layers": ("num_hidden_layers",), "num_heads": ("num_attention_heads",),
    }),
    "gpt_neox": ModelFamily(LazyFunction("gpt.gpt_neox")),
    "falcon": ModelFamily(LazyFunction("classic.falcon"), {
        "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",), "num_kv_heads": ("n_head_kv",),
    }),
    "mpt": ModelFamily(LazyFunction("classic.mpt"), {
        "d_model": ("hidden_size",), "n_heads": ("num_attention_heads",), "n_layers": ("num_hidden_layers",),
    }),
    "bloom": ModelFamily(LazyFunction("classic.bloom"), {
        "hidden_size": ("n_embed",), "n_layer": ("num_hidden_layers",), "n_head": ("num_attention_heads",),
    }),
    "opt": ModelFamily(LazyFunction("classic.opt")),
    "qwen3_next": ModelFamily(LazyFunction("delta.qwen3_next"), _MOE_NAMES),
    "qwen3_5_text": ModelFamily(LazyFunction("delta.qwen3_5")),
    "qwen3_5_moe_text": ModelFamily(LazyFunction("delta.qwen3_5_moe"), _MOE_NAMES),
    "lara_mini": ModelFamily(LazyFunction("delta.lara_mini"), _MOE_NAMES),
    "olmo_hybrid": ModelFamily(LazyFunction("delta.olmo_hybrid")),
    "nemotron_h": ModelFamily(LazyFunction("nemotron_h.nemotron_h"), {
        **_ROUTED, "n_groups": ("mamba_n_groups",), "conv_kernel": ("mamba_d_conv",),
        "chunk_size": ("mamba_chunk_size",), "use_conv_bias": ("mamba_conv_bias",),
    }),
    "granitemoehybrid": ModelFamily(
        LazyFunction("state_spaces.granitemoehybrid"), {"layer_types": ("layers_block_type",), **_MOE_NAMES}
    ),
    "bamba": ModelFamily(LazyFunction("state_spaces.bamba")),
    "jamba": ModelFamily(LazyFunction("state_spaces.jamba"), _MOE_NAMES),
    "falcon_h1": ModelFamily(LazyFunction("state_spaces.falcon_h1")),
    "zamba2": ModelFamily(
        LazyFunction("state_spaces.zamba2"),
        {"layer_types": ("layers_block_type",), "head_dim": ("attention_head_dim",)},
    ),
    "kimi_linear": ModelFamily(LazyFunction("kimi_linear.kimi_linear"), {
        "num_local_experts": ("num_experts",), "num_experts_per_tok": ("num_experts_per_token",),
        "n_shared_experts": ("num_shared_experts",), "num_expert_group": ("n_group",),
    }),
    "bailing_hybrid": ModelFamily(LazyFunction("kimi_linear.bailing_hybrid"), {
        "num_local_experts": ("num_experts",), "n_shared_experts": ("num_shared_experts",),
    }),
    "deepseek_v32": ModelFamily(LazyFunction("sparse.deepseek_v32"), _ROUTED),
    "deepseek_v4": ModelFamily(LazyFunction("deepseek_v4.deepseek_v4"), _ROUTED),
    "glm_moe_dsa": ModelFamily(LazyFunction("sparse.glm_moe_dsa"), _ROUTED),
    "minimax": ModelFamily(LazyFunction("minimax.minimax"), _MOE_NAMES),
    **dict.fromkeys(
        ("minimax_m3", "minimax_m3_vl_text"), ModelFamily(LazyFunction("minimax.minimax_m3"), _MOE_NAMES)
    ),
    "lfm2": ModelFamily(LazyFunction("lfm.lfm2")),
    "lfm2_moe": ModelFamily(LazyFunction("lfm.lfm2_moe"), _MOE_NAMES),
    "lfm3": ModelFamily(LazyFunction("lfm.lfm3")),
    **dict.fromkeys(("rwkv7", "rwkv7_fla"), ModelFamily(LazyFunction("rwkv.rwkv7"))),
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra"), ModelFamily(LazyFunction("encoders.bert"))
    ),
    "distilbert": ModelFamily(LazyFunction("encoders.bert"), {
        "hidden_size": ("dim",), "num_hidden_layers": ("n_layers",), "num_attention_heads": ("n_heads",),
        "intermediate_size": ("hidden_dim",), "hidden_act": ("activation",),
        "hidden_dropout_prob": ("dropout",), "attention_probs_dropout_prob": ("attention_dropout",),
    }),
    "modernbert": ModelFamily(LazyFunction("encoders.modernbert")),
    **dict.fromkeys(("t5", "mt5", "umt5"), ModelFamily(LazyFunction("t5.t5"), _T5_NAMES)),
    **dict.fromkeys(
        ("bart", "mbart", "m2m_100", "marian", "pegasus"),
        ModelFamily(LazyFunction("bart.bart"), {
            "d_model": ("hidden_size",), "encoder_layers": ("num_hidden_layers",),
            "encoder_attention_heads": ("num_attention_heads",),
        }),
    ),
    "mllama_text_model": ModelFamily(LazyFunction("mllama.mllama")),
    "whisper": ModelFamily(LazyFunction("bart.whisper"), {"d_model": ("hidden_size",)}),
}  # fmt: skip


class _Families(Mapping[str, ModelFamily]):
    """The decoders, the families above, and those that frameworks have (`FAMILIES` in their module
    `model_families`).

    Each is read or imported only when it is needed.
    """

    def __getitem__(self, model_type: str) -> ModelFamily:
        if model_type in decoders.names():
            facts = decoders.decoder(model_type)
            return ModelFamily(
                decoders.builder_of(facts), {key: tuple(v) for key, v in facts.aliases.items()}
            )
        family = _FAMILIES.get(model_type)
        return self._framework_families()[model_type] if family is None else family

    def __iter__(self) -> Iterator[str]:
        inserted = self._framework_families()
        for model_type in (*decoders.names(), *_FAMILIES):
            yield from (name for name, family in inserted.items() if family.listed_before == model_type)
            yield model_type

    def __len__(self) -> int:
        return len(decoders.names()) + len(_FAMILIES) + len(self._framework_families())

    def _framework_families(self) -> dict[str, ModelFamily]:
        kinds = kinds_with("model_families")
        return {
            name: family
            for kind in kinds
            for name, family in role_of(kind, "model_families", "FAMILIES").items()
        }


FAMILIES: Mapping[str, ModelFamily] = _Families()

_STATE_SPACES = "most of its layers are state spaces"
REFUSED_TYPES = {
    "mamba": _STATE_SPACES,
    "mamba2": _STATE_SPACES,
    "falcon_mamba": _STATE_SPACES,
    "rwkv": "its layers are RWKV-4's recurrence",
    "zamba": "blocks of attention that several layers share",
    **dict.fromkeys(
        ("deberta", "deberta-v2"), "its attention of contents to positions, and of those to contents"
    ),
    "recurrent_gemma": "its real-gated linear recurrences",
    "xlstm": "its matrix memories",
    "phi4_multimodal": "its adapters by modality; its language model alone is a phi3",
    "nemotron-nas": "its layers, each of other heads and widths",
    "kimi_k3": "its sums of earlier layers' outputs and experts narrower than the model",
    "zaya": "its attention with convolutions of queries and keys",
    "axk2": "its norms with gates of low rank",
    "hy_v4": "its hyper-connections around latent attention with sinks",
    "dory": "its looped blocks with normalised weights",
    "hrm_text": "its two stacks of blocks, which run several times",
    "dots3_note_text": "its gates of latent attention with two widths of heads",
    "qwen4_exp": "its embeddings of hashed n-grams and hyper-connections of low rank",
    "glm5_next": "its hyper-connections around Kimi delta and pooled sparse attention",
    "mistral_large4": "its layers that attend to the latent keys of an earlier layer",
    "inkling": "its scores of learned relative positions and its short convolutions",
    "muse_spark": "its gated residual and experts narrower than the model",
}

_DRAFTS = re.compile(r"Eagle(?!\w*VL)|EAGLE|DFlash|DSpark|^Medusa|Draft")  # NVIDIA's Eagle_VL sees images

_MIN_SIMILARITY = 0.8  # of spellings: a slip of the finger, not another architecture


def load_model(name_or_path: str | Path) -> ModelSpec:
    """The model of a preset's name, a `config.json`, a folder that holds one, or a Hub id.

    Raises InputError for a missing or damaged file, an unknown family, or impossible shapes.
    """
    return model_from_config(*read_model_config(name_or_path))


def read_model_config(name_or_path: str | Path) -> tuple[Mapping[str, Any], str, str]:
    """(the parsed `config.json`, the model's name, the source named in errors) of a preset, a file, a folder
    or a Hub id."""
    text = str(name_or_path)
    path = Path(text)
    if text in presets.model_preset_names():
        path, name = presets.model_preset_path(text), text
    elif os.path.isdir(path):
        path, name = path / "config.json", path.name
    elif path.suffix == ".json" or os.path.exists(path):
        name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    elif located := hub_names.locate_model(text, ()):
        is_preset = located in presets.model_preset_names()
        path = presets.model_preset_path(located) if is_preset else Path(located)
        name = located if is_preset else text.rpartition("/")[2]
    elif hub_names.is_hub_id(text):
        raise InputError(hub_names.unknown_hub_id(text))
    elif "/" in text:
        name = path.stem
    else:
        path, name = presets.model_preset_path(text), text
    return _read_json(path), name, str(path)


def model_from_config(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """The model of a parsed `config.json`, with its vision tower. `source` is named in errors."""
    refused = str(config.get("model_type"))
    base_type = refused.removesuffix("_mm_model").removesuffix("_text")
    if reason := REFUSED_TYPES.get(refused, REFUSED_TYPES.get(base_type)):
        raise NotSimulatedError(f"{source}: model type '{refused}' is not simulated: {reason}")
    if draft := next(filter(_DRAFTS.search, map(str, config.get("architectures") or ())), None):
        raise NotSimulatedError(
            f"{source}: '{draft}' drafts tokens for another model, whose features it reads, which zsim does "
            "not simulate; expected the config.json of a whole model"
        )
    split = split_config(config, name, source, FAMILIES)
    values, where = split.text, split.where
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InputError(
            f"{where}: no 'model_type'; expected a Hugging Face config.json of one of {_family_names()}"
        )
    family = FAMILIES.get(model_type)
    if family is None:
        raise InputError(
            f"{where}: model type '{model_type}' is not a transformer that zsim knows"
            f"{_misspelt_family(model_type)}; known are {_family_names()}"
        )
    model = family.build(ConfigReader(values, name, where, model_type, family.aliases))
    return add_towers(model, split)


def _misspelt_family(model_type: str) -> str:
    """The end of an error message: the family that a type misspells.

    A type that extends a family's name, or has another number, is another architecture: nothing is proposed.
    """
    similar = [
        family
        for family in FAMILIES
        if re.findall(r"\d", family) == re.findall(r"\d", model_type)
        and SequenceMatcher(None, family, model_type).ratio() >= _MIN_SIMILARITY
    ]
    return did_you_mean(model_type, similar)


def _family_names() -> str:
    return ", ".join(FAMILIES)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        text = read_text(path, encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a Hugging Face config.json") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"{path}: {unreadable_reason(problem)}; expected a config.json") from None
    try:
        config = parse_json(text, path)
    except json.JSONDecodeError as problem:
        raise InputError(
            f"{path}: line {problem.lineno}: not valid JSON ({problem.msg}); is the file whole?"
        ) from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: holds a {type(config).__name__}; expected a JSON object")
    return config
