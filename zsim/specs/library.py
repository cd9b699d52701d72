"""Models and clusters as files describe them, each file read once, for all jobs of a study."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import HardwareFiles, load_cluster
from zsim.specs.model.huggingface import model_from_config
from zsim.specs.model.spec import ModelSpec
from zsim.specs.user_code import load_named_model


class Library:
    """Looks up models and clusters as an experiment names them. Each is read once and kept."""

    def __init__(self) -> None:
        self._models: dict[str, ModelSpec] = {}
        self._clusters: dict[str, Cluster] = {}
        self._files = HardwareFiles()

    def model(self, source: str | Mapping[str, Any] | ModelSpec) -> ModelSpec:
        """The model of a preset's name, of a file, of a config.json's content, or a model itself.

        Raises InputError, also for a function (`package.module:function`).
        """
        if isinstance(source, ModelSpec):
            return source
        key = _cache_key(source)
        if key not in self._models:
            self._models[key] = _load_model(source)
        return self._models[key]

    def cluster(self, source: str | Mapping[str, Any]) -> Cluster:
        """The cluster of a preset's name, of a file, or of a file's tables. Raises InputError."""
        key = _cache_key(source)
        if key not in self._clusters:
            self._clusters[key] = load_cluster(source, self._files)
        return self._clusters[key]


def _load_model(source: str | Mapping[str, Any]) -> ModelSpec:
    if not isinstance(source, str):
        return model_from_config(source, str(source.get("_name_or_path", "model")), "experiment")
    return load_named_model(source)


def _cache_key(source: str | Mapping[str, Any]) -> str:
    """Cache key of a name or of a content. Equal numbers of different types are different contents."""
    return f"name {source}" if isinstance(source, str) else json.dumps(source, sort_keys=True, default=repr)
