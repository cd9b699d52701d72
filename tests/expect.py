"""What tests expect, with types that mypy follows: a number of about a size, a value of one kind, one that
is there."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def about(number: float, *, rel: float | None = None, abs: float | None = None) -> Any:
    """`pytest.approx(number)` where a tuple or a record holds the number: by its own type it could be no
    element of them."""
    return pytest.approx(number, rel=rel, abs=abs)


def of_kind(value: object, kind: type[T]) -> T:
    """The value, which must be of this class: one strategy, piece of work or module of several."""
    assert isinstance(value, kind)
    return value


def there(value: T | None) -> T:
    """The value, which must not be None."""
    assert value is not None
    return value
