"""Files of the page: those that the user gives it, pasted or uploaded, and those that it offers.

A model or a cluster becomes a line of the other settings, and a recorded step is shown with the simulated
one. Of an experiment or another program's training file the fields are turned as the file says, and what has
no field becomes lines of the other settings.
"""

from __future__ import annotations

import binascii
import csv
import io
import json
import re
import tempfile
import tomllib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.reading import parse_toml
from zsim.report.views.html.report import html_report
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment, load_experiment
from zsim.specs.experiment.programs import programs
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.detect import is_training_file, names_experiment, read_training_file
from zsim.specs.formats.export import export_files
from zsim.specs.formats.toml import inline_text, toml_text
from zsim.specs.formats.topology.read import import_topology
from zsim.specs.model.huggingface import model_from_config
from zsim.specs.strategy.requirement import phrase
from zsim.study.search import simulate
from zsim.study.topologies.figures import NUM_FRAMES
from zsim.trace.chrome import write_chrome_trace
from zsim.ui.answer import check_size, loop_notes
from zsim.ui.field import KIND, RUN, fields_of, kind_of_bare_files
from zsim.ui.form import SIZE, DisplayedValues, Form, make_form
from zsim.ui.layout import MAX_UPLOAD, field_id
from zsim.ui.process.worker import Backends
from zsim.ui.recordings import is_recorded
from zsim.ui.words import CSV_FILE, JSON_FILE, STEP_FILES, TRACE_FILE, run_safely

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


_EXPECTED = (
    "expected a model's config.json, a topology TOML, the text of `nvidia-smi topo -m`, `ibnetdiscover` or "
    f"`lldpctl`, an NCCL topology XML, an experiment, {phrase('files of the page')}, or a recorded trace"
)
_TRAINING = (
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "compute_environment",
    "parallelism", "job",
)  # fmt: skip


def add_uploads(app: Any, backends: Backends) -> None:
    """A click or a file makes the text or file a part of the page. Errors are shown next to it."""
    from dash import Input, Output, State, ctx, no_update

    keys = list(backends.form.fields)

    @app.callback(  # type: ignore[untyped-decorator]
        {
            "fields": [Output(field_id(key), "value", allow_duplicate=True) for key in keys],
            "more": Output("more", "value", allow_duplicate=True),
            "applied": Output("applied", "data", allow_duplicate=True),
            "said": Output("given-words", "children"),
            "recording": Output("recording", "data", allow_duplicate=True),
        },
        Input("use", "n_clicks"),
        Input("upload", "contents"),
        State("upload", "filename"),
        State("given", "value"),
        *(State(field_id(key), "value") for key in keys),
        State("applied", "data"),
        prevent_initial_call=True,
    )
    def take(
        clicks: int | None, contents: str | None, name: str | None, text: str | None, *states: Any
    ) -> Any:
        *values, other_settings = states
        field_values = dict(zip(keys, values, strict=True))
        no_updates = {"fields": [no_update] * len(keys), "more": no_update, "applied": no_update,
                   "recording": no_update}  # fmt: skip
        if not clicks and not contents:
            return {**no_updates, "said": no_update}

        def work() -> dict[str, Any]:
            is_file = ctx.triggered_id == "upload"
            content = decode_upload(contents or "") if is_file else b""
            if is_recorded(content, name or ""):
                trace_name = name or "trace"
                return {
                    "recording": {
                        "key": backends.answer_worker.result("take_recording", content, trace_name),
                        "name": trace_name,
                    },
                    "said": "The recorded step stands beside the simulated one, below. The page's address "
                    "names it for as long as this zsim ui runs.",
                }
            if is_file:
                text_given, source_name = decode_text(content), name or "file"
            else:
                text_given, source_name = text or "", "the pasted text"
            setting = field_values, other_settings or "", text_given, source_name
            new_fields, lines, words = backends.answer_worker.result("take", *setting)
            return {
                "fields": [new_fields[key] for key in keys],
                "more": lines,
                "said": words,
                "applied": lines,
            }

        changes, error = run_safely(work)
        return {**no_updates, "said": error} if changes is None else {**no_updates, **changes}


def apply_text(
    form: Form, field_values: Mapping[str, Any], other_settings: str, text: str, name: str
) -> tuple[dict[str, Any], str, str]:
    """Fields and other settings with what the text says, and a sentence. Raises as `setting_of` does."""
    kind = training_kind(text, name)
    if kind is not None:
        new_fields, lines = settings_of_file(form, field_values, text, ensure_suffix(name, kind))
        return new_fields, lines, f"Taken; all that {name} says of the step is on the page."
    key, value = setting_of(text, name)
    return dict(field_values), set_line(other_settings, key, value), f"Taken as the {key}, in other settings."


def training_kind(text: str, name: str) -> str | None:
    """The ending of the name of an experiment or a training file, if the text is one, else None."""
    if len(text) > MAX_UPLOAD or not text.strip():
        return None
    if text.lstrip().startswith("{"):
        try:
            content = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            return None
        return ".json" if any(key in content for key in _TRAINING) else None
    try:
        tables = parse_toml(text, name)
    except (tomllib.TOMLDecodeError, InputError):
        marks = "|".join(mark for program in programs() for mark in program.yaml_marks)
        is_yaml = re.search(rf"^({marks}):", text, re.M)
        return ".yaml" if is_yaml else None
    return ".toml" if any(key in tables for key in ("model", "parallelism", "job")) else None


