"""Parallelism by the names of other programs' keys, and the keys of `[parallelism]` that zsim lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zsim.errors import InputError, NotSimulatedError

_KINDS = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "sp": "sequence",
    "etp": "expert tensor",
}
_KEYS = {"tensor": "tensor", "pipeline": "pipeline", "context": "context", "sequence": "sequence_parallel"}


def refuse_parallelisms(where: str, keys: Iterable[object]) -> None:
    """Raises for the first key that asks for a parallelism by another program's name: NotSimulatedError for
    expert parallelism, InputError, with zsim's own key, for the others; `where` names the file (and
    table)."""
    for key in keys:
        kind = _kind(key)
        if kind is None or str(key) == "sequence_parallel":
            continue
        if kind not in _KEYS:
            raise NotSimulatedError(f"{where}{key}: zsim does not simulate {kind} parallelism yet")
        raise InputError(f"{where}{key}: unknown key; it is parallelism.{_KEYS[kind]} here")


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


EXPERT_KEYS = ("expert", "expert_tensor", "dispatcher", "capacity_factor")


def refuse_experts(where: str, table: Mapping[str, object]) -> None:
    """Raises NotSimulatedError for the keys of `[parallelism]` that belong to expert parallelism."""
    for key in EXPERT_KEYS:
        if key in table and table[key] != 1:
            raise NotSimulatedError(
                f"{where}parallelism.{key}: zsim does not simulate expert parallelism yet"
            )
