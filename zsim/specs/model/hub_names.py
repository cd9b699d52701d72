"""Models by the names that people use: Hub ids, capitals, and variants that have one shape."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from zsim.errors import did_you_mean
from zsim.reading import read_text
from zsim.specs import presets

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_VARIANTS = re.compile(r"(-(instruct|base|chat|it|pt|hf|bf16|fp16|unsloth|bnb|nf4|4bit))+$")
"""Endings of names of checkpoints whose tensors have the shapes of the model without them."""


def is_hub_id(text: str) -> bool:
    """Whether a text has the form `organisation/model`."""
    return _HUB_ID.fullmatch(text) is not None and not text.endswith(".json")


def hub_id_of_path(path: str) -> str:
    """The Hub id that a path to a downloaded model may end in, its last two names."""
    return "/".join(path.strip("/").split("/")[-2:])


def missing_model(key: str, name: str) -> str:
    """The sentence about a model that a file names at `key` and that cannot be had here."""
    if is_hub_id(name):
        return f"{key}: {unknown_hub_id(name)} (--model NAME)"
    return f"{key}: '{name}' is no preset and no folder with a config.json; give one (--model config.json)"


def preset_of(name: str) -> str | None:
    """The preset that a name means, or None.

    A name is a Hub id, or its last part, of any organisation. Capitals do not matter, and neither do the
    endings of instruction-tuned checkpoints and of copies. The id of a multimodal model does not mean the
    preset of its language model alone.
    """
    folder, _, last = name.rpartition("/")
    if folder and not is_hub_id(name):
        return None
    if preset := _presets_by_hub_id("_hub").get(name.lower()):
        return preset
    if name.lower() in _presets_by_hub_id("_language_model_of"):
        return None
    spelling = last.lower()
    by_name = _presets_by_spelling()
    return by_name.get(spelling) or by_name.get(_VARIANTS.sub("", spelling))


def hub_ids_of(preset: str) -> tuple[str, ...]:
    """The Hub ids that mean a preset, those of models whose language model it is included."""
    return tuple(
        hub_id
        for key in ("_hub", "_language_model_of")
        for hub_id in _hub_ids_of_presets(key).get(preset, ())
    )


def preset_of_folder(path: str) -> str | None:
    """The preset that a folder of another machine is named for, by its last two parts or one, or None."""
    folders = path.rstrip("/").split("/")
    if len(folders) < 2 or is_hub_id(path):
        return None
    return preset_of("/".join(folders[-2:])) if is_hub_id("/".join(folders[-2:])) else preset_of(folders[-1])


def cached_config_path(hub_id: str) -> Path | None:
    """The `config.json` of a Hub id in the local cache of huggingface_hub, or None. Nothing is downloaded.

    A repository lies in `models--ORGANISATION--NAME`, its branch's commit in `refs/main` and its files in
    `snapshots/COMMIT` (huggingface_hub 1.0, `file_download.py` and `constants.py`).
    """
    if not is_hub_id(hub_id):
        return None
    repository = _hub_cache() / f"models--{hub_id.replace('/', '--')}"
    try:
        commit = read_text(repository / "refs" / "main").strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = repository / "snapshots" / Path(commit).name / "config.json"
    return path if os.path.isfile(path) else None


def locate_model(name: str, folders: Iterable[Path], hub_id: str | None = None) -> str | None:
    """The path of a `config.json`, or a preset's name, for a model that a file names. None without either.

    `name` may be a folder below one of `folders`. `hub_id`, by default the name, is looked up among presets,
    then in the local cache.
    """
    for folder in folders:
        path = folder / os.path.expanduser(name) / "config.json"
        if os.path.isfile(path):
            return str(path)
    hub_id = name if hub_id is None else hub_id
    if preset := preset_of(hub_id):
        return preset
    cached_path = cached_config_path(hub_id)
    return None if cached_path is None else str(cached_path)


def unknown_hub_id(hub_id: str) -> str:
    """The sentence about a Hub id that is neither a preset nor in the local cache."""
    if name := _presets_by_hub_id("_language_model_of").get(hub_id.lower()):
        return (
            f"model '{hub_id}' has towers besides its language model, and the local Hub cache does not hold "
            f"it; expected this id once `hf download {hub_id} config.json` has put its config.json there, "
            f"or its language model alone, the preset '{name}'"
        )
    hub_ids = [hub_id for ids in _hub_ids_of_presets().values() for hub_id in ids]
    return (
        f"unknown model '{hub_id}': no preset has this Hub id, and the local Hub cache does not hold it"
        f"{did_you_mean(hub_id, hub_ids)}; expected a preset (`zsim presets`), the path of a config.json, or "
        f"this id once `hf download {hub_id} config.json` has put its config.json into the cache"
    )


def _hub_cache() -> Path:
    for variable, inner in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        if folder := os.environ.get(variable):
            return Path(folder).expanduser() / inner
    return Path("~/.cache/huggingface/hub").expanduser()


@cache
def _hub_ids_of_presets(key: str = "_hub") -> Mapping[str, tuple[str, ...]]:
    """Hub ids by preset: those of checkpoints of its shape, or of models whose language model it is."""
    names = presets.model_preset_names()
    files = {name: json.loads(read_text(presets.model_preset_path(name))) for name in names}
    return {name: tuple(content.get(key, ())) for name, content in files.items()}


@cache
def _presets_by_hub_id(key: str) -> Mapping[str, str]:
    """The first preset that has a Hub id, in small letters, under a key."""
    names = reversed(list(_hub_ids_of_presets(key).items()))
    return {hub_id.lower(): name for name, ids in names for hub_id in ids}


@cache
def _presets_by_spelling() -> Mapping[str, str]:
    return dict(reversed(list(_spellings())))


def _spellings() -> Iterator[tuple[str, str]]:
    """(spelling, preset), the most exact spellings first."""
    hub_ids = _hub_ids_of_presets()
    yield from ((name, name) for name in hub_ids)
    last_names = [
        (hub_id.rpartition("/")[2].lower(), name) for name, ids in hub_ids.items() for hub_id in ids
    ]
    yield from last_names
    yield from ((_VARIANTS.sub("", last_name), name) for last_name, name in last_names)
