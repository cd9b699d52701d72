"""DeepSpeed's JSON, as dotted keys of an experiment reach into it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.frameworks.deepspeed.settings.reader import require_deepspeed_file
from zsim.frameworks.deepspeed.settings.text import load_object
from zsim.frameworks.deepspeed.settings.zero_schema import ZeroBlock
from zsim.specs.experiment.overrides import ConfigFile, set_dotted_key

_CONFIG = "strategy.config."
# With a stage alone, batch size and precision are the experiment's, or as Hugging Face fills "auto".
_STAGE_DEFAULTS = {"train_micro_batch_size_per_gpu": "auto"}
_PRECISION_BLOCKS = ("bf16", "fp16")


class DeepSpeedJson(ConfigFile):
    noun = "DeepSpeed's JSON"
    keys = ("strategy.stage", "strategy.config")

    def change(
        self, table: dict[str, Any], changes: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        base = table.get("config")
        if base is None:
            config: dict[str, Any] = dict(_STAGE_DEFAULTS)
            if not any(key.split(".")[0] in (*_PRECISION_BLOCKS, "bfloat16") for key in changes):
                config |= {block: {"enabled": "auto"} for block in _PRECISION_BLOCKS}
            if table.get("stage") is not None:
                config["zero_optimization"] = {"stage": table["stage"]}
            name = "DeepSpeed config"
        else:
            name, config = load_object(base, table.get("config_name"))
        for key, value in changes.items():
            path = _existing_spelling(config, key)
            set_dotted_key(config, path, value, prefix=_CONFIG)
            if key == "zero_optimization.stage" and "strategy.stage" not in overrides:
                table.pop("stage", None)
        return {**table, "config": config, "config_name": name}

    def require(self, path: str | Path) -> None:
        require_deepspeed_file(path)


CONFIG_FILE = DeepSpeedJson()


def _existing_spelling(config: Mapping[str, Any], key: str) -> str:
    """`key` in the spelling that the JSON already uses: `stage3_x` or `x`, `bfloat16` or `bf16`."""
    block, _, subkey = key.partition(".")
    if block in ("bf16", "bfloat16"):
        return f"{'bfloat16' if 'bfloat16' in config else 'bf16'}.{subkey}" if subkey else block
    zero = config.get(block)
    if block != "zero_optimization" or not isinstance(zero, Mapping):
        return key
    for bare, info in ZeroBlock.model_fields.items():
        if subkey in (bare, info.alias):
            json_spelling = next((spelling for spelling in (bare, info.alias) if spelling in zero), subkey)
            return f"{block}.{json_spelling}"
    return key
