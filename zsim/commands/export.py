"""`zsim export`: an experiment as files for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from zsim.commands.options import ExperimentOptions, folder_option, print_note, takes_experiment, write_files
from zsim.specs.experiment.programs import listed_programs

_FILES = ", ".join(program.writes for program in listed_programs() if program.writes)


@takes_experiment(help=f"Write {_FILES}: what can say it.")
def export(
    options: ExperimentOptions,
    out: Annotated[Path, folder_option(help="Write the files there.")],
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
