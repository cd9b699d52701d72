"""Parallelism by the names of other programs' keys."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.errors import InputError

_KINDS = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "sp": "sequence",
    "etp": "expert tensor",
}
_KEYS = {
    "tensor": "tensor",
    "pipeline": "pipeline",
    "context": "context",
    "sequence": "sequence_parallel",
    "expert": "expert",
    "expert tensor": "expert_tensor",
}


def refuse_parallelisms(where: str, keys: Iterable[object]) -> None:
    """Raises InputError for the first key that asks for a parallelism by another program's name.

    The message gives zsim's own key. `where` names the file (and table).
    """
    for key in keys:
        kind = _kind(key)
        if kind is None or str(key) == "sequence_parallel":
            continue
        raise InputError(f"{where}{key}: unknown key; it is parallelism.{_KEYS[kind]} here")


def _kind(key: object) -> str | None:
    """The kind of parallelism of `tensor_parallel`, `tensor_model_parallel_size`, `tp_degree` and the like.

    None for any other key.
    """
    word = str(key).lower().removesuffix("_size").removesuffix("_degree")
    if word in _KINDS:
        return _KINDS[word]
    for ending in ("_model_parallel", "_model_parallelism", "_parallel", "_parallelism"):
        kind = word.removesuffix(ending).replace("_", " ")
        if word.endswith(ending) and kind in _KINDS.values():
            return kind
    return None
