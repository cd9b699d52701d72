"""Completions of half-typed words for a shell: presets, and keys with their values."""

from __future__ import annotations

from collections.abc import Iterable


def models(incomplete: str) -> list[str]:
    """Model presets."""
    from zsim.specs.presets import model_preset_names

    return _filter_prefix(model_preset_names(), incomplete)


def presets(incomplete: str) -> list[str]:
    """Models and clusters."""
    return [*models(incomplete), *clusters(incomplete)]


def clusters(incomplete: str) -> list[str]:
    """Cluster presets."""
    from zsim.specs.presets import topology_preset_names

    return _filter_prefix(topology_preset_names(), incomplete)


def keys(incomplete: str) -> list[str]:
    """Keys of every file."""
    from zsim.reference import FILES, keys_of

    return _filter_prefix(dict.fromkeys(key.path for file in FILES for key in keys_of(file)), incomplete)


def key_values(incomplete: str) -> list[str]:
    """KEY=VALUE of `--set`: the keys of an experiment and, below `cluster.`, of its topology.

    After the "=" of a key its allowed values are completed.
    """
    from zsim.reference import keys_of

    keys_by_path = {key.path: key for key in keys_of("experiment")}
    keys_by_path |= {f"cluster.{key.path}": key for key in keys_of("topology")}
    name, equals, _ = incomplete.partition("=")
    if not equals:
        return _filter_prefix((f"{path}=" for path in keys_by_path), incomplete)
    key = keys_by_path.get(name)
    values: tuple[str, ...] = ()
    if key is not None and key.type in ("one of", "true or false"):
        values = key.allowed or ("true", "false")
    value_words = (value.strip('"') for value in values)
    return _filter_prefix((f"{name}={word}" for word in value_words), incomplete)


def _filter_prefix(names: Iterable[str], start: str) -> list[str]:
    return [name for name in names if name.startswith(start)]
