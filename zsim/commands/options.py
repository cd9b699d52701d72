"""What several commands take: an experiment with changes on the command line, and a file for the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zsim.errors import InputError
from zsim.files import check_file, check_folder, make_folder, write_whole
from zsim.resources import EXAMPLE
from zsim.specs.experiment.setting import setting

if TYPE_CHECKING:
    from zsim.specs.experiment.tables import Experiment


ExperimentFile = Annotated[
    Path | None,
    typer.Argument(
        help="Experiment file, or a training file (DeepSpeed JSON, Accelerate YAML, torchtitan TOML). "
        "Without it the README's example. --model keeps all else, how it trains included, and says so.",
        show_default=False,
    ),
]
Model = Annotated[str | None, typer.Option(help="Model preset, or path to a Hugging Face config.json.")]
Cluster = Annotated[str | None, typer.Option(help="Cluster preset, or path to a topology TOML.")]
Nodes = Annotated[int | None, typer.Option(help="Number of nodes.")]
Gpus = Annotated[int | None, typer.Option(help="Number of GPUs.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key of the experiment and of the files it names: strategy.stage=2, cluster.nvme.drives=9.",
    ),
]


def experiment_from(
    path: Path | None,
    model: str | None,
    cluster: str | None,
    nodes: int | None,
    gpus: int | None,
    settings: list[str] | None,
) -> Experiment:
    """The experiment file with the command line's changes. A DeepSpeed JSON, an Accelerate YAML or a
    torchtitan TOML may stand in its place; model and cluster, where it names none, must then be given."""
    from zsim.specs.experiment.load import experiment_from as experiment_of
    from zsim.specs.experiment.load import load_experiment
    from zsim.specs.formats.detect import is_training_file, names_training_file

    overrides: dict[str, Any] = dict(setting(text) for text in settings or [])
    named = {"model": model, "cluster": cluster, "nodes": nodes, "gpus": gpus}
    for key, value in named.items():
        if value is None:
            continue
        if key in overrides and overrides[key] != value:
            raise InputError(f"--{key} {value} and --set {key}={overrides[key]} contradict each other")
        overrides[key] = value
    if path is not None and names_training_file(path):
        return experiment_of({}, _with_file(overrides, path), origin="command line")
    if path is None and is_training_file(overrides.get("strategy.config")):
        return experiment_of({}, overrides, origin="command line")
    origin = None if path is not None else "command line" if overrides else "example"
    return load_experiment(path or EXAMPLE, overrides, origin=origin)


def _with_file(overrides: dict[str, Any], path: Path) -> dict[str, Any]:
    """The overrides with the training file, all that it leaves open given."""
    from zsim.specs.formats.detect import is_training_file
    from zsim.specs.strategy.deepspeed.reader import require_deepspeed_file

    config = overrides.setdefault("strategy.config", str(path))
    if not is_training_file(config):
        require_deepspeed_file(config)
        for key in ("model", "cluster"):
            if key not in overrides:
                raise InputError(f"{path.name} names no {key}: give it (--{key})")
    return overrides


def file_option(*names: str, help: str, metavar: str | None = "FILE") -> Any:
    """An option that names a file to write, refused before the work where that cannot be."""

    def checked(path: Path | None) -> Path | None:
        if path is not None and not is_output(path):
            check_file(path)
        return path

    return typer.Option(*names, metavar=metavar, callback=checked, help=help)


def folder_option(*names: str, help: str) -> Any:
    """An option that names a folder to write to, refused before the work where that cannot be."""

    def checked(path: Path | None) -> Path | None:
        if path is not None:
            check_folder(path)
        return path

    return typer.Option(*names, metavar="DIR", callback=checked, help=help)


def is_output(path: Path | None) -> bool:
    """`--json -`: the JSON is printed, and nothing beside it."""
    return str(path) == "-"


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=1))


def write_json(content: Any, path: Path) -> Path:
    return write_whole(path, json.dumps(content, indent=1) + "\n")


def write_files(files: dict[str, str], folder: Path) -> list[Path]:
    """{path below `folder`: text}; folders are made."""
    for parent in {(folder / name).parent for name in files}:
        make_folder(parent)
    return [write_whole(folder / name, text) for name, text in files.items()]
