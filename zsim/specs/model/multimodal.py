"""Models with towers: the parts of a `config.json`, and the towers before its language model.

The language model is under `text_config`, or beside `vision_config` in files of older releases. Names as in
transformers 5.24 (`modeling_*.py` of each type), where the language model is under a name of its own.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from zsim.errors import NotSimulatedError
from zsim.operations.image_features import ImageFeatures
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families import LazyFunction
from zsim.specs.model.spec import Block, ModelSpec, Module

TEXT_ONLY = "text_only"
"""The key of a model that asks for its language model alone."""


@dataclass(frozen=True, slots=True)
class MultimodalFamily:
    """The towers of a `model_type`."""

    tower: str | None
    """The name of the builder of its vision tower, of its configuration and the language model's width."""
    text_type: str
    """The type of the language model where the file does not say it."""
    root: str = "model.language_model"
    """What the language model's `model` is in the whole model's parameters' names."""
    head: str = "lm_head"
    tower_keys: tuple[str, ...] = ()
    """Keys beside the tower's configuration that are the projector's."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The sizes of the language model where the file leaves them out."""
    tower_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The sizes of the vision tower of a file without its configuration."""
    has_optional_towers: bool = False
    """A tower without its configuration is not there. False for one with the sizes of the class."""
    text_keys: tuple[str, ...] = ()
    """Keys of the whole file that the language model reads too, where it is not alone."""
    audio: str | None = None
    """The name of that of its tower of sounds, which runs first."""

    @property
    def builders(self) -> Mapping[str, str]:
        """Builders of towers by the keys of their configurations, in the order in which they run."""
        builders = {"audio_config": self.audio, "vision_config": self.tower}
        return {key: name for key, name in builders.items() if name is not None}


_PROJECTOR = ("projector_hidden_size", "projector_hidden_act", "projector_bias", "multimodal_projector_bias")
_LLAMA = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
_QWEN2 = {**_LLAMA, "vocab_size": 151_936, "intermediate_size": 22_016}
_IDEFICS3 = MultimodalFamily(
    "towers.idefics3_tower", "llama", "model.text_model", tower_keys=("scale_factor",), text_defaults=_LLAMA
)
_LLAVA = MultimodalFamily(
    "towers.llava_tower", "llama", text_defaults=_LLAMA,
    tower_keys=("vision_feature_layer", "vision_feature_select_strategy", *_PROJECTOR),
    tower_defaults={
        "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14, "image_size": 336,
        "num_hidden_layers": 24, "num_attention_heads": 16,
    },
)  # fmt: skip

MULTIMODAL_FAMILIES: Mapping[str, MultimodalFamily] = {
    "qwen2_vl": MultimodalFamily("qwen_towers.qwen2_vl_tower", "qwen2_vl_text"),
    "qwen2_5_vl": MultimodalFamily("qwen_towers.qwen2_5_vl_tower", "qwen2_5_vl_text"),
    "qwen3_vl": MultimodalFamily("qwen_towers.qwen3_vl_tower", "qwen3_vl_text"),
    "qwen3_vl_moe": MultimodalFamily("qwen_towers.qwen3_vl_tower", "qwen3_vl_moe_text"),
    "qwen3_5": MultimodalFamily("qwen_towers.qwen3_vl_tower", "qwen3_5_text"),
    "qwen3_5_moe": MultimodalFamily("qwen_towers.qwen3_vl_tower", "qwen3_5_moe_text"),
    "paligemma": MultimodalFamily(
        "towers.paligemma_tower", "gemma", tower_keys=("projection_dim",),
        text_defaults={"tie_word_embeddings": True},
        tower_defaults={
            "hidden_size": 1152, "intermediate_size": 4096, "patch_size": 14, "num_hidden_layers": 27,
            "num_attention_heads": 16, "vision_use_head": False,
        },
    ),
    "gemma3": MultimodalFamily("towers.siglip_tower", "gemma3_text"),
    "gemma4": MultimodalFamily(
        "towers.gemma4_tower", "gemma4_text", audio="audio_towers.gemma4_sounds", has_optional_towers=True
    ),
    "gemma4_unified": MultimodalFamily(
        "towers.gemma4_unified_tower", "gemma4_unified_text", audio="audio_towers.gemma4_unified_sounds",
        has_optional_towers=True,
    ),
    "glm4v": MultimodalFamily("qwen_towers.glm4v_tower", "glm4v_text"),
    "glm46v": MultimodalFamily("qwen_towers.glm4v_tower", "glm4v_text"),
    "glm4v_moe": MultimodalFamily("qwen_towers.glm4v_tower", "glm4v_moe_text"),
    "glm_ocr": MultimodalFamily("qwen_towers.glm_ocr_tower", "glm_ocr_text"),
    "kimi_k25": MultimodalFamily(
        "qwen_towers.kimi_k25_tower", "deepseek_v3", tower_keys=("projection_hidden_size",)
    ),
    "kimi_vl": MultimodalFamily(
        "qwen_towers.kimi_vl_tower", "deepseek_v3", "language_model.model", "language_model.lm_head"
    ),
    "internvl": MultimodalFamily("towers.internvit_tower", "qwen2"),
    "mistral3": MultimodalFamily(
        "qwen_towers.pixtral_tower", "mistral",
        tower_keys=("spatial_merge_size", "vision_feature_layer", *_PROJECTOR),
        tower_defaults={"patch_size": 14, "image_size": 1540, "head_dim": 64},
    ),
    "lighton_ocr": MultimodalFamily(
        "qwen_towers.lighton_ocr_tower", "qwen3", tower_keys=("spatial_merge_size",),
        tower_defaults={"patch_size": 14, "image_size": 1540, "head_dim": 64},
        text_defaults={
            "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
    ),
    "aya_vision": MultimodalFamily(
        "towers.cohere_tower", "cohere2", text_defaults={"tie_word_embeddings": True},
        tower_keys=("downsample_factor", "alignment_intermediate_size", "vision_feature_layer"),
        tower_defaults={
            "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14, "image_size": 384,
            "num_hidden_layers": 26, "num_attention_heads": 14, "vision_use_head": False,
        },
    ),
    "cohere2_vision": MultimodalFamily(
        "towers.cohere_tower", "cohere2", text_defaults={"tie_word_embeddings": True},
        tower_keys=("downsample_factor", "alignment_intermediate_size"),
    ),
    "llava": _LLAVA,
    "llava_next": replace(
        _LLAVA, tower="towers.llava_next_tower", tower_keys=(*_LLAVA.tower_keys, "image_grid_pinpoints")
    ),
    "mllama": MultimodalFamily(
        "mllama.mllama_tower", "mllama_text_model", text_keys=("vision_config",)
    ),
    "llava_onevision": MultimodalFamily(
        "towers.llava_onevision_tower", "qwen2", text_defaults=_QWEN2,
        tower_keys=("image_grid_pinpoints", "vision_aspect_ratio", *_PROJECTOR),
        tower_defaults={
            "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14, "image_size": 384,
            "num_hidden_layers": 26, "num_attention_heads": 16, "vision_use_head": False,
        },
    ),
    "lfm2_vl": MultimodalFamily(
        "towers.lfm2_vl_tower", "lfm2",
        tower_keys=("downsample_factor", "projector_use_layernorm", *_PROJECTOR),
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "minimax_m3_vl": MultimodalFamily("towers.minimax_m3_tower", "minimax_m3_vl_text", tower_keys=_PROJECTOR),
    "step3p7": MultimodalFamily("towers.step3p7_tower", "step3p5", tower_keys=_PROJECTOR),
    "llama4": MultimodalFamily(
        "towers.llama4_tower", "llama4_text", "language_model.model", "language_model.lm_head"
    ),
    "exaone4_5": MultimodalFamily("qwen_towers.qwen2_5_vl_tower", "exaone4"),
    "qwen2_audio": MultimodalFamily(
        None, "qwen2", audio="audio_towers.qwen2_audio_tower", text_defaults=_QWEN2
    ),
    "voxtral": MultimodalFamily(
        None, "llama", tower_keys=_PROJECTOR, audio="audio_towers.voxtral_tower",
        text_defaults={
            "vocab_size": 131_072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        },
    ),
    "audioflamingo3": MultimodalFamily(
        None, "qwen2", tower_keys=_PROJECTOR, audio="audio_towers.audio_flamingo_tower", text_defaults=_QWEN2
    ),
    "qwen3_asr": MultimodalFamily(
        None, "qwen3", audio="audio_towers.qwen3_asr_tower", text_defaults={"tie_word_embeddings": True}
    ),
    "qwen2_5_omni_thinker": MultimodalFamily(
        "qwen_towers.qwen2_5_vl_tower", "qwen2_5_omni_text", audio="audio_towers.qwen2_5_omni_tower"
    ),
    "qwen3_omni_moe_thinker": MultimodalFamily(
        "qwen_towers.qwen3_vl_tower", "qwen3_omni_moe_text", audio="audio_towers.qwen3_omni_tower"
    ),
}  # fmt: skip
_TOWERS = ("vision_config", "audio_config", "vision_tower_config")
# Their head is tied where either part of the file says it, others' where the whole does.
_TIED_BY_TEXT = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "llava", "minimax_m3_vl")
_CHANNELS = ("num_channels", "in_channels", "in_chans")
_THINKER = "thinker_config"  # of Qwen's omni models, whose talker is not trained with it


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a `config.json`."""

    text: Mapping[str, Any]
    where: str
    """The language model's part, in messages."""
    towers: Sequence[tuple[ConfigReader, str]] = ()
    """The parts of towers, in the order in which they run. Empty for a language model by itself."""
    family: MultimodalFamily | None = None


