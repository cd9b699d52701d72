"""Names of models on the Hugging Face Hub -> a preset, or the config.json in the Hub's cache on this machine.

Nothing is downloaded. A preset says in its `_source` whose config.json it is. Tuned versions of the same
organisation (`-Instruct`, `-it`, `-chat`) and plain copies by others have the same shapes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from zsim.reading import read_text
from zsim.specs import presets

_SOURCE = re.compile(r"config\.json of ([\w.-]+)/([\w.-]+)")
_MIRRORS = ("nousresearch", "unsloth", "mistral-community")  # of weights as they were published
_TUNED = frozenset({"instruct", "it", "chat", "hf", "pt", "base", "bf16", "meta"})
_QUANTISED = re.compile(
    r"gptq|awq|aqlm|hqq|eetq|exl2|int4|int8|w4a16|fp8|nvfp4|mxfp4|[-_](bnb|nf4)", re.IGNORECASE
)


def locate_model(name: str, folder: Path) -> str | None:
    """A preset's name, or the path of a config.json, for a model that a file in `folder` names.

    The name is a path from there or from the working folder, a preset, or an id of the Hub. None if there is
    neither.
    """
    for start in (folder, Path()):
        path = start / os.path.expanduser(name)
        if os.path.isfile(path / "config.json"):
            return str(path / "config.json")
    if name in presets.model_preset_names():
        return name
    return _preset_of(name) or _cached_config(name)


def is_quantised_name(name: str) -> bool:
    """Whether a model's name says that its weights are stored quantised."""
    return _QUANTISED.search(name.rpartition("/")[2]) is not None


def _preset_of(name: str) -> str | None:
    organisation, _, model = name.strip("/").rpartition("/")
    organisation = organisation.rpartition("/")[2].lower()
    for preset in presets.model_preset_names():
        for owner, source in _sources(preset):
            if _shape_name(source) == _shape_name(model) and organisation in (owner.lower(), *_MIRRORS):
                return preset
    return None


def _sources(preset: str) -> Iterator[tuple[str, str]]:
    source = json.loads(presets.model_preset_path(preset).read_text()).get("_source", "")
    yield from _SOURCE.findall(source)


def _shape_name(model: str) -> str:
    """The name without what does not change shapes: `Meta-Llama-3-8B-Instruct` -> `llama-3-8b`."""
    return "-".join(word for word in model.lower().split("-") if word not in _TUNED)


def cache_folder() -> Path:
    """The Hub's cache, by HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME (huggingface_hub 1.0 constants.py)."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder)
    if folder := os.environ.get("HF_HOME"):
        return Path(folder) / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "huggingface" / "hub"


def _cached_config(name: str) -> str | None:
    """The config.json of the snapshot that `main` points to, else of the last by name."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    model = cache_folder() / f"models--{name.replace('/', '--')}"
    snapshots = model / "snapshots"
    try:
        revision = read_text(model / "refs" / "main").strip()
        names = [revision] if re.fullmatch(r"[0-9a-f]+", revision) else []
    except (OSError, UnicodeDecodeError):
        names = []
    try:
        names += sorted(os.listdir(snapshots), reverse=True)
    except OSError:
        return None
    configs = (snapshots / revision / "config.json" for revision in names)
    return next((str(path) for path in configs if os.path.isfile(path)), None)
