"""The questions that a framework answers for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from zsim.specs.experiment.job import Job
from zsim.specs.strategy.registry import kinds, role_of
from zsim.ui.field import Field


class FrameworkFields:
    """A framework's settings on the page.

    `FIELDS` in the module `fields` of the framework's folder. The answers here are those of a framework
    without anything special.
    """

    label: str = ""
    """Its name in the page's list of frameworks, which it is not in without one."""
    position: int = 0
    """Its place in that list."""
    fields: tuple[Field, ...] = ()
    """Its settings of `[strategy]`."""
    has_degrees = False
    """Whether the degrees of model parallelism are among its settings."""
    reads_bare_files = False
    """Whether a file that is no program's is taken for its own."""

    def values(self, job: Job) -> Iterable[tuple[str, Any]]:
        """The values of fields that are no keys of `[strategy]`, by key."""
        return ()

    def translate(
        self, data: Mapping[str, Any], changes: Mapping[str, Any], job_with: Callable[[Any], Job]
    ) -> dict[str, Any]:
        """`changes` of fields under the keys that the file-shaped `data` of an experiment has for them.

        `job_with` is the job with some changes.
        """
        return dict(changes)

    def shown(self, key: str, value: Any) -> tuple[str, Any]:
        """The key of the field that shows a dotted key, and its value there."""
        return key, value

    def shown_keys(self) -> frozenset[str]:
        """Dotted keys of `[strategy]` that fields show under other keys."""
        return frozenset()

    def unstated_settings(self, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        """Settings of a file that says `values` and leaves them out, where the page has them otherwise."""
        return ()


def fields_of(kind: str) -> FrameworkFields:
    """The settings of the framework of a kind on the page."""
    return cast(FrameworkFields, role_of(kind, "fields", "FIELDS", FrameworkFields()))


def kind_of_bare_files() -> str:
    """The kind of strategy that a file is of which no program recognises."""
    return next(kind for kind in kinds() if fields_of(kind).reads_bare_files)
