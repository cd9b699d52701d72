"""Changes one key of a `config.json` at a time, and compares zsim's count of parameters with transformers'.

    python validation/models/config_keys.py                # every family, some minutes
    python validation/models/config_keys.py zamba2 gemma3  # some

For each `model_type` that zsim reads and transformers has, the keys of its configuration class and of those
of its towers are changed one after the other: flags flipped, counts doubled, halved and left out, lists
reversed. transformers' class is built on the meta device. A line is printed for each file that zsim counts
otherwise, and the exit code is 1 if there is one. What zsim refuses by name is not printed. transformers is
no dependency of zsim: install it in an environment of its own.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.model.huggingface import FAMILIES, model_from_config
from zsim.specs.model.multimodal import MULTIMODAL_FAMILIES

_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64,
    "intermediate_size": 96, "ffn_hidden_size": 96, "ffn_dim": 96, "word_embed_proj_dim": 64,
    "num_hidden_layers": 4, "num_layers": 4, "n_layer": 4, "n_layers": 4, "depth": 4, "encoder_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_positions": 64,
    "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "vocab_size_per_layer_input": 96,
    "out_hidden_size": 64, "output_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Sizes of the small files that are changed, of the keys that a class has."""
_FURTHER: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "kimi_k25": {"projection_hidden_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "paligemma": {"projection_dim": 64},
    "qwen2_vl_vision": {"hidden_size": 64, "embed_dim": 32},
    "siglip_vision_model": {"vision_use_head": False, "patch_size": 14, "image_size": 448},
    "siglip2_vision_model": {"vision_use_head": False},
    "voxtral_encoder": {"intermediate_size": 256},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_d_state": 16},
}
"""Further keys of the files of some types."""
LEFT_OUT = {
    "longcat_flash": "transformers gives weights to experts that compute nothing and that no checkpoint has"
}
_MASKED = ("bert", "roberta", "xlm-roberta", "camembert", "modernbert")
_NO_SHAPE = re.compile(
    r"_token_(id|index)$|_eps$|epsilon|dropout|_pdrop|initializer|^rope|theta|^dtype|use_cache|problem_type"
    r"|output_(hidden|attent|router)|return_dict|id2label|label2id|architectures|transformers_version|_factor$"
    r"|chunk_size|attn_impl|_std$|_coef$|layerdrop|pretraining_tp|^_|scaling|multiplier|is_encoder_decoder"
    r"|summary_|max_position|soft_?cap|sliding_window$|time_step|activation|hidden_act|num_labels"
)
"""Keys that change no shape, and those whose values are words."""
_WORDS: dict[str, Sequence[str]] = {
    "feed_forward_proj": ("gated-gelu", "relu", "gated-silu"),
    "norm_type": ("rms_norm", "layer_norm"),
    "position_embedding_type": ("rope", "nope", "absolute"),
}
_LEFT_OUT = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """A file that zsim counts otherwise than transformers."""

    model_type: str
    change: str
    expected: int | str
    """Parameters of transformers' model, or why the unchanged file has none."""
    result: int

    def __str__(self) -> str:
        return f"{self.model_type}: {self.change}: transformers {self.expected}, zsim {self.result}"


def class_of(model_type: str) -> Any:
    """transformers' class of the model that is trained with this type. None without one."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )  # fmt: skip
    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    searched = (masked,) if model_type in _MASKED else tables
    name = next((table[model_type] for table in searched if model_type in table), None)
    return None if name is None else getattr(transformers, name if isinstance(name, str) else name[0], None)


def count(model_type: str, values: dict[str, Any]) -> int:
    """Parameters of transformers' model of a file."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(values))
    with torch.device("meta"):
        model = class_of(model_type)(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def files(model_type: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is changed, the keys of a file), the unchanged one first."""
    import transformers

    kind = type(transformers.AutoConfig.for_model(model_type))
    base, defaults = _small(kind, model_type), kind()
    for name, part_class in kind.sub_configs.items():
        part = type(getattr(defaults, name))
        part = part_class if part is type(None) else part
        base[name] = {**_small(part, part.model_type), "model_type": part.model_type}
        # A file that says nothing is read as its checkpoint, in which head and embedding differ.
        base["tie_word_embeddings"] = False
    yield "nothing", base
    made = kind(**copy.deepcopy(base))
    for key, value in (*((name, _LEFT_OUT) for name in kind.sub_configs), *_changes(made, base)):
        yield _described(key, value), _with(base, key, value)
    for name in kind.sub_configs:
        is_swept = name == "text_config" and class_of(base[name]["model_type"]) is not None
        for key, value in _changes(getattr(made, name), base[name]):
            if not is_swept or key == "tie_word_embeddings":
                yield f"{name}.{_described(key, value)}", {**base, name: _with(base[name], key, value)}


def _small(config_class: Any, model_type: str) -> dict[str, Any]:
    names = {field.name for field in fields(config_class)} - set(config_class.attribute_map)
    sizes = {key: value for key, value in _SIZES.items() if key in names}
    return {**sizes, **_FURTHER.get(model_type, {})}


def _changes(config: Any, small: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, another value) of a configuration."""
    for field in fields(config):
        key, hint = field.name, str(field.type)
        if _NO_SHAPE.search(key) or key in type(config).sub_configs:
            continue
        try:
            value = getattr(config, key, None)
        except Exception:  # it differs by layer (Gemma 4)
            value = field.default
        if key in small and key != "tie_word_embeddings":
            yield key, _LEFT_OUT
        if key in _WORDS:
            yield from ((key, word) for word in _WORDS[key] if word != value)
        elif isinstance(value, bool):
            yield key, not value
        elif isinstance(value, int):
            yield from ((key, other) for other in sorted({2 * value, value // 2} - {value}))
            if "None" in hint:
                yield key, None
        elif isinstance(value, list) and value:
            yield key, value[::-1]
            yield key, [value[-1]] * len(value)
        elif value is None and "bool" in hint:
            yield from ((key, True), (key, False))
        elif value is None and "int" in hint and "dict" not in hint and "list" not in hint:
            yield from ((key, 1), (key, 8))


def _described(key: str, value: Any) -> str:
    return f"without {key}" if value is _LEFT_OUT else f"{key} = {value}"


def _with(base: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {name: old for name, old in {**base, key: value}.items() if old is not _LEFT_OUT}


def differences(model_type: str) -> Iterator[Difference]:
    """The files of a type that zsim counts otherwise. Those that either refuses are passed over."""
    for change, values in files(model_type):
        try:
            model = model_from_config({"model_type": model_type, **copy.deepcopy(values)}, "changed", "file")
        except (InputError, NotSimulatedError) as refusal:
            if change == "nothing":
                raise AssertionError(f"{model_type}: the unchanged file is refused") from refusal
            continue
        try:
            expected = count(model_type, values)
        except Exception as problem:
            if change == "nothing":
                raise AssertionError(f"{model_type}: transformers refuses the unchanged file") from problem
            continue
        if model.numel != expected:
            yield Difference(model_type, change, expected, model.numel)


def main(names: Sequence[str]) -> int:
    """Print the differences of some types, or all."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    known = [name for name in (*FAMILIES, *MULTIMODAL_FAMILIES) if class_of(name) is not None]
    wrong, types = 0, names or [name for name in known if name not in LEFT_OUT]
    for name in types:
        for difference in differences(name):
            print(difference, flush=True)
            wrong += 1
    print(f"{len(types)} types, {wrong} files counted otherwise")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
