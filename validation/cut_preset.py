"""The content of a preset's config.json with its first blocks only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zsim.files import PRESETS

LAYER_LISTS = ("layer_types", "mlp_layer_types")


def cut_preset(name: str) -> dict[str, Any]:
    """A preset by name, or a config.json by path; `name@4` with its first four blocks."""
    base, _, blocks = name.partition("@")
    shipped = PRESETS / "models" / f"{base}.json"
    content: dict[str, Any] = json.loads((shipped if shipped.exists() else Path(base)).read_text())
    if blocks:
        content["num_hidden_layers"] = int(blocks)
        for key in LAYER_LISTS:
            if isinstance(content.get(key), list):
                content[key] = content[key][: int(blocks)]
    return content
