"""`zsim import`: another program's training file as an experiment."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import ExperimentOptions, file_option, print_note, takes_experiment
from zsim.errors import InputError
from zsim.files import write_atomically

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}


@takes_experiment(without=("experiment",))
def import_file(
    context: typer.Context,
    options: ExperimentOptions,
    file: Annotated[
        str, typer.Argument(help="Accelerate YAML, torchtitan TOML, DeepSpeed JSON, Megatron's script.")
    ],
    output: Annotated[Path | None, file_option("--output", "-o", help="Write the experiment there.")] = None,
) -> None:
    """A training file as an experiment. Options of torchtitan or Megatron may follow the file.

    What the file asks for and a step does not depend on, or zsim leaves out, stands in `notes`.
    """
    from zsim.specs.experiment.resolve import resolve
    from zsim.specs.formats.detect import names_experiment
    from zsim.specs.formats.toml import experiment_toml

    if names_experiment(file):
        raise InputError(
            f"{file}: already is an experiment; expected another program's file ('zsim run {file}' simulates "
            "an experiment)"
        )
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
