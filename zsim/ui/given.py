"""A model or a cluster of the user's own, pasted or uploaded: it becomes a line of the other settings."""

from __future__ import annotations

import binascii
import json
import tempfile
import tomllib
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.reading import parse_toml
from zsim.specs.cluster.files import load_cluster
from zsim.specs.formats.toml import inline_text, toml_text
from zsim.specs.formats.topology.read import import_topology
from zsim.specs.model.huggingface import model_from_config
from zsim.ui.layout import MAX_UPLOAD
from zsim.ui.words import said

_EXPECTED = (
    "expected a model's config.json, a topology TOML, the text of `nvidia-smi topo -m` or `ibnetdiscover`, "
    "or an NCCL topology XML"
)
_OTHER_PROGRAMS = (
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "compute_environment",
)


def take_given(app: Any) -> None:
    """A click or a file makes what is given the page's model or cluster; what is wrong is said beside it."""
    from dash import Input, Output, State, ctx, no_update

    @app.callback(  # type: ignore[untyped-decorator]
        Output("more", "value", allow_duplicate=True),
        Output("apply", "n_clicks", allow_duplicate=True),
        Output("given-words", "children"),
        Input("use", "n_clicks"),
        Input("upload", "contents"),
        State("upload", "filename"),
        State("given", "value"),
        State("more", "value"),
        State("apply", "n_clicks"),
        prevent_initial_call=True,
    )
    def take(
        clicks: int | None, contents: str | None, name: str | None, text: str | None, more: str, applied: int
    ) -> Any:
        def work() -> tuple[str, str]:
            if ctx.triggered_id == "upload":
                return setting_of(uploaded(contents or ""), name or "file")
            return setting_of(text or "", "the pasted text")

        if not clicks and not contents:
            return no_update
        found, error = said(work)
        if found is None:
            return no_update, no_update, error
        key, value = found
        return (
            with_line(more or "", key, value),
            (applied or 0) + 1,
            f"Taken as the {key}, in other settings.",
        )


def uploaded(contents: str) -> str:
    """The text of a file as the browser sends it: a data address in base64."""
    try:
        content = b64decode(contents.partition(",")[2], validate=True)
        _check_size(len(content))
        return content.decode("utf-8-sig")
    except (binascii.Error, UnicodeDecodeError):
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


def with_line(more: str, key: str, value: str) -> str:
    """The other settings with `key = value` in place of what they said of it."""
    lines = [line for line in more.splitlines() if line.strip() and line.partition("=")[0].strip() != key]
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
    other = next((key for key in _OTHER_PROGRAMS if key in config), None)
    if other is not None:
        raise InputError(
            f"{name}: found '{other}', so it is a training file; expected a model or a cluster here. "
            "'zsim ui FILE' starts the page with a training file"
        )
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
        if "model" in tables or "parallelism" in tables:
            raise InputError(
                f"{name}: is an experiment or a training file; expected a model or a cluster here. "
                "'zsim ui FILE' starts the page with it"
            )
        whole = Path(folder) / "cluster.toml"
        whole.write_text(toml_text(tables), encoding="utf-8")
        load_cluster(whole)
    return tables
