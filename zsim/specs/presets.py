"""Finds the files that ship with zsim: model presets, cluster topologies, GPUs.

Models are in the package (`zsim/presets/models`). Topologies are in `zsim/topologies` of an installed wheel
and in `topologies` next to the package of a source checkout.
"""

from __future__ import annotations

import os
from pathlib import Path

from zsim.errors import InputError, did_you_mean
from zsim.resources import PRESETS, topologies_folder


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
    """The TOML file of a cluster preset. Raises InputError for an unknown name."""
    return _locate(topologies_folder(), ".toml", name, "cluster", "a path to a topology TOML")


def gpu_preset_names() -> tuple[str, ...]:
    """Names of the GPUs that ship with zsim, sorted."""
    return _stems(topologies_folder() / "gpus", ".toml")


def gpu_preset_path(name: str) -> Path:
    """The TOML file of a GPU. Raises InputError for an unknown name."""
    return _locate(topologies_folder() / "gpus", ".toml", name, "GPU", None)


def _stems(folder: Path, suffix: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob(f"*{suffix}")))


def _locate(folder: Path, suffix: str, name: str, kind: str, alternative: str | None) -> Path:
    path = folder / f"{name}{suffix}"
    if name and Path(name).name == name and os.path.isfile(path):
        return path
    names = _stems(folder, suffix)
    examples = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    expected = f"a preset ({examples})" + (f" or {alternative}" if alternative else "")
    raise InputError(f"unknown {kind} '{name}'{did_you_mean(name, names)}; expected {expected}")
