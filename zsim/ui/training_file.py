"""An experiment or another program's training file in the page: fields are turned as the file says, and what
has no field becomes lines of the other settings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import experiment_from, load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.detect import is_training_file, names_experiment, read_training_file
from zsim.specs.formats.toml import inline_text
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.study.tune.axes import STAGE as JSON_STAGE
from zsim.study.tune.axes import ZERO
from zsim.ui.fields import OFFLOAD_PARAMETERS, OFFLOAD_STATES, RUN
from zsim.ui.form import SIZE, Form, Shown, form_of

_OF_PAGE = ("sequence_length", "activation_checkpointing")  # kept where the file does not say
_UNSAID = ("notes", "program", "strategy.config_name", "schema")


def settings_of_file(form: Form, shown: Shown, text: str, name: str) -> tuple[dict[str, Any], str]:
    """The page's fields and other settings that are as the training file `text` says.

    `name` ends as its program ends it. Model, cluster and number of nodes stay the page's where the file
    names none.

    Raises InputError for a file that its program would refuse, and for one that the page cannot show.
    """
    with tempfile.TemporaryDirectory(prefix="zsim-ui-") as folder:
        path = Path(folder) / f"given{Path(name).suffix or '.json'}"
        path.write_text(text, encoding="utf-8")
        try:
            wanted = _experiment(form.experiment(shown), path)
            of_file, job, is_experiment = form_of(wanted), resolve(wanted), names_experiment(path)
        except InputError as error:
            raise InputError(str(error).replace(str(path), name).replace(path.name, name)) from None
    turned = dict(shown)
    for key, value in of_file.initial.items():
        choices = form.fields[key].choices
        is_said = key in of_file.fields and (choices is None or value in choices)
        if is_said and (is_experiment or (key not in SIZE and form.fields[key] not in RUN)):
            turned[key] = value
    lines = dict(_lines(_flat(of_file.data), _flat(form_of(form.experiment(turned)).data), form))
    more = "\n".join(f"{key} = {inline_text(value)}" for key, value in lines.items())
    _check_same(job, resolve(form.experiment(turned, more)), name)
    return turned, more


def _experiment(page: Experiment, path: Path) -> Experiment:
    """The experiment of the file at `path`, with what it leaves out as on the page."""
    if names_experiment(path):
        return load_experiment(path)
    data: dict[str, Any] = {"cluster": page.cluster, "nodes": page.nodes, "gpus": page.gpus}
    data = {key: value for key, value in data.items() if value is not None}
    said: set[str] = set()
    if is_training_file(str(path)):
        file = read_training_file(str(path))
        said = {*file.says, *file.assumes}
    if "model" not in said:
        data["model"] = page.model
    training = {key: getattr(page.training, key) for key in _OF_PAGE if f"training.{key}" not in said}
    data["training"] = {key: value for key, value in training.items() if value is not None}
    overrides = {"strategy.config": str(path)}
    if not said:
        overrides["strategy.kind"] = "deepspeed"
    return experiment_from(data, overrides, origin="settings")


def _lines(wanted: Mapping[str, Any], shown: Mapping[str, Any], form: Form) -> Iterator[tuple[str, Any]]:
    """The settings of `file_values` beyond those that the fields say, by dotted key."""
    with_field = {
        JSON_STAGE, f"{ZERO}{OFFLOAD_STATES}.device", f"{ZERO}{OFFLOAD_PARAMETERS}.device",
    }  # fmt: skip
    for key, value in wanted.items():
        is_open = value is None or key in _UNSAID or key in with_field
        if is_open or (key in form.fields and key not in ("model", "cluster")) or shown.get(key) == value:
            continue
        yield key, value
    said = [f"strategy.config.{name}.enabled" for name in ("bf16", "fp16")]
    if any(key.startswith(ZERO) for key in wanted) and not any(key in wanted for key in said):
        yield said[0], False  # DeepSpeed's own default; a stage alone means bf16


def _flat(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Values by dotted key. A model or cluster that is a table is one value."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        dotted = f"{before}{key}"
        if isinstance(value, Mapping) and dotted not in ("model", "cluster"):
            found |= _flat(value, f"{dotted}.")
        else:
            found[dotted] = value
    return found


def _check_same(wanted: Job, shown: Job, name: str) -> None:
    """Raise InputError unless both are the same job."""
    parts = ("training", "strategy", "parallelism")
    differ = [part for part in parts if _plain(getattr(wanted, part)) != _plain(getattr(shown, part))]
    if differ:
        raise InputError(
            f"{name}: the page has no fields for all of its {' and '.join(differ)}; 'zsim ui {name}' starts "
            "the page with it"
        )


def _plain(part: Any) -> Any:
    """The part without its origins."""
    return replace(part, name="", notes=(), origins=()) if isinstance(part, DeepSpeedConfig) else part
