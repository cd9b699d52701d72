"""The work of the page's process: settings in, answers, files and figures out."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zsim.report.views.html.figure import Figure
from zsim.specs.experiment.resolve import resolve
from zsim.study.scaling.scaling import Mode
from zsim.ui.answer import Answer, answer, mends
from zsim.ui.curve import Curve, curve
from zsim.ui.film import film_data
from zsim.ui.form import Form, Shown
from zsim.ui.given import taken
from zsim.ui.prediction import Prediction, Predictions, token_of
from zsim.ui.process.readable import ReadableFiles, named_files
from zsim.ui.recorded import Recordings
from zsim.ui.taken import file_content, film_content
from zsim.ui.whole_run import Tile, run_figures, run_of, run_page, run_sentences, run_tiles
from zsim.ui.words import FILM_FILE, RUN_FILE


class Backend:
    """The page's form, the last steps and the recordings.

    It lives in a process that reads no file but those of the page and of the experiment with which the page
    was started.
    """

    def __init__(self, form: Form, folder: Path) -> None:
        files = ReadableFiles(folder, named_files(form.data))
        tempfile.tempdir = str(folder)
        resolve(form.experiment(form.initial))  # reads what those files name
        files.seal()
        self.form, self.folder = form, folder
        self.outcomes, self.recordings = Predictions(), Recordings(folder)

    def answer(self, shown: Shown, more: str) -> Answer:
        """The answer of a setting, whose step is kept here. Raises as `answer` does."""
        found = answer(self.form.experiment(shown, more))
        self.outcomes.keep(token_of(shown, more), found.outcome, found.step)
        return replace(found, step=None)

    def outcome(self, shown: Shown, more: str) -> Prediction:
        """The numbers of a setting."""
        return self.outcomes.outcome_of(token_of(shown, more), self.form, shown, more)

    def film(self, shown: Shown, more: str) -> dict[str, Any]:
        """The animation of a setting's step."""
        return film_data(self.form, self.outcomes, shown, more)

    def beside(self, key: str, name: str, shown: Shown, more: str) -> dict[str, Any]:
        """A recording compared with a setting's step."""
        step = self.outcomes.step_of(token_of(shown, more), self.form, shown, more)
        return self.recordings.beside(key, name, step)

    def take_recording(self, content: bytes, name: str) -> str:
        """The key of a recording, which is kept from now on."""
        return self.recordings.take(content, name)

    def take(self, shown: Shown, more: str, text: str, name: str) -> tuple[dict[str, Any], str, str]:
        """Fields and other settings with what a pasted or uploaded text says, and a sentence."""
        return taken(self.form, shown, more, text, name)

    def file(self, name: str, shown: Shown, more: str) -> bytes:
        """A file that the page offers of a setting."""
        if name == FILM_FILE:
            return film_content(self.form, self.outcomes, shown, more)
        experiment = self.form.experiment(shown, more)
        return run_page(run_of(experiment)).encode() if name == RUN_FILE else file_content(experiment, name)

    def run(self, shown: Shown, more: str) -> tuple[dict[str, Figure], tuple[Tile, ...], tuple[str, ...]]:
        """The figures, numbers and sentences of a setting's run of days."""
        run = run_of(self.form.experiment(shown, more))
        return run_figures(run), tuple(run_tiles(run)), tuple(run_sentences(run))

    def mends(self, shown: Shown, more: str) -> dict[str, dict[str, Any]]:
        """Changes with which a setting fits that does not."""
        return mends(self.form.experiment(shown, more))

    def curve(self, shown: Shown, more: str, counts: Sequence[int], mode: Mode) -> Curve:
        """The scaling curve of a setting, over `counts`."""
        return curve(self.form.experiment(shown, more), counts, mode, self.folder / "points")
