"""Finds the files that ship with zsim: model presets, cluster topologies, GPUs.

Models are in the package (`zsim/presets/models`). Topologies are in `zsim/topologies` of an installed wheel
and in `topologies` next to the package of a source checkout.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zsim.errors import InputError, did_you_mean, nearest
from zsim.files import PRESETS, preset_table, topologies_folder
from zsim.reading import read_text

_SERVERS = ("dgx", "hgx")
_SERVER = re.compile(r"^(dgx|hgx|rtx)-|-(x\d+|nvl72)$")  # what a preset's name has beside its GPU's
_LEAST_LETTERS = 2
_MOST_NEAR = 6


def model_preset_names() -> tuple[str, ...]:
    """Names that `--model` takes, sorted."""
    return _stems(PRESETS / "models", ".json")


def model_preset_path(name: str) -> Path:
    """The `config.json`-shaped file of a model preset. Raises InputError for an unknown name."""
    return _locate(PRESETS / "models", ".json", name, "model", "a path to a config.json")


def topology_preset_names() -> tuple[str, ...]:
    """Names that `--cluster` takes, sorted."""
    return _stems(topologies_folder(), ".toml")


def topology_preset_path(name: str) -> Path:
    """The TOML file of a cluster preset, or of the usual server of a GPU. Raises InputError for a name that
    is neither, and for a GPU with several servers.
    """
    preset, alternative = server_of_gpu(name) or name, "a path to a topology TOML"
    return _locate(topologies_folder(), ".toml", preset, "cluster", alternative, near_topologies)


def is_topology(name: str) -> bool:
    """Whether a name is that of a cluster preset, or the path of a file."""
    is_path = name.endswith(".toml") or "/" in name
    return is_path or os.path.isfile(topologies_folder() / f"{name}.toml")


def server_of_gpu(name: str) -> str | None:
    """The cluster preset that a GPU's name means: its vendor's server ("h100": dgx-h100), or the only preset
    with it. None for a name that is a preset's itself or no GPU's, and for one that several presets are
    equally near to.
    """
    if is_topology(name):
        return None
    spelling = re.sub(r"sxm\d?|rtx|80gbhbm3$", "", _spell(name))
    if len(spelling) < _LEAST_LETTERS or name.lower().startswith(_SERVERS):
        return None
    servers = [preset for preset in topology_preset_names() if _spell(_SERVER.sub("", preset)) == spelling]
    if not servers and _spell(name) not in _near_machines():
        servers = [preset for preset in near_topologies(name) if spelling in _spell(_gpu_of(preset))]
    return servers[0] if len(servers) == 1 else None


def near_topologies(name: str) -> tuple[str, ...]:
    """The cluster presets that are near in kind to a name that is none, the likeliest first.

    They stand for a processor without numbers (`presets/near_machines.toml`), or the parts of the name are
    parts of theirs or of their GPU's, or, where nothing is spelt like it, theirs have it. Servers of the
    GPU's vendor, with its fastest links, come first.
    """
    spelling = re.sub("|".join(_SERVERS), "", _spell(name))
    near = _near_machines().get(spelling, [])
    if near or len(spelling) < _LEAST_LETTERS:
        return tuple(near)
    names = {preset: f"{preset}-{_gpu_of(preset)}" for preset in topology_preset_names()}
    words = {_spell(word) for word in re.split("[^A-Za-z0-9]+", name)} - {"", *_SERVERS}
    matches = [preset for preset, text in names.items() if words <= set(text.split("-"))]
    if not matches and nearest(name, names) is None:
        matches = [preset for preset, text in names.items() if spelling in _spell(text)]
    return tuple(sorted(matches, key=lambda preset: (not preset.startswith(_SERVERS), preset)))


def _near_machines() -> Mapping[str, list[str]]:
    machines: Mapping[str, list[str]] = preset_table("near_machines")
    return machines


def _spell(name: str) -> str:
    """A name in small letters and digits, without vendors."""
    return re.sub("nvidia|amd|intel|instinct|geforce|[^a-z0-9]", "", name.lower())


def _gpu_of(preset: str) -> str:
    """The name of a cluster preset's GPU, which may stand in a preset that it extends. "" for several."""
    content = tomllib.loads(read_text(topologies_folder() / f"{preset}.toml"))
    gpu = content.get("gpu", "")
    if isinstance(gpu, dict):
        gpu = gpu.get("extends", "")
    base = content.get("extends")
    return gpu or (_gpu_of(base) if base else "")


def gpu_preset_names() -> tuple[str, ...]:
    """Names of the GPUs that ship with zsim, sorted."""
    return _stems(topologies_folder() / "gpus", ".toml")


def gpu_preset_path(name: str) -> Path:
    """The TOML file of a GPU. Raises InputError for an unknown name."""
    return _locate(topologies_folder() / "gpus", ".toml", name, "GPU", None)


def _stems(folder: Path, suffix: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob(f"*{suffix}")))


def _locate(
    folder: Path,
    suffix: str,
    name: str,
    kind: str,
    alternative: str | None,
    near_names: Callable[[str], Sequence[str]] = lambda name: (),
) -> Path:
    path = folder / f"{name}{suffix}"
    if name and Path(name).name == name and os.path.isfile(path):
        return path
    names, near = _stems(folder, suffix), near_names(name)
    examples = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    if near:
        others = f" ({', '.join(near[1:_MOST_NEAR])})" if len(near) > 1 else ""
        hint = f"; the nearest machine is '{near[0]}'{others}"
    else:
        hint = did_you_mean(name, names)
    expected = f"a preset ({examples})" + (f" or {alternative}" if alternative else "")
    raise InputError(f"unknown {kind} '{name}'{hint}; expected {expected}")
