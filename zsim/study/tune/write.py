"""The files of the best few: one folder each, ready to be used."""

from __future__ import annotations

from pathlib import Path

from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files
from zsim.study.tune.tellings import script_changes, told_in_file
from zsim.study.tune.text import NEEDS_SCRIPT, label_of
from zsim.study.tune.tune import Tuned
from zsim.units import format_bytes, format_seconds


def tuned_files(tuned: Tuned) -> dict[str, str]:
    """{path below the output folder: text}: `best/`, then `2/`, `3/` ...; each with its NOTES.txt."""
    found: dict[str, str] = {}
    for place, measured in enumerate(tuned.best, 1):
        folder = Path("best" if place == 1 else str(place))
        experiment = measured.candidate.experiment()
        exported = export_files(resolve(experiment))
        for name, text in exported.files.items():
            found[str(folder / name)] = text
        lines = [
            label_of(measured),
            f"{format_seconds(measured.seconds)} per step on {measured.gpus} GPUs, "
            f"{format_bytes(measured.gpu_bytes)} on the fullest; {measured.row['limit']}",
            "",
            *(f"- {NEEDS_SCRIPT}: {change}" for change in script_changes(measured.candidate)),
            *(f"- {told}" for told in told_in_file(measured.candidate)),
            *(f"- {note}" for note in exported.notes),
            *(f"- no {name}: {reason}" for name, reason in exported.missing.items()),
        ]
        found[str(folder / "NOTES.txt")] = "\n".join(lines) + "\n"
    return found