def ensure_suffix(name: str, suffix: str) -> str:
    return (
        name
        if name.lower().endswith((suffix, ".yml" if suffix == ".yaml" else suffix))
        else f"{name}{suffix}"
    )


def decode_upload(contents: str) -> bytes:
    """The bytes of a file as the browser sends it: a data address in base64."""
    try:
        return b64decode(contents.partition(",")[2], validate=True)
    except binascii.Error:
        raise InputError(f"the file did not arrive whole; {_EXPECTED}") from None


def decode_text(content: bytes) -> str:
    """The text of a file that is no trace."""
    _check_size(len(content))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"the file is not UTF-8 text; {_EXPECTED}") from None


def setting_of(text: str, name: str) -> tuple[str, str]:
    """("model" or "cluster", its content as a TOML value) of a text in one of the formats known here.

    Raises InputError for anything else, for text that is too long, and for what is not as its format says.
    """
    _check_size(len(text.encode("utf-8", "replace")))
    if not text.strip():
        raise InputError(f"{name}: is empty; {_EXPECTED}")
    if text.lstrip().startswith("{"):
        return "model", inline_text(_model(text, name))
    return "cluster", inline_text(_cluster(text, name))


def set_line(other_settings: str, key: str, value: str) -> str:
    """The other settings with `key = value` replacing the line for that key."""
    lines = [
        line for line in other_settings.splitlines() if line.strip() and line.partition("=")[0].strip() != key
    ]
    return "\n".join([f"{key} = {value}", *lines])


def _check_size(size: int) -> None:
    if size > MAX_UPLOAD:
        raise InputError(
            f"found {size:,} bytes, expected at most {MAX_UPLOAD:,}; zsim ui FILE reads larger ones"
        )


def _model(text: str, name: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{name}: is no JSON: {error}") from None
    config.setdefault("_name_or_path", Path(name).stem if name.endswith(".json") else "own model")
    model_from_config(config, str(config["_name_or_path"]), name)
    return dict(config)


def _cluster(text: str, name: str) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory(prefix="zsim-ui-") as folder:
        try:
            tables = parse_toml(text, name)
        except tomllib.TOMLDecodeError:
            path = Path(folder) / "given.txt"
            path.write_text(text, encoding="utf-8")
            try:
                tables = parse_toml(import_topology(path, name="own cluster").toml, name)
            except InputError as error:
                raise InputError(str(error).replace("given.txt", name)) from None
        cluster_path = Path(folder) / "cluster.toml"
        cluster_path.write_text(toml_text(tables), encoding="utf-8")
        load_cluster(cluster_path)
    return tables


def offer_files(app: Any, backends: Backends) -> None:
    """A click on a file's name downloads it, or says why there is none."""
    from dash import ALL, Input, Output, State, ctx, no_update

    @app.callback(  # type: ignore[untyped-decorator]
        Output("download", "data"),
        Output("file-words", "children"),
        Input({"type": "file", "name": ALL}, "n_clicks"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def take(clicks: list[int | None], request: Mapping[str, Any]) -> Any:
        if not any(clicks) or not isinstance(ctx.triggered_id, Mapping):
            return no_update, no_update
        name, setting = str(ctx.triggered_id["name"]), (request["shown"], request["more"])
        content, error = run_safely(backends.answer_worker.result, "file", name, *setting)
        if content is None:
            return no_update, error
        return {"content": b64encode(content).decode(), "filename": name, "base64": True}, ""


def file_content(experiment: Experiment, name: str) -> bytes:
    """The content of one of the files that the page offers, other than the animation."""
    if name in STEP_FILES:
        return _step_file(experiment, name)
    return export_files(resolve(experiment)).files[name].encode()


def _step_file(experiment: Experiment, name: str) -> bytes:
    result = simulate(experiment)
    if name == JSON_FILE:
        return (json.dumps(result.report.to_dict(), indent=2, default=str) + "\n").encode()
    if name == CSV_FILE:
        rows = [asdict(row) for row in result.report.collectives]
        table = io.StringIO()
        writer = csv.DictWriter(table, list(rows[0]) if rows else ["kind"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return table.getvalue().encode()
    if name == TRACE_FILE:
        check_size(result.job)
        with tempfile.TemporaryDirectory(prefix="zsim-ui-") as folder:
            path = Path(folder) / name
            write_chrome_trace(result.trace, path)
            return path.read_bytes()
    notes = (*result.report.notes, *loop_notes(result.step))
    return html_report(replace(result.report, notes=notes), result.step.outcome.trace).encode()


def show_animation(app: Any, backends: Backends) -> None:
    """After each answer the animation is made of the step that was simulated for it. The browser shows its
    frames.
    """
    from dash import ClientsideFunction, Input, Output

    @app.callback(  # type: ignore[untyped-decorator]
        Output("film", "data"),
        Output("film-words", "children"),
        Output("frame", "max"),
        Input("asked", "data"),
    )
    def make(request: Mapping[str, Any] | None) -> Any:
        if not request:
            return None, "", NUM_FRAMES - 1
        setting = request["shown"], request["more"]
        film, error = run_safely(backends.answer_worker.result, "film", *setting)
        return film, error, NUM_FRAMES - 1

    app.clientside_callback(
        ClientsideFunction("zsim", "frame"),
        Output("shown-frame", "data"),
        Output("film-words", "children", allow_duplicate=True),
        Input("frame", "value"),
        Input("film", "data"),
        prevent_initial_call="initial_duplicate",
    )
