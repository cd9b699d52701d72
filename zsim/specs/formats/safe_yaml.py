"""YAML from untrusted sources: plain data only, without aliases that expand. Each error is one sentence."""

from __future__ import annotations

import re
from typing import Any

from zsim.errors import InputError

_MAX_CHARACTERS, _MAX_DEPTH = 400_000, 50
_ALIAS = re.compile(r"(^|[\s\[{,:-])[&*][A-Za-z0-9_]", re.MULTILINE)


def load_yaml(text: str, file: str) -> Any:
    """The content of one YAML document."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if len(text) > _MAX_CHARACTERS or _depth(text) > _MAX_DEPTH:
        raise InputError(f"{file}: nested or repeated beyond what such a file has")
    if _ALIAS.search(text):
        raise InputError(f"{file}: has YAML anchors or aliases, which no such file needs")
    try:
        return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{file}: not YAML: {first}") from None


def _depth(text: str) -> int:
    """The maximum nesting of brackets. Brackets within strings are counted too."""
    deepest = depth = 0
    for letter in text:
        if letter in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in "]}":
            depth -= 1
    return deepest
