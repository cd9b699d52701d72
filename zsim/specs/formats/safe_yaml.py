"""YAML from untrusted sources, as Python's programs read it: plain data only. Each error is one sentence.

A key that stands twice has its last value, as PyYAML reads it, and a note says so. Anchors, aliases and merge
keys are followed, within limits. `None` without quotes is null, which it means in every such program.
`${a.b}` alone is the scalar at `a.b` of the same file, as OmegaConf resolves it: once files that extend each
other are merged.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError

if TYPE_CHECKING:
    from ruamel.yaml.error import MarkedYAMLError
    from ruamel.yaml.nodes import Node

_MAX_CHARACTERS, _MAX_DEPTH, _MAX_NODES = 400_000, 50, 100_000
_TOO_LARGE = "nested or repeated beyond what such a file has"
_OPERATION = re.compile(r"\$\{(add|mul|div|max):(.*)\}")
_OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "add": operator.add, "mul": operator.mul, "div": operator.truediv, "max": max,
}  # fmt: skip
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.-]*)\}")


def load_yaml(text: str, file: str, notes: list[str] | None = None, *, resolves: bool = True) -> Any:
    """The content of one YAML document. `resolves` replaces its references.

    Adds a sentence about every key that stands twice to `notes`. Raises InputError for text that is not YAML,
    and for aliases that expand beyond what a file of settings has.
    """
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if len(text) > _MAX_CHARACTERS or _depth(text) > _MAX_DEPTH:
        raise InputError(f"{file}: {_TOO_LARGE}")
    try:
        content = _construct(text, file, notes)
    except MarkedYAMLError as error:
        raise InputError(f"{file}: not YAML: {_problem(error, text)}") from None
    except (YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{file}: not YAML: {first}") from None
    return resolve_references(content) if resolves and "${" in text else content


def resolve_references(content: Any) -> Any:
    """`content` with every `${a.b}` replaced by the scalar at `a.b` of it, where there is one.

    `${mul:a,b}` becomes the product of two numbers, and likewise for the other resolvers that files of
    OmegaConf have. References in a circle stay as they are.
    """
    return _resolved(content, content)


def content_kind(content: Any) -> str:
    """The words for a YAML without keys at the top, after its name."""
    if content is None:
        return "is empty"
    if isinstance(content, str):
        return "holds plain text"
    return "holds a list" if isinstance(content, list) else f"holds {content!r}"


def _problem(error: MarkedYAMLError, text: str) -> str:
    """The parser's complaint in one line, with the place. A tab, which may not indent, is named."""
    mark = error.problem_mark or error.context_mark
    problem = " ".join(str(error.problem or error.context or "cannot be read").split())
    if mark is None:
        return problem
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if line[mark.column : mark.column + 1] == "\t":
        problem = "a tab stands there, and YAML is indented by spaces"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _construct(text: str, file: str, notes: list[str] | None) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import SafeConstructor
    from ruamel.yaml.nodes import ScalarNode

    class Constructor(SafeConstructor):
        """Takes the last of two equal keys. ruamel takes the first, or stops."""

        def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
            if key in mapping and notes is not None and key_node.value != "<<":
                line = key_node.start_mark.line + 1
                notes.append(f"'{key}' stands again in line {line}; the last of them counts")
            return True

    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = Constructor
    root = yaml.compose(text)
    if root is None:
        return None
    if _num_nodes(root, {}) > _MAX_NODES:
        raise InputError(f"{file}: {_TOO_LARGE}")
    null_tag = "tag:yaml.org,2002:null"
    for node in _nodes(root, set()):
        if isinstance(node, ScalarNode) and node.value == "None" and node.style is None:
            node.ctag = type(node.ctag)(suffix=null_tag)
    return yaml.constructor.construct_document(root)


def _nodes(node: Node, seen: set[int]) -> Iterator[Node]:
    """Every node of a document once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    yield node
    for child in _children(node):
        yield from _nodes(child, seen)


def _children(node: Node) -> list[Node]:
    from ruamel.yaml.nodes import MappingNode, SequenceNode

    if isinstance(node, MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, SequenceNode) else []


def _num_nodes(node: Node, sizes: dict[int, int]) -> int:
    """Nodes of the document with every alias written out.

    Raises ValueError for an alias to what it stands in.
    """
    if id(node) not in sizes:
        sizes[id(node)] = -1
        sizes[id(node)] = 1 + sum(_num_nodes(child, sizes) for child in _children(node))
    if sizes[id(node)] < 0:
        raise ValueError("an alias stands within its own anchor")
    return sizes[id(node)]


def _resolved(value: Any, content: Any, depth: int = 0) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolved(entry, content, depth) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolved(entry, content, depth) for entry in value]
    if not isinstance(value, str) or depth > _MAX_DEPTH:
        return value
    if computed := _OPERATION.fullmatch(value.strip()):
        number = _computed(computed[1], computed[2], content, depth)
        return value if number is None else number
    match = _REFERENCE.fullmatch(value)
    if match is None:
        return value
    target = content
    for key in match[1].split("."):
        if not isinstance(target, Mapping) or key not in target:
            return value
        target = target[key]
    return value if isinstance(target, Mapping | list) else _resolved(target, content, depth + 1)


def _computed(name: str, text: str, content: Any, depth: int) -> float | None:
    """The number that a resolver makes of two operands, each a number or a reference. None for others."""
    commas = [
        n for n, letter in enumerate(text) if letter == "," and text[:n].count("{") == text[:n].count("}")
    ]
    if len(commas) != 1:
        return None
    operands: list[float] = []
    for word in (text[: commas[0]].strip(), text[commas[0] + 1 :].strip()):
        value = _resolved(word, content, depth + 1)
        try:
            operands.append(float(value))
        except (TypeError, ValueError):
            return None
    if name == "div" and not operands[1]:
        return None
    number = _OPERATIONS[name](*operands)
    return int(number) if math.isfinite(number) and number == int(number) else number


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
