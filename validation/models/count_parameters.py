"""Counts the parameters of the model presets by transformers' own classes, on the meta device.

    python validation/models/count_parameters.py            # writes tests/specs/transformers_counts.json

and the counts of the configurations in tests/specs/decoder_counts.json. transformers is no dependency of
zsim: install it in an environment of its own. `sha256` is over a line "name [shape]" for every entry of
`named_parameters()`, in order, shared weights once.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COUNTS = ROOT / "tests" / "specs" / "transformers_counts.json"
DECODERS = ROOT / "tests" / "specs" / "decoder_counts.json"
MASKED = {"bert", "roberta", "modernbert", "distilbert", "electra"}
TRANSLATORS = {"t5", "bart", "mbart", "m2m_100", "marian", "pegasus"}
# Not transformers' own code, or not by its own key names, or with weights that no checkpoint has (LongCat).
ELSEWHERE = {"exaone", "mpt", "megatron", "qwen", "rwkv7", "longcat_flash"}
_COUNTED = ("parameters", "tensors", "sha256")
RENAMED = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}


def count(config: dict[str, Any]) -> tuple[int, int, str]:
    """(parameters, tensors, digest of names and shapes) of a config.json's model."""
    import torch
    import transformers
    from transformers.models.auto import modeling_auto

    values = {key: value for key, value in config.items() if not key.startswith("_")}
    model_type = values.pop("model_type")
    model_type = RENAMED.get(model_type, model_type)
    values.pop("architectures", None)
    if model_type == "exaone4" and values.get("sliding_window") is None:
        # transformers divides by the pattern of a file without a window unless the layers are listed
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type in MASKED:
        names = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    elif model_type in TRANSLATORS:
        names = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    elif model_type == "whisper":
        names = modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    found = {**modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **names}[model_type]
    built = getattr(transformers, found if isinstance(found, str) else found[0])
    shape = transformers.AutoConfig.for_model(model_type, **values)
    with torch.device("meta"):
        model = built(shape)
    model.tie_weights()
    listed = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    lines = "".join(f"{name} {shape}\n" for name, shape in listed)
    total = sum(parameter.numel() for parameter in model.parameters())
    return total, len(listed), hashlib.sha256(lines.encode()).hexdigest()[:16]


def main() -> None:
    """Write the counts of all presets."""
    import torch
    import transformers

    counts = {}
    for path in sorted((ROOT / "zsim" / "presets" / "models").glob("*.json")):
        config = json.loads(path.read_text())
        if config["model_type"] in ELSEWHERE or "vision_config" in config:  # towers: published_towers.json
            continue
        total, tensors, digest = count(config)
        counts[path.stem] = {"parameters": total, "tensors": tensors, "sha256": digest}
    head = {
        "_source": "validation/models/count_parameters.py over zsim/presets/models",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    lines = ",\n".join(f'    "{name}": {json.dumps(one)}' for name, one in counts.items())
    opening = json.dumps(head, indent=2)[:-2]
    COUNTS.write_text(f'{opening},\n  "models": {{\n{lines}\n  }}\n}}\n')
    configs = [entry["config"] for entry in json.loads(DECODERS.read_text())["models"]]
    entries = [dict(zip(("config", *_COUNTED), (config, *count(config)), strict=True)) for config in configs]
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
    DECODERS.write_text(f'{opening},\n  "models": [\n{lines}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
