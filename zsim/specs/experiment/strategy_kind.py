"""The kind of `[strategy]`, inferred from its keys where it is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from zsim.errors import did_you_mean, expected_text
from zsim.specs.key_index import nearest_key
from zsim.specs.strategy.tables import STRATEGIES, is_strategy


def infer_strategy_kind(data: dict[str, Any], file: type[BaseModel]) -> tuple[dict[str, Any], list[str]]:
    """The data with the kind of `[strategy]`, and one sentence per problem.

    The kind is inferred from the keys if it is left out. Keys that the kind does not have are dropped. `file`
    is the model of the experiment's file.
    """
    table = data.get("strategy")
    if not isinstance(table, Mapping):
        return data, []
    keys = {str(key) for key in table} - {"kind"}
    kind = table.get("kind")
    if kind is None:
        kind = infer_kind(keys)
    problems = []
    if kind is not None and not is_strategy(kind):
        problems.append(
            f"strategy.kind: found {kind!r}, expected one of {', '.join(STRATEGIES)}"
            f"{did_you_mean(str(kind), STRATEGIES)}"
        )
        return {**data, "strategy": {"kind": "fsdp2"}}, problems
    known_keys = set(STRATEGIES[kind].model_fields) if kind else set()
    for key in sorted(keys - known_keys):
        owners = [name for name, model in STRATEGIES.items() if key in model.model_fields]
        options = known_keys or {name for model in STRATEGIES.values() for name in model.model_fields}
        if kind and owners:
            problems.append(
                f"strategy.{key} does not belong to kind '{kind}'; it is a key of {' and '.join(owners)}"
            )
        elif not owners:
            hint = nearest_key(key, table.get(key), sorted(options), file)
            hint = hint or expected_text(key, sorted(options), "zsim explain strategy")
            problems.append(f"strategy: unknown key '{key}'{hint}")
    if kind is None:
        if not problems:
            problems.append(f"strategy.kind is missing; expected one of {', '.join(STRATEGIES)}")
        return {**data, "strategy": {"kind": "fsdp2"}}, problems
    kept_table = {key: value for key, value in table.items() if str(key) in known_keys}
    return {**data, "strategy": {**kept_table, "kind": kind}}, problems


def infer_kind(keys: set[str]) -> str | None:
    """The kind that has these keys. FSDP2 if several have them, None if no kind has all."""
    candidates = [kind for kind, model in STRATEGIES.items() if keys <= set(model.model_fields)]
    return "fsdp2" if "fsdp2" in candidates else candidates[0] if candidates else None
