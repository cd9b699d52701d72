"""The work of the page's process: settings in, answers, files and figures out.

The files that the page's process may read.

# [Note: what the page reads]
A setting of the page may come from a link, and names files as an experiment does. The process that works on
settings therefore opens no file but zsim's and Python's, the page's folder, and those that the experiment
names with which the page was started. What is pasted or uploaded arrives as text. Python itself asks before
each file that it opens (`sys.addaudithook`).
"""

from __future__ import annotations

import errno
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zsim.engine.micro_batches import SimulatedStep
from zsim.files import PACKAGE, topologies_folder
from zsim.report.views.html.figure import Figure
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.study.scaling.result import Mode, efficiency, sentences, throughput
from zsim.study.scaling.scaling import run_scaling
from zsim.study.topologies.figures import animate_step, cluster_figure, loads_figure
from zsim.study.topologies.result import animation_page
from zsim.ui.answer import Answer, Prediction, Predictions, answer, remedy_settings, setting_token
from zsim.ui.files import apply_text, file_content
from zsim.ui.form import DisplayedValues, Form
from zsim.ui.recordings import Recordings
from zsim.ui.whole_run import Tile, run_figures, run_of, run_sentences, run_tiles
from zsim.ui.words import ANIMATION_FILE, RUN_FILE

_SYSTEM = (
    "/dev/null", "/dev/urandom", "/etc/localtime", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys",
    "/usr/share/zoneinfo",
)  # fmt: skip
_REASON = (
    "zsim ui opens no file that a setting or an uploaded file names; paste the content or upload it, or "
    "start zsim ui with an experiment that names it"
)


class ReadableFiles:
    """The files that this process opens from now on. While it is not sealed it opens all, and
    remembers them.
    """

    def __init__(self, folder: Path, allowed_files: Iterator[str]) -> None:
        self._folders = {os.path.realpath(path) for path in (*_installed_folders(), str(folder), *_SYSTEM)}
        self._files = {os.path.realpath(path) for path in allowed_files}
        self._is_sealed = False
        sys.addaudithook(self._check_open)

    def seal(self) -> None:
        """Refuse all other files from now on."""
        self._is_sealed = True

    def _check_open(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not self._is_sealed:
            self._files.add(path)
        elif path not in self._files and not any(_is_within(path, folder) for folder in self._folders):
            raise PermissionError(errno.EACCES, _REASON, os.fsdecode(arguments[0]))


def named_files(data: Any) -> Iterator[str]:
    """The files that file-shaped data names, in any of its values."""
    if isinstance(data, Mapping):
        for value in data.values():
            yield from named_files(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from named_files(value)
    elif isinstance(data, str) and os.path.isfile(data):
        yield data
    elif isinstance(data, str) and os.path.isfile(os.path.join(data, "config.json")):
        yield os.path.join(data, "config.json")


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _installed_folders() -> Iterator[str]:
    """Python's, its packages' and zsim's folders."""
    yield from (str(PACKAGE), str(topologies_folder()))
    yield from (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    yield from (path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))


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

    def answer(self, field_values: DisplayedValues, other_settings: str) -> Answer:
        """The answer of a setting, whose step is kept here. Raises as `answer` does."""
        full_answer = answer(self.form.experiment(field_values, other_settings))
        self.outcomes.store(
            setting_token(field_values, other_settings), full_answer.outcome, full_answer.step
        )
        return replace(full_answer, step=None)

    def outcome(self, field_values: DisplayedValues, other_settings: str) -> Prediction:
        """The numbers of a setting."""
        return self.outcomes.get_prediction(self.form, field_values, other_settings)

    def _step(self, field_values: DisplayedValues, other_settings: str) -> SimulatedStep:
        return self.outcomes.get_step(self.form, field_values, other_settings)

    def film(self, field_values: DisplayedValues, other_settings: str) -> dict[str, Any]:
        """The two figures of the animation of a setting's step, by name, and its frames."""
        animation = animate_step(self._step(field_values, other_settings).outcome)
        return {
            "cluster": cluster_figure(animation).to_plotly_json(),
            "loads": loads_figure(animation).to_plotly_json(),
            "frames": animation.to_dict(),
        }

    def compare_recording(
        self, key: str, name: str, field_values: DisplayedValues, other_settings: str
    ) -> dict[str, Any]:
        """A recording compared with a setting's step."""
        return self.recordings.compare_step(key, name, self._step(field_values, other_settings))

    def take_recording(self, content: bytes, name: str) -> str:
        """The key of a recording, which is kept from now on."""
        return self.recordings.take(content, name)

    def take(
        self, field_values: DisplayedValues, other_settings: str, text: str, name: str
    ) -> tuple[dict[str, Any], str, str]:
        """Fields and other settings with what a pasted or uploaded text says, and a sentence."""
        return apply_text(self.form, field_values, other_settings, text, name)

    def file(self, name: str, field_values: DisplayedValues, other_settings: str) -> bytes:
        """A file that the page offers of a setting."""
        if name == ANIMATION_FILE:
            animation = animate_step(self._step(field_values, other_settings).outcome)
            return animation_page(animation, self.outcome(field_values, other_settings).title).encode()
        experiment = self.form.experiment(field_values, other_settings)
        return run_of(experiment).page().encode() if name == RUN_FILE else file_content(experiment, name)

    def run(
        self, field_values: DisplayedValues, other_settings: str
    ) -> tuple[dict[str, Figure], tuple[Tile, ...], tuple[str, ...]]:
        """The figures, numbers and sentences of a setting's run of days."""
        run = run_of(self.form.experiment(field_values, other_settings))
        return run_figures(run), tuple(run_tiles(run)), tuple(run_sentences(run))

    def mends(self, field_values: DisplayedValues, other_settings: str) -> dict[str, dict[str, Any]]:
        """Changes with which a setting fits that does not."""
        return remedy_settings(self.form.experiment(field_values, other_settings))

    def curve(
        self, field_values: DisplayedValues, other_settings: str, counts: Sequence[int], mode: Mode
    ) -> Curve:
        """The scaling curve of a setting, over `counts`."""
        return curve(self.form.experiment(field_values, other_settings), counts, mode, self.folder / "points")


@dataclass(frozen=True)
class Curve:
    """The curve so far, as the figures and sentences of the scaling study."""

    figures: Mapping[str, Figure]
    words: str


def curve(experiment: Experiment, counts: Sequence[int], mode: Mode, folder: Path) -> Curve:
    """The curve over `counts`. Its points are kept in `folder`. Raises as `run_scaling` does."""
    scaling = run_scaling(experiment, counts, mode, folder, is_quiet=True)
    figures = {"efficiency": efficiency(scaling), "throughput": throughput(scaling)}
    failure_texts = [f"{scale.gpus:,} GPUs: {scale.error}." for scale in scaling.points if scale.error]
    return Curve(figures, " ".join([*sentences(scaling), *failure_texts]))
