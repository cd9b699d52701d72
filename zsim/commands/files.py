"""`zsim import` and `zsim export`."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import (
    ExperimentOptions,
    file_option,
    folder_option,
    print_note,
    takes_experiment,
)
from zsim.errors import InputError
from zsim.files import write_atomically, write_files
from zsim.specs.experiment.programs import listed_programs

# What `import_file` lets through: options of other programs.
EXTRA = {"import_file": {"allow_extra_args": True, "ignore_unknown_options": True}}


_PROGRAMS = listed_programs()
# First those that choose among engines, then the files of one engine.
_FILES = [
    program.file_nouns[0]
    for program in sorted(_PROGRAMS, key=lambda program: len(program.kinds) == 1)
    if program.file_nouns
]
_HELP = f"""A training file as an experiment.
Options of {" or ".join(program.title for program in _PROGRAMS if program.takes_options)} may follow the file.

What the file asks for and a step does not depend on, or zsim leaves out, stands in `notes`.
"""


@takes_experiment(without=("experiment",), help=_HELP)
def import_file(
    context: typer.Context,
    options: ExperimentOptions,
    file: Annotated[str, typer.Argument(help=f"{', '.join(_FILES)}.")],
    output: Annotated[Path | None, file_option("--output", "-o", help="Write the experiment there.")] = None,
) -> None:
    """Print or write the experiment that a training file means."""
    from zsim.specs.experiment.resolve import resolve
    from zsim.specs.formats.detect import names_experiment
    from zsim.specs.formats.toml import experiment_toml

    if names_experiment(file):
        raise InputError(
            f"{file}: already is an experiment; expected another program's file ('zsim run {file}' simulates "
            "an experiment)"
        )
    if not context.args and len(file.split()) == 1 and not os.path.exists(file):
        raise InputError(f"{file}: no such file; expected a training file (--help lists the programs)")
    if not context.args and os.path.isdir(file):
        raise InputError(f"{file}: is a folder, expected a file")
    if Path(file).suffix.lower() == ".json" and not context.args:
        experiment = replace(options, experiment=Path(file)).load()
    else:
        config = shlex.join([file, *context.args]) if context.args else file
        experiment = replace(options, set_=[f"strategy.config={config}", *(options.set_ or [])]).load()
    resolve(experiment)
    text = experiment_toml(experiment)
    if output is None:
        print(text, end="")
        return
    print(write_atomically(output, text))
    for note in experiment.notes:
        print_note(note)


_WRITTEN = ", ".join(program.writes for program in listed_programs() if program.writes)


@takes_experiment(help=f"Write {_WRITTEN}: what can say it.")
def export(
    options: ExperimentOptions, out: Annotated[Path, folder_option(help="Write the files there.")]
) -> None:
    """Write a DeepSpeed JSON, FSDP2 Python, an Accelerate YAML, a torchtitan TOML, a Megatron script: what
    can say it."""
    from zsim.report.views.text.plain import paragraph
    from zsim.specs.experiment.resolve import resolve
    from zsim.specs.formats.export import export_files

    exported = export_files(resolve(options.load()))
    for path in write_files(exported.files, out):
        print(path)
    for name, reason in exported.missing.items():
        for line in paragraph(f"no {name}: {reason}", indent=2):
            print(line)
    for note in exported.notes:
        print_note(note)
