"""Values that are computed once from an immutable value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar, TypeVarTuple

Arguments = TypeVarTuple("Arguments")
Derived = TypeVar("Derived")


class Memo:
    """An immutable value with a cache of values derived from it, which runs on other hardware share."""

    _derived: dict[Any, Any]

    def memoize(self, derive: Callable[[Self, *Arguments], Derived], *arguments: *Arguments) -> Derived:
        """`derive(self, *arguments)`, computed on the first call and cached.

        `derive` must be a module-level function, and its result must not be changed.
        """
        key = (derive, arguments)
        if key not in self._derived:
            self._derived[key] = derive(self, *arguments)
        derived: Derived = self._derived[key]
        return derived
