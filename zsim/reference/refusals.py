"""The tables of `docs/simulated.md`: what is refused by name, and settings that need each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from zsim.specs.experiment.programs import roles_of
from zsim.specs.model.huggingface import REFUSED_TYPES
from zsim.specs.strategy.optimizers import REFUSED
from zsim.specs.strategy.registry import framework_of, kinds_in_order, kinds_with, role_of
from zsim.specs.strategy.requirement import Refusal, SettingRequirement, shown

_ROLE = "refusals"


def refusals() -> Mapping[str, tuple[Refusal, ...]]:
    """Settings that are refused by name, by the file that they stand in."""
    experiment = [Refusal(f"training.optimizer = {shown(name)}", reason) for name, reason in REFUSED.items()]
    model = [Refusal(f"model_type {shown(name)}", reason) for name, reason in REFUSED_TYPES.items()]
    tables = {"An experiment": tuple(experiment), "A `config.json`": tuple(model)}
    for kind in _kinds():
        tables[framework_of(kind).title] = role_of(kind, _ROLE, "REFUSALS", ())
    for program, program_refusals in roles_of("keys", "REFUSALS", ()):
        tables[program.title] = program_refusals
    return {title: rows for title, rows in tables.items() if rows}


def requirements() -> Mapping[str, tuple[SettingRequirement, ...]]:
    """Demands of settings of `[strategy]` on each other, by the framework's title."""
    tables = {framework_of(kind).title: role_of(kind, _ROLE, "REQUIREMENTS", ()) for kind in _kinds()}
    return {title: rows for title, rows in tables.items() if rows}


def refusal_lines() -> Iterator[str]:
    """The tables in Markdown."""
    yield "| where | refused | because |"
    yield "|---|---|---|"
    for title, rows in refusals().items():
        for feature, settings in _joined(rows).items():
            yield f"| {title} | {', '.join(f'`{setting}`' for setting in settings)} | {feature} |"
    for title, requirement_rows in requirements().items():
        yield ""
        yield f"Settings of `[strategy]` that {title} takes with others alone:"
        yield ""
        yield "| setting | goes with |"
        yield "|---|---|"
        for expectation, settings in _joined(map(_row, requirement_rows)).items():
            yield f"| {', '.join(f'`{setting}`' for setting in settings)} | {expectation} |"


def _row(requirement: SettingRequirement) -> Refusal:
    """A requirement as the row of a table."""
    values = " or ".join(map(shown, requirement.values))
    key = f"{requirement.key} = {values}" if values else requirement.key
    end = "" if requirement.is_simulated else " (zsim does not simulate the pair)"
    rest = requirement.expectation.removeprefix(requirement.needs)
    return Refusal(key, f"`{requirement.needs}`{rest}{end}")


def _joined(rows: Iterable[Refusal]) -> dict[str, list[str]]:
    """The settings that are refused for the same feature, in order."""
    joined: dict[str, list[str]] = {}
    for row in rows:
        joined.setdefault(row.feature, []).append(row.setting)
    return joined


def _kinds() -> list[str]:
    return [kind for kind in kinds_in_order() if kind in kinds_with(_ROLE)]
