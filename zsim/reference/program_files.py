"""The page of other programs' files: what is read of each, made from the declarations of its keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from zsim.specs.experiment.programs import listed_programs, roles_of
from zsim.specs.formats.program import TrainingProgram
from zsim.specs.formats.program_key import ProgramKey

_NUM_SHARED = 10  # keys, from which on a program is said to have another's
_INTRODUCTION = """# Files of other programs

`zsim run FILE --cluster C` takes a file of these programs in place of an experiment, and `zsim import
FILE` shows the experiment that it means. What a file says counts. Where it says nothing, the program's
own default counts, as of the release that stands below, and a note names the defaults that matter. A key
that makes another job of it is refused by name. A key that changes the time or the memory, and that zsim
leaves out, stands in the notes of every report. Keys that do neither (paths, logs, seeds, the learning
rate) are silent.

A file that a file names is looked for from the file's folder, from those around it up to the root of its
repository, and from the working folder. A model is looked for in its folder, among the presets, and in
the local cache of the Hub. Nothing is downloaded.

YAML is read as PyYAML reads it: of a key that stands twice the last counts, and a note says so; anchors
are followed; `None` is null; `${a.b}` is the value at `a.b`.

This page is made from the code (`python -m pytest tests/reference --update`).
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
            yield f"It has the keys of {base.title} as well."
    yield ""
    yield "| key | what it says | experiment |"
    yield "|---|---|---|"
    for key in section_keys:
        if key.treatment == "read":
            setting = f"`{key.setting}`" if key.setting else ""
            yield f"| `{key.key}` | {_cell(key.meaning)} | {setting} |"
    yield ""
    for treatment, words in (("refused", "Refused by name"), ("noted", "Left out, and said")):
        names = [f"`{key.key}`" for key in section_keys if key.treatment == treatment]
        if names:
            yield f"{words}: {', '.join(names)}."
            yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
