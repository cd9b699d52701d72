"""Conditions and calculated values: what they mean, and that nothing else gets through."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError
from zsim.study.sweep.study_file import parse_expression

KEYS: dict[str, Any] = {
    "nodes": 16,
    "strategy.stage": 3,
    "training.precision": "bf16",
    "training.compile": True,
    "nothing": None,
}


def value(text: str) -> Any:
    return parse_expression(text, "test").value(KEYS.__getitem__)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nodes", 16),
        ("nodes * 8 >= 128 and strategy.stage == 3", True),
        ("nodes < 16 or strategy.stage in [0, 1]", False),
        ("not training.compile", False),
        ("training.precision == 'bf16'", True),
        ("training.precision not in ('fp16', 'fp32')", True),
        ("1 < strategy.stage <= 3", True),
        ("4096 // (nodes * 8)", 32),
        ("-nodes + 2 ** 5 % 3", -14),
        ("nodes / 32", 0.5),
        ("'large' if nodes > 8 else 'small'", "large"),
        ("max(1, 8 // nodes)", 1),
        ("round(nodes / 3)", 5),
        ("nothing == none", True),
        ("training.compile == true", True),
        ("nothing and nothing > 3", None),
        ("[nodes, 'a']", [16, "a"]),
    ],
)
def test_an_expression_means_what_it_says(text: str, expected: Any) -> None:
    assert value(text) == expected


def test_the_keys_that_it_reads_are_known_before_it_runs() -> None:
    """true, false and none are no keys."""
    expression = parse_expression("a.b == true and (c in [d.e.f, none] or a.b)", "test")
    assert expression.names == ("a.b", "c", "d.e.f")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('/etc/passwd')",
        "nodes.__class__()",
        "(lambda: 1)()",
        "[x for x in (1, 2)]",
        "nodes[0]",
        "f'{nodes}'",
        "(nodes := 3)",
        "max(key=nodes)",
        "b'bytes'",
        "1j",
        "nodes & 1",
        "nodes is 3",
        "{1: 2}",
        "max()",
    ],
)
def test_anything_else_is_refused_before_it_runs(text: str) -> None:
    with pytest.raises(InputError, match=r"test: .* is not allowed; expected keys, numbers, strings"):
        parse_expression(text, "test")


@pytest.mark.parametrize("text", ["nodes >", "", "a b", "nodes = 3", "import os", "((", 3, None])
def test_what_is_no_expression_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match=r"test: .*expression"):
        parse_expression(text, "test")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing > 3", r"'nothing > 3': '>' not supported .*; nothing = None"),
        ("nodes / 0", r"'nodes / 0': division by zero; nodes = 16"),
        ("training.precision * 1000000", r"needs numbers, found 'bf16'"),
        ("training.compile + 1", r"needs numbers, found True"),
        ("2 ** 1000", r"exponent 1000, expected at most 64"),
        ("((10 ** 64) ** 64) ** 64", r"too large"),
        ("nodes in 3", r"not iterable|not a container"),
    ],
)
def test_what_cannot_be_worked_out_is_told_with_the_values(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        value(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("-" * 499 + "1", -1), ("not " * 120 + "1", True), ("(" * 60 + "1" + ")" * 60, 1)]
)
def test_deep_nesting_is_worked_out(text: str, expected: Any) -> None:
    assert value(text) == expected


def test_a_very_long_expression_is_refused() -> None:
    with pytest.raises(InputError, match=r"test: 502 characters, expected at most 500"):
        parse_expression("-" * 501 + "1", "test")