def split_config(config: Mapping[str, Any], name: str, source: str, known_types: object) -> ModelParts:
    """The parts of a parsed file. `known_types` are the types of language models.

    Raises NotSimulatedError for a tower of a type that zsim does not know, unless the file asks for its
    language model alone.
    """
    if isinstance(thinker := config.get(_THINKER), dict):
        asked_for = {key: config[key] for key in (TEXT_ONLY,) if key in config}
        return split_config({**thinker, **asked_for}, name, f"{source}: {_THINKER}", known_types)
    model_type = str(config.get("model_type"))
    nested = config.get("text_config")
    family = MULTIMODAL_FAMILIES.get(model_type)
    is_text_only = config.get(TEXT_ONLY) is True
    text: Mapping[str, Any]
    if isinstance(nested, dict) and model_type not in known_types:  # type: ignore[operator]
        text, where = nested, f"{source}: text_config"
    elif family is not None:
        text, where = (
            ChainMap({"model_type": family.text_type}, cast(MutableMapping[str, Any], config)),
            source,
        )
    else:
        return ModelParts(config, source)
    if family is not None and isinstance(nested, dict):
        text = {"model_type": family.text_type, **family.text_defaults, **text}
        if "tie_word_embeddings" in config and model_type != "llama4":  # whose language model alone says it
            is_tied = model_type in _TIED_BY_TEXT and text.get("tie_word_embeddings")
            text["tie_word_embeddings"] = is_tied or config["tie_word_embeddings"]
    if is_text_only:
        return ModelParts(text, where)
    if family is not None and family.text_keys:
        text = ChainMap(
            {key: config.get(key) for key in family.text_keys}, cast(MutableMapping[str, Any], text)
        )
    if family is None:
        tower = next((key for key in _TOWERS if isinstance(config.get(key), dict)), "")
        besides = (
            f"{tower} besides text_config" if tower else "text_config, whose other parts it does not know"
        )
        raise NotSimulatedError(
            f"{source}: model type '{model_type}' has {besides}; zsim simulates towers of "
            f"{', '.join(MULTIMODAL_FAMILIES)}. Its language model alone is asked for by "
            f"model.{TEXT_ONLY} = true"
        )
    unknown = next((key for key in _TOWERS if key not in family.builders and config.get(key)), None)
    if unknown is not None:
        raise NotSimulatedError(
            f"{source}: model type '{model_type}' has {unknown}, of whose tower zsim knows nothing; expected "
            f"null, for the model without that tower, or model.{TEXT_ONLY} = true"
        )
    reader = ConfigReader(config, name, source, model_type)
    projector = {key: config[key] for key in family.tower_keys if key in config}
    tower_configs = [
        (_tower_config(reader, key, family).add_defaults(**projector), builder_name)
        for key, builder_name in family.builders.items()
        if config.get(key) is not None or not family.has_optional_towers
    ]
    return ModelParts(text, where, tower_configs, family)


