"""Reads single values of a `config.json`. Each error is one clear sentence."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from zsim.errors import InputError, did_you_mean, expected_text

MAX_BLOCKS = 50_000  # maximum that zsim simulates in one step
_MISSING = object()
# transformers 5.24 `ACT2CLS` (activations.py), Megatron's clamped one, and the one that MiniMax M3 names
_ACTIVATIONS = (
    "silu", "swish", "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python",
    "gelu_python_tanh", "gelu_pytorch_tanh", "quick_gelu", "clamped_quick_gelu", "hardswish", "laplace",
    "leaky_relu", "linear", "mish", "prelu", "relu", "relu2", "relu6", "sigmoid", "sqrtsoftplus", "swigluoai",
    "tanh", "xielu",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """The keys of one `config.json`.

    A getter's `default` is what transformers takes when the key is absent. Without a default the key is
    required.
    """

    values: Mapping[str, Any]
    name: str
    where: str
    """The file's name in messages."""
    family: str
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The other spellings of a key."""

    def add_defaults(self, **defaults: Any) -> ConfigReader:
        """The same file where absent keys have the family's defaults. It still reads `values` itself, which
        may record what is read."""
        layers = cast(MutableMapping[str, Any], self.values), defaults
        return replace(self, values=ChainMap(*layers))

    def override(self, **values: Any) -> ConfigReader:
        """The same file with other values of some keys."""
        return replace(self, values=ChainMap(values, cast(MutableMapping[str, Any], self.values)))

    def find(self, key: str) -> tuple[str, Any]:
        """(the spelling used in the file, its value). The value is `_MISSING` when absent or null.

        Raises InputError where two spellings of one key disagree.
        """
        matches: list[tuple[str, Any]] = []
        for spelling in (key, *self.aliases.get(key, ())):
            value = self.values.get(spelling)
            if value is not None:
                matches.append((spelling, value))
        if not matches:
            return key, _MISSING
        first = matches[0]
        for match in matches[1:]:
            if match[1] != first[1]:
                raise self.error(
                    f"'{first[0]}' is {first[1]!r} and '{match[0]}' is {match[1]!r}, "
                    "but both name the same number; give one of them"
                )
        return first

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        spelling, value = self.find(key)
        if value is _MISSING:
            if default is not None:
                return default
            raise self._missing(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"'{spelling}' is {value!r}; expected a whole number of at least {minimum}")
        return value

    def num_blocks(self, key: str, default: int | None = None) -> int:
        """The number of blocks.

        Raises InputError above the maximum, before a list of blocks would fill the memory.
        """
        count = self.integer(key, default)
        if count > MAX_BLOCKS:
            raise self.error(f"'{self.find(key)[0]}' is {count:,}; expected at most {MAX_BLOCKS:,} layers")
        return count

    def optional_integer(self, key: str) -> int | None:
        """A whole number, or None when absent or null."""
        return None if self.find(key)[1] is _MISSING else self.integer(key)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        spelling, value = self.find(key)
        if value is _MISSING:
            return default
        if not isinstance(value, bool):
            raise self.error(f"'{spelling}' is {value!r}; expected true or false")
        return value

    def fraction(self, key: str, default: float) -> float:
        """A number from 0 up to, but not including, 1 (a dropout probability)."""
        spelling, value = self.find(key)
        if value is _MISSING:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < 1:
            raise self.error(f"'{spelling}' is {value!r}; expected a number from 0 up to 1")
        return float(value)

    def number(self, key: str, default: float) -> float:
        """A number above 0."""
        spelling, value = self.find(key)
        if value is _MISSING:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(f"'{spelling}' is {value!r}; expected a number above 0")
        return float(value)

    def side(self, key: str, default: int) -> int:
        """The side of a square: a whole number, or two equal ones."""
        spelling, value = self.find(key)
        if not isinstance(value, list):
            return self.integer(key, default)
        first, *others = self.integers(key) or (0,)
        if first < 1 or others != [first]:
            raise self.error(f"'{spelling}' is {value!r}; expected one side, of a square")
        return first

    def string(self, key: str, default: str) -> str:
        """A text value."""
        spelling, value = self.find(key)
        if value is _MISSING:
            return default
        if not isinstance(value, str):
            raise self.error(f"'{spelling}' is {value!r}; expected a text")
        return value

    def activation(self, key: str, default: str) -> str:
        """The name of a non-linearity. Raises InputError for one that transformers has not."""
        if (name := self.string(key, default)) not in _ACTIVATIONS:
            raise self.error(
                f"'{self.find(key)[0]}' is '{name}', an activation that transformers has not"
                f"{expected_text(name, _ACTIVATIONS)}"
            )
        return name

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, empty when absent."""
        spelling, value = self.find(key)
        if value is _MISSING:
            return ()
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.error(f"'{spelling}' is {value!r}; expected a list of whole numbers")
        return tuple(value)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of texts, empty when absent."""
        spelling, value = self.find(key)
        if value is _MISSING:
            return ()
        if not isinstance(value, list) or any(not isinstance(v, str) for v in value):
            raise self.error(f"'{spelling}' is {value!r}; expected a list of texts")
        return tuple(value)

    def nested(self, key: str) -> ConfigReader:
        """The object under `key`, empty when absent."""
        spelling, value = self.find(key)
        if value is _MISSING:
            value = {}
        if not isinstance(value, dict):
            raise self.error(f"'{spelling}' is {value!r}; expected an object")
        return ConfigReader(value, self.name, f"{self.where}: {spelling}", self.family)

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        """`hidden_size / num_heads`. Raises InputError unless it is whole."""
        if hidden_size % num_heads:
            raise self.error(
                f"hidden size {hidden_size} is not divisible by {num_heads} attention heads; "
                "expected a multiple, or an explicit 'head_dim'"
            )
        return hidden_size // num_heads

    def check_width(self, key: str, default: int, expected: int, owner: str = "language model") -> None:
        """Raises InputError unless the features that `key` says are those of the module behind."""
        if (value := self.integer(key, default)) != expected:
            origin = "is" if self.values.get(key) is not None else "is left out, for which its class has"
            raise self.error(f"'{key}' {origin} {value:,}; expected {expected:,}, the {owner}'s hidden size")

    def check_kv_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Raises InputError unless query heads are shared evenly among key/value heads."""
        if num_heads % num_kv_heads:
            raise self.error(
                f"{num_heads} attention heads are not divisible by {num_kv_heads} key/value heads; "
                "expected a divisor of the number of heads"
            )

    def error(self, sentence: str) -> InputError:
        """An error that names the file."""
        return InputError(f"{self.where}: {sentence}")

    def _missing(self, key: str) -> InputError:
        spellings = (key, *self.aliases.get(key, ()))
        names = " or ".join(f"'{spelling}'" for spelling in spellings)
        numbers = [name for name, value in self.values.items() if isinstance(value, int | float)]
        hint = did_you_mean(key, [name for name in numbers if not name.startswith("_")])
        return self.error(f"no {names}, which a {self.family} model needs{hint}")
