"""The kinds of files that zsim reads, and the JSON Schema of each (draft 2020-12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from zsim.errors import InputError, did_you_mean
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.cluster.network import Network
from zsim.specs.cluster.node_request import NETWORK_ALIASES
from zsim.specs.experiment.tables import ExperimentFile
from zsim.study.sweep.study_file import study_schema

Schema = dict[str, Any]
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
INHERITED = "as in the file that is extended"


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file: what it is called, what it says, and its schema before `schema_of` completes it."""

    title: str
    purpose: str
    schema: Callable[[], Schema]
    pages: Mapping[str, str] = field(default_factory=dict)
    """By table that is a file of its own kind, that kind: its keys stand on the page of that kind."""


def _experiment() -> Schema:
    schema = _model_schema(ExperimentFile)
    strategy = schema["properties"]["strategy"]
    strategy["description"] = "how data parallelism is run, by kind"
    return schema


def _topology() -> Schema:
    """The schema of a topology file.

    A file that extends another needs none of its keys. A file that stands alone needs `required`.
    """
    schema = _extendable(
        _model_schema(Cluster), "a cluster that ships with zsim, or a file; what is left out is as there"
    )
    fields = Network.model_json_schema()["properties"]
    for key, description in NETWORK_ALIASES.items():
        field = fields["kind" if key == "fabric" else key]
        schema["properties"][key] = {**field, "description": description}
        schema["properties"][key].pop("default", None)
    gpu_schema = schema["properties"]["gpu"]
    gpu_name = {"type": "string", "description": "a GPU that ships with zsim, or the path of a GPU file"}
    schema["properties"]["gpu"] = {
        "anyOf": [gpu_name, gpu_schema],
        "description": f"the GPU of every node, or a file's name; left out: {INHERITED}",
    }
    return schema


def _gpu() -> Schema:
    return _extendable(
        _model_schema(Gpu), "a GPU that ships with zsim, or a file; what is left out is as there"
    )


FILES: Mapping[str, FileKind] = {
    "experiment": FileKind(
        "Experiment file",
        "What `zsim run` simulates: a model, a cluster, and how it is trained.",
        _experiment,
    ),
    "study": FileKind("Study file", "What `zsim sweep` varies.", study_schema),
    "topology": FileKind(
        "Topology file",
        "A cluster: its nodes, their links, and the network between them.",
        _topology,
        pages={"gpu": "gpu", "nodes[].gpu": "gpu"},
    ),
    "gpu": FileKind("GPU file", "A GPU: figures of its data sheet, and measured rates of its kernels.", _gpu),
}


def schema_of(name: str) -> Schema:
    """The JSON Schema of a kind of file.

    Raises InputError for a name that is none of `FILES`.
    """
    kind = FILES.get(name)
    if kind is None:
        raise InputError(
            f"no file is called '{name}'{did_you_mean(name, FILES)}; expected one of {', '.join(FILES)}"
        )
    schema = kind.schema()
    _remove_noise(schema)
    return {"$schema": _DRAFT, "title": f"zsim: {kind.title.lower()}", "description": kind.purpose} | {
        key: value for key, value in schema.items() if key not in ("title", "description")
    }


def _model_schema(model: type[BaseModel]) -> Schema:
    return model.model_json_schema(by_alias=True, mode="validation")


def _extendable(schema: Schema, description: str) -> Schema:
    required = schema.pop("required", [])
    for name in required:
        key_schema = schema["properties"][name]
        key_schema["description"] = (
            f"{key_schema.get('description', '')}; left out: {INHERITED}".removeprefix("; ")
        )
    first = {"extends": {"type": "string", "description": f"{description}; left out: the file stands alone"}}
    schema["properties"] = first | schema["properties"]
    schema["anyOf"] = [{"required": ["extends"]}, {"required": required}]
    return schema


def _remove_noise(node: Any) -> None:
    """Remove what says nothing: pydantic's title of every key, and null, which TOML cannot say."""
    if isinstance(node, list):
        for value in node:
            _remove_noise(value)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in ("properties", "$defs"):
            for inner in value.values():
                inner.pop("title", None)
                _remove_noise(inner)
        elif key != "default":
            _remove_noise(value)
    if node.get("default", 0) is None:
        del node["default"]
    options = node.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options:
        options.remove({"type": "null"})
        if len(options) == 1:
            del node["anyOf"]
            node |= {key: value for key, value in options[0].items() if key not in node}