def _tower_config(reader: ConfigReader, key: str, family: MultimodalFamily) -> ConfigReader:
    part = reader.nested(key)
    if reader.values.get(key) is None and key == "vision_config":
        part = part.add_defaults(**family.tower_defaults)
    channels = next((name for name in _CHANNELS if part.values.get(name) not in (None, 3)), None)
    if channels is not None:
        raise part.error(f"'{channels}' is {part.values[channels]}; expected 3, of images with three colours")
    return part


def add_towers(model: ModelSpec, config: ModelParts) -> ModelSpec:
    """The language model with its towers before it, and with the whole model's names."""
    if config.family is None or not config.towers:
        return model
    family = config.family

    def rename(name: str) -> str:
        return name.replace("lm_head", family.head, 1) if "lm_head" in name else _move(name, family.root)

    def rename_module(module: Module) -> Module:
        owner = module.parameter_owner
        return replace(
            module, name=rename(module.name), parameter_owner=None if owner is None else rename(owner)
        )

    towers = tuple(LazyFunction(name)(part, model.hidden_size) for part, name in config.towers)

    def rename_all(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if names is None else tuple(map(rename, names))

    return replace(
        model,
        family=config.towers[0][0].family,
        text_family=model.family,
        before=tuple(map(rename_module, model.before)),
        blocks=_add_deep_features(model, sum(tower.num_deep_features for tower in towers)),
        after=tuple(map(rename_module, model.after)),
        block_prefix=rename(model.block_prefix),
        registered_before_blocks=rename_all(model.registered_before_blocks),
        registered_after_blocks=rename_all(model.registered_after_blocks),
        towers=towers,
    )


def _move(name: str, root: str) -> str:
    first, _, rest = name.partition(".")
    return f"{root}.{rest}" if first == "model" and rest else name


def _add_deep_features(model: ModelSpec, count: int) -> tuple[Block, ...]:
    """The blocks, of which the first `count` add features of the tower to the stream."""
    addition = Module("deepstack_features", ImageFeatures(model.hidden_size, is_added=True))
    changed = {
        id(block): replace(block, modules=(*block.modules, addition)) for block in model.blocks[:count]
    }
    first = tuple(changed[id(block)] for block in model.blocks[:count])
    return (*first, *model.blocks[count:])
