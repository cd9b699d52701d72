"""YAML as Python's programs read it, from sources that nobody vouches for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.reading import read_text
from zsim.errors import InputError
from zsim.specs.formats.safe_yaml import load_yaml


def test_the_last_of_two_equal_keys_counts_and_is_said() -> None:
    notes: list[str] = []
    assert load_yaml("debug: false\nnum: 1\ndebug: true\n", "a.yaml", notes) == {"debug": True, "num": 1}
    assert notes == ["'debug' stands again in line 3; the last of them counts"]


def test_stars_in_a_comment_are_no_aliases() -> None:
    assert load_yaml("# the *whole* number & *more\na: 1 # *b\n", "a.yaml") == {"a": 1}


def test_anchors_and_merge_keys_are_followed() -> None:
    text = "base: &base {rank: 8, alpha: 16}\ncopy: *base\nlarger:\n  <<: *base\n  rank: 64\n"
    notes: list[str] = []
    content = load_yaml(text, "a.yaml", notes)
    assert content["copy"] == {"rank": 8, "alpha": 16}
    assert content["larger"] == {"rank": 64, "alpha": 16}
    assert notes == []


def test_none_without_quotes_is_null() -> None:
    assert load_yaml("a: None\nb: 'None'\nc: [None, 1]\n", "a.yaml") == {
        "a": None,
        "b": "None",
        "c": [None, 1],
    }


def test_a_reference_is_the_scalar_that_it_names() -> None:
    text = "batch_size: 4\ndata:\n  size: ${batch_size}\n  twice: ${data.size}\n"
    text += "path: ${out}/logs\nnone: ${out}\n"
    assert load_yaml(text, "a.yaml") == {
        "batch_size": 4, "data": {"size": 4, "twice": 4}, "path": "${out}/logs", "none": "${out}",
    }  # fmt: skip


def test_references_in_a_circle_stay_as_they_are() -> None:
    assert load_yaml("a: ${b}\nb: ${a}\n", "a.yaml")["a"] in ("${a}", "${b}")


def test_aliases_that_expand_without_end_are_refused() -> None:
    """Five levels of ten are 10^5 entries, and their lists."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcd", "bcde", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    with pytest.raises(InputError, match="repeated beyond"):
        load_yaml("\n".join(lines), "a.yaml")
    with pytest.raises(InputError, match="within its own anchor"):
        load_yaml("a: &a [*a]", "a.yaml")


@pytest.mark.parametrize(
    "text", ["a: [1", "a: b: c", "a: *b", "a: !!python/object:os.system x", "? {a: 1}\n: 2"]
)
def test_anything_else_is_one_sentence(text: str) -> None:
    with pytest.raises(InputError, match=r"^a\.yaml: not YAML: [^\n]*$"):
        load_yaml(text, "a.yaml")


def test_a_tab_is_said_to_stand_where_it_does() -> None:
    with pytest.raises(InputError, match=r"^a\.yaml: not YAML: line 2, column 1: a tab stands there"):
        load_yaml("base_model: x\n\tmicro_batch_size: 2\n", "a.yaml")


def test_damage_is_placed() -> None:
    with pytest.raises(InputError, match=r"^a\.yaml: not YAML: line 2, column 2: expected"):
        load_yaml("a: [1, 2\nb: 3\n", "a.yaml")


@pytest.mark.parametrize(
    ("text", "words"), [("", "is empty"), ("# a\n", "is empty"), ("hello world\n", "holds plain text")]
)
def test_a_file_without_keys_is_said_to_be_what_it_is(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError, match=rf"a\.yaml: {words}; expected keys and values at the top") as caught:
        read_text(tmp_path, text, name="a.yaml")
    assert "ccelerate" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${mul:${a}, ${b.c}}", 12),
        ("${mul:${mul:${a},2},${div:${b.c},8}}", 3),
        ("${div:${a},${b.c}}", 0.75),
        ("${max:${a},${b.c}}", 4),
        ("${add:${a},1}", 4),
        ("${div:${a},0}", "${div:${a},0}"),
        ("${mul:${a},${none}}", "${mul:${a},${none}}"),
        ("${mul:${a}}", "${mul:${a}}"),
        ("${env:HOME}", "${env:HOME}"),
    ],
)
def test_resolvers_of_two_numbers_are_computed(text: str, value: object) -> None:
    assert load_yaml(f"a: 3\nb: {{c: 4}}\nx: {text}\n", "a.yaml")["x"] == value
