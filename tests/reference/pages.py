"""Pages and tables of docs/ that are made from the code: other words, other programs' files, refusals.

`python -m pytest tests/reference --update` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from zsim.specs.experiment.programs import listed_programs, roles_of
from zsim.specs.formats.program import TrainingProgram
from zsim.specs.formats.program_key import ProgramKey
from zsim.specs.key_index import concepts
from zsim.specs.model.huggingface import REFUSED_TYPES
from zsim.specs.strategy.optimizers import REFUSED
from zsim.specs.strategy.registry import framework_of, kinds_in_order, kinds_with, role_of
from zsim.specs.strategy.requirement import Refusal, SettingRequirement, shown


def concepts_page() -> str:
    """The page of other programs' words: an entry per concept."""
    lines = [
        "# Other words for it",
        "",
        "Names of methods and settings elsewhere, what they mean, and the keys here. `zsim explain WORD`",
        "finds them too.",
        "",
    ]
    for concept in concepts():
        words = ", ".join(f"`{word}`" for word in concept.words)
        here = ", ".join(f"`{name}`" for name in (*concept.keys, *concept.see))
        lines.append(f"- {words}: {concept.sentence} → {here}")
    return "\n".join([*lines, ""])


# -- The page of other programs' files: what is read of each, made from the declarations of its keys -------


_NUM_SHARED = 10  # keys, from which on a program is said to have another's
_INTRODUCTION = """# Files of other programs

`zsim run FILE --cluster C` takes a file of these programs in place of an experiment. `zsim import FILE`
shows the experiment that it means, and `zsim explain KEY` says what a key of the experiment does.

- Keys left out have the program's defaults, of the release named below. A note names those that matter.
- Keys that would make it another job are refused by name. Keys that change time or memory and are not
  simulated are named in every report. Others (paths, logs, seeds, the learning rate) are ignored.
- Files named in a file are searched for in its folder, those above up to the repository's root, and the
  working folder, of another machine's path by its end; models among the presets and in the Hub's local cache.
  Nothing is downloaded. What a script writes by a here document is read as it would be.
- The YAML of oumi and of Open Instruct is read as the keys of TRL that say the same, and EasyR1's as verl's
  of other names.
- A Python script or notebook that makes `TrainingArguments` or a config of TRL's is read as text and never
  run, as the keys of TRL, with its own modules beside it, the YAML or JSON that it loads, and the flags of
  its argparse or HfArgumentParser. What it computes from more, and names of several values, must be given.
  bf16 is taken where it asks for it, and unsloth's kernels as Liger's.
- YAML is read as PyYAML reads it: the last of two equal keys counts (with a note), anchors are followed,
  `${a.b}` is the value at `a.b`.

Each line is a table of the experiment: its keys, and after the colon the program's keys that set them, unless
their names are equal. *Several keys* set more than one key, or decide how others are read.
"""


def program_files_page() -> str:
    """The page, a section per program whose keys are declared."""
    keys = {program.name: _declared(role) for program, role in roles_of("keys", "KEYS", ())}
    lines = [_INTRODUCTION]
    earlier: list[TrainingProgram] = []
    for program in _ordered(keys):
        lines += _section(program, keys, earlier)
        earlier.append(program)
    return "\n".join(lines)


def _ordered(keys: Mapping[str, Sequence[ProgramKey]]) -> list[TrainingProgram]:
    """Programs with declared keys. One whose keys others have stands before them."""
    programs = [program for program in listed_programs() if program.is_read and keys[program.name]]
    return sorted(programs, key=lambda program: -_num_users(program, keys))


def _num_users(program: TrainingProgram, keys: Mapping[str, Sequence[ProgramKey]]) -> int:
    section_keys = {id(key) for key in keys[program.name]}
    names = [name for name in keys if name != program.name]
    sizes = {name: len(section_keys & {id(key) for key in keys[name]}) for name in names}
    return sum(size > _NUM_SHARED and len(keys[name]) > len(section_keys) for name, size in sizes.items())


def _declared(role: Mapping[str, ProgramKey] | Iterable[ProgramKey]) -> list[ProgramKey]:
    return list(role.values() if isinstance(role, Mapping) else role)


def _section(
    program: TrainingProgram, keys: Mapping[str, Sequence[ProgramKey]], earlier: Sequence[TrainingProgram]
) -> Iterator[str]:
    yield f"## {program.title.removeprefix('the ')}"
    yield ""
    if program.recognised_by:
        yield f"Recognised by {program.recognised_by}."
    if program.release:
        yield f"Read as in {program.release}."
    section_keys = list(keys[program.name])
    for base in earlier:
        shared = {id(key) for key in keys[base.name]}
        if sum(id(key) in shared for key in section_keys) > _NUM_SHARED:
            section_keys = [key for key in section_keys if id(key) not in shared]
            yield f"Also the keys of {base.title}."
    yield ""
    yield from _read_lines([key for key in section_keys if key.treatment == "read"])
    for treatment, words in (("refused", "Refused"), ("noted", "Named in reports, not simulated")):
        names = [f"`{key.key}`" for key in section_keys if key.treatment == treatment]
        if names:
            yield f"{words}: {', '.join(names)}."
            yield ""


def _read_lines(keys: Sequence[ProgramKey]) -> Iterator[str]:
    """The keys that set one of the experiment's, a line per table, and those that set several."""
    tables: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        if key.setting:
            table, _, name = key.setting.rpartition(".")
            tables.setdefault(table, {}).setdefault(name, []).append(key.key)
    for table, names in tables.items():
        entries = []
        for name, program_keys in names.items():
            shown = ", ".join(f"`{key}`" for key in dict.fromkeys(program_keys))
            entries.append(shown if program_keys == [name] else f"`{name}`: {shown}")
        yield f"- **{table or 'the job'}**: {'; '.join(entries)}"
    others = [f"`{key.key}`" for key in keys if not key.setting]
    if others:
        yield f"- **several keys**: {', '.join(others)}"
    yield ""


# -- The tables of `docs/simulated.md`: what is refused by name, and settings that need each other ---------


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
    """The lists of what is refused and the tables of what needs another setting, in Markdown."""
    for title, rows in refusals().items():
        yield f"**{title}**"
        yield ""
        if title.startswith(("An experiment", "A `config.json`")):
            for feature, settings in _joined(rows).items():
                yield f"- {', '.join(f'`{setting}`' for setting in settings)}: {feature}"
        else:
            yield ", ".join(f"`{row.setting}`" for row in rows)
        yield ""
    for number, (title, requirement_rows) in enumerate(requirements().items()):
        if number:
            yield ""
        yield f"Settings of `[strategy]` that {title} takes only together with others:"
        yield ""
        yield "| setting | needs |"
        yield "|---|---|"
        for expectation, settings in _joined(map(_refusal_row, requirement_rows)).items():
            yield f"| {', '.join(f'`{setting}`' for setting in settings)} | {expectation} |"


def _refusal_row(requirement: SettingRequirement) -> Refusal:
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
