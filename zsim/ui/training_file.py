"""An experiment or another program's training file in the page: fields are turned as the file says, and what
has no field becomes lines of the other settings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment, load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.detect import is_training_file, names_experiment, read_training_file
from zsim.specs.formats.toml import inline_text
from zsim.ui.fields import KIND, RUN
from zsim.ui.form import SIZE, DisplayedValues, Form, make_form
from zsim.ui.framework import fields_of, kind_of_bare_files

_PAGE_KEYS = ("sequence_length", "activation_checkpointing")  # kept where the file does not say
_IGNORED_KEYS = ("notes", "program", "strategy.config_name", "schema")


def settings_of_file(
    form: Form, field_values: DisplayedValues, text: str, name: str
) -> tuple[dict[str, Any], str]:
    """The page's fields and other settings that are as the training file `text` says.

    `name` ends as its program ends it. Model, cluster and number of nodes stay the page's where the file
    names none.

    Raises InputError for a file that its program would refuse, and for one that the page cannot show.
    """
    with tempfile.TemporaryDirectory(prefix="zsim-ui-") as folder:
        path = Path(folder) / f"given{Path(name).suffix or '.json'}"
        path.write_text(text, encoding="utf-8")
        try:
            file_experiment = _file_experiment(form.experiment(field_values), path)
            file_form, job, is_experiment = (
                make_form(file_experiment),
                resolve(file_experiment),
                names_experiment(path),
            )
        except InputError as error:
            raise InputError(str(error).replace(str(path), name).replace(path.name, name)) from None
    new_fields = dict(field_values)
    for key, value in file_form.initial.items():
        choices = form.fields[key].choices
        is_in_file = key in file_form.fields and (choices is None or value in choices)
        if is_in_file and (is_experiment or (key not in SIZE and form.fields[key] not in RUN)):
            new_fields[key] = value
    lines = dict(
        _extra_settings(_flatten(file_form.data), _flatten(make_form(form.experiment(new_fields)).data), form)
    )
    other_settings = "\n".join(f"{key} = {inline_text(value)}" for key, value in lines.items())
    _check_equal(job, resolve(form.experiment(new_fields, other_settings)), name)
    return new_fields, other_settings


def _file_experiment(page: Experiment, path: Path) -> Experiment:
    """The experiment of the file at `path`, with what it leaves out as on the page."""
    if names_experiment(path):
        return load_experiment(path)
    data: dict[str, Any] = {"cluster": page.cluster, "nodes": page.nodes, "gpus": page.gpus}
    data = {key: value for key, value in data.items() if value is not None}
    stated_keys: set[str] = set()
    if is_training_file(str(path)):
        file = read_training_file(str(path))
        stated_keys = {*file.settings, *file.defaults}
    if "model" not in stated_keys:
        data["model"] = page.model
    training = {
        key: getattr(page.training, key) for key in _PAGE_KEYS if f"training.{key}" not in stated_keys
    }
    data["training"] = {key: value for key, value in training.items() if value is not None}
    overrides = {"strategy.config": str(path)}
    if not stated_keys:
        overrides[KIND] = kind_of_bare_files()
    return build_experiment(data, overrides, origin="settings")


def _extra_settings(
    file_values: Mapping[str, Any], field_values: Mapping[str, Any], form: Form
) -> Iterator[tuple[str, Any]]:
    """The settings of `file_values` beyond those that the fields say, by dotted key."""
    framework = fields_of(file_values[KIND])
    field_keys = framework.shown_keys()
    for key, value in file_values.items():
        is_open = value is None or key in _IGNORED_KEYS or key in field_keys
        field = form.fields.get(key)
        is_choice = field is not None and (field.choices is None or value in field.choices.values())
        if is_open or (is_choice and key not in ("model", "cluster")) or field_values.get(key) == value:
            continue
        yield key, value
    yield from framework.unstated_settings(file_values)


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key. A model or cluster that is a table is one value."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and dotted not in ("model", "cluster"):
            flat |= _flatten(value, f"{dotted}.")
        else:
            flat[dotted] = value
    return flat


def _check_equal(file_job: Job, page_job: Job, name: str) -> None:
    """Raise InputError unless both are the same job."""
    pairs = {
        "training": (file_job.training, page_job.training),
        "strategy": (file_job.strategy.without_origins(), page_job.strategy.without_origins()),
        "parallelism": (file_job.parallelism, page_job.parallelism),
    }
    differ = [part for part, (of_file, of_page) in pairs.items() if of_file != of_page]
    if differ:
        raise InputError(
            f"{name}: the page has no fields for all of its {' and '.join(differ)}; 'zsim ui {name}' starts "
            "the page with it"
        )
