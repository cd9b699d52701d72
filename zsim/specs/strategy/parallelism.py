"""Parallelisms that zsim does not simulate, by their usual names in an experiment."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.errors import NotSimulatedError

_KINDS = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "sp": "sequence",
    "etp": "expert tensor",
}


def refuse_parallelisms(where: str, keys: Iterable[object]) -> None:
    """Raises NotSimulatedError for the first key that asks for such a parallelism; `where` names the file
    (and table)."""
    for key in keys:
        kind = _kind(key)
        if kind is not None:
            raise NotSimulatedError(f"{where}{key}: zsim does not simulate {kind} parallelism yet")


def _kind(key: object) -> str | None:
    """The kind of parallelism of `tensor_parallel`, `tensor_model_parallel_size`, `tp_degree` and the like;
    None for any other key."""
    word = str(key).lower().removesuffix("_size").removesuffix("_degree")
    if word in _KINDS:
        return _KINDS[word]
    for ending in ("_model_parallel", "_model_parallelism", "_parallel", "_parallelism"):
        kind = word.removesuffix(ending).replace("_", " ")
        if word.endswith(ending) and kind in _KINDS.values():
            return kind
    return None
