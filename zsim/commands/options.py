"""Options shared by several commands: an experiment with changes, JSON output, and completions in a shell."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_type_hints

import typer

from zsim.errors import InputError
from zsim.files import check_file, check_folder, write_atomically

if TYPE_CHECKING:
    from zsim.specs.experiment.tables import Experiment
    from zsim.specs.model.spec import ModelSpec
    from zsim.specs.user_code import UserCode


def complete_models(incomplete: str) -> list[str]:
    """Model presets."""
    from zsim.specs.presets import model_preset_names

    return _filter_prefix(model_preset_names(), incomplete)


def complete_presets(incomplete: str) -> list[str]:
    """Models and clusters."""
    return [*complete_models(incomplete), *complete_clusters(incomplete)]


def complete_clusters(incomplete: str) -> list[str]:
    """Cluster presets."""
    from zsim.specs.presets import topology_preset_names

    return _filter_prefix(topology_preset_names(), incomplete)


def complete_keys(incomplete: str) -> list[str]:
    """Keys of every file."""
    from zsim.reference import FILES, keys_of

    return _filter_prefix(dict.fromkeys(key.path for file in FILES for key in keys_of(file)), incomplete)


def complete_key_values(incomplete: str) -> list[str]:
    """KEY=VALUE of `--set`: the keys of an experiment and, below `cluster.`, of its topology.

    After the "=" of a key its allowed values are completed.
    """
    from zsim.reference import keys_of

    keys_by_path = {key.path: key for key in keys_of("experiment")}
    keys_by_path |= {f"cluster.{key.path}": key for key in keys_of("topology")}
    name, equals, _ = incomplete.partition("=")
    if not equals:
        return _filter_prefix((f"{path}=" for path in keys_by_path), incomplete)
    key = keys_by_path.get(name)
    values: tuple[str, ...] = ()
    if key is not None and key.type in ("one of", "true or false"):
        values = key.allowed or ("true", "false")
    value_words = (value.strip('"') for value in values)
    return _filter_prefix((f"{name}={word}" for word in value_words), incomplete)


def _filter_prefix(names: Iterable[str], start: str) -> list[str]:
    return [name for name in names if name.startswith(start)]


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key of the experiment and of the files it names: strategy.stage=2, cluster.nvme.drives=9.",
        autocompletion=complete_key_values,
    ),
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Import and call functions that files name as models (package.module:function). Only for files "
        "that you trust.",
    ),
]
Tokens = Annotated[
    str | None, typer.Option(help="Tokens to train on (15T), for days and money: cost.tokens.")
]
Samples = Annotated[str | None, typer.Option(help="Rows of the data set, instead: cost.samples.")]
Epochs = Annotated[float | None, typer.Option(help="How often they are trained on: cost.epochs.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Processes; as many as cores without it.")
]


_MOST_SERVERS = 3  # that a note on a GPU names


@dataclass(frozen=True)
class ExperimentOptions:
    """An experiment file and changes to it: the options of every command that takes an experiment."""

    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="Experiment file, or another program's training file (zsim import --help lists them). "
            "Without it the README's example, of which --model changes the model alone, as a note says.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Model preset, Hub id, path to a Hugging Face config.json, or package.module:function: a "
            "function of yours that returns (torch module, inputs), which is imported and called.",
            autocompletion=complete_models,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(help="Cluster preset, or path to a topology TOML.", autocompletion=complete_clusters),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU (h100, a100-80gb, 4090): the server that it is usual in, as the cluster."),
    ] = None
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.")] = None
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs.")] = None
    set_: Set = None
    allow_code: AllowCode = False

    def add_settings(self, values: Mapping[str, Any]) -> ExperimentOptions:
        """The options with settings that other options stand for.

        Raises InputError for a setting that `--set` gives too.
        """
        contradicted = values.keys() & settings(self.set_).keys()
        if contradicted:
            key = min(contradicted)
            raise InputError(
                f"--set {key} and --{key.rpartition('.')[2]} are one setting; expected one of them"
            )
        texts = [f"{key}={value}" for key, value in values.items()]
        return replace(self, set_=[*(self.set_ or ()), *texts])

    def add_length(
        self, tokens: str | None, samples: str | None, epochs: float | None
    ) -> tuple[ExperimentOptions, Collection[str]]:
        """(the options with the length of a run that other options give, the keys that this sets).

        Raises InputError as `add_settings`.
        """
        values = {"cost.tokens": tokens, "cost.samples": samples, "cost.epochs": epochs}
        values = {key: value for key, value in values.items() if value is not None}
        return self.add_settings(values), values.keys()

    def load(self) -> Experiment:
        """The experiment file with the command line's changes.

        It may also be another program's training file. A model and cluster that such a file does not name
        must then be on the command line.
        """
        from zsim.specs.experiment.load import experiment_of
        from zsim.specs.presets import is_topology, near_topologies, server_of_gpu

        overrides = settings(self.set_)
        if self.gpu is not None and self.cluster is not None:
            raise InputError(
                f"--gpu {self.gpu} and --cluster {self.cluster} both name a cluster; expected one"
            )
        machine = self.cluster if self.gpu is None else self.gpu
        server = None if machine is None else server_of_gpu(machine)
        if self.gpu is not None and server is None and not is_topology(self.gpu):
            near = near_topologies(self.gpu)[:_MOST_SERVERS]
            raise InputError(
                f"--gpu {self.gpu}: names no single machine; expected --cluster with "
                + (f"one that is near: {', '.join(near)}" if near else "a preset (`zsim presets`)")
            )
        flags = {"model": self.model, "cluster": machine, "nodes": self.nodes, "gpus": self.gpus}
        for key, value in flags.items():
            if value is None:
                continue
            if key in overrides and overrides[key] != value:
                raise InputError(f"--{key} {value} and --set {key}={overrides[key]} contradict each other")
            overrides[key] = value
        if self.model is not None:
            overrides["model"] = named_model(self.model)
        experiment = experiment_of(
            self.experiment, overrides, origin="command line", code=permission(self.allow_code)
        )
        if machine is None or server is None:
            return experiment
        others = [name for name in near_topologies(machine) if name != server][:_MOST_SERVERS]
        option = "--cluster" if self.gpu is None else "--gpu"
        note = f"{option} {machine} is --cluster {server}"
        note += f"; also in {', '.join(others)}" if others else ""
        return experiment.model_copy(update={"cluster": server, "notes": (*experiment.notes, note)})


def named_model(text: str) -> str | ModelSpec:
    """The model that `--model` names. A function is run. See [Note: who may run code]."""
    from zsim.specs.user_code import UserCode

    return UserCode().resolve(text)


def permission(is_given: bool | None) -> UserCode | None:
    """The permission that `--allow-code` gives."""
    from zsim.specs.user_code import UserCode

    return UserCode() if is_given else None


Command = Callable[..., None]


@functools.cache
def _option_types() -> Mapping[str, Any]:
    return get_type_hints(ExperimentOptions, include_extras=True)


def takes_experiment(*, without: Collection[str] = (), help: str = "") -> Callable[[Command], Command]:
    """A decorator that replaces the command's parameter of type ExperimentOptions by the options of that
    class, except for those in `without`. `help` is the command's help, where that is not its docstring.
    """
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False if name == "allow_code" else None,
            annotation=hint,
        )
        for name, hint in _option_types().items()
        if name not in without
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        bundle = ""
        for name, parameter in signature.parameters.items():
            if parameter.annotation is ExperimentOptions:
                bundle = name
                parameters += options
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            experiment_options = ExperimentOptions(
                **{option.name: values.pop(option.name) for option in options}
            )
            command(**{bundle: experiment_options}, **values)

        command_signature = signature.replace(parameters=parameters)
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        wrapper.__doc__ = help or command.__doc__
        wrapper.__signature__ = command_signature  # type: ignore[attr-defined]
        return wrapper

    return decorate


def settings(texts: Iterable[str] | None) -> dict[str, Any]:
    """The values of `--set`, by dotted key."""
    from zsim.specs.experiment.load import parse_setting

    return dict(parse_setting(text) for text in texts or ())


def json_option(content: str) -> Any:
    """The option `--json FILE`, which writes `content`. Its value is passed to `answer`."""
    return file_option("--json", help=f"Write {content} as JSON ('-': standard output).")


def file_option(*names: str, help: str, metavar: str | None = "FILE") -> Any:
    """An option for a file to write. An unwritable path is refused before the work starts."""

    def check_path(path: Path | None) -> Path | None:
        if path is not None and not is_output(path):
            check_file(path)
        return path

    return typer.Option(*names, metavar=metavar, callback=check_path, help=help)


def folder_option(*names: str, help: str) -> Any:
    """An option for a folder to write to. An unwritable path is refused before the work starts."""

    def check_path(path: Path | None) -> Path | None:
        if path is not None:
            check_folder(path)
        return path

    return typer.Option(*names, metavar="DIR", callback=check_path, help=help)


def is_output(path: Path | None) -> bool:
    """Whether the path is `-`: the JSON goes to stdout, and nothing else is printed."""
    return str(path) == "-"


def answer(lines: Iterable[str], content: Callable[[], Any], json_: Path | None) -> None:
    """Print the lines, and write the content to the file of `--json`. For `-`, print only the content."""
    if is_output(json_):
        print(format_json(content()), end="")
        return
    for line in lines:
        print(line)
    if json_ is not None:
        print_file("json", write_json(content(), json_))


def print_file(kind: str, path: Path | str) -> None:
    """Print which file was written."""
    print(f"{kind:<7} {path}")


def print_note(note: str, file: TextIO | None = None) -> None:
    """Print a note as a paragraph of at most 80 columns. Addresses and paths are not broken."""
    from zsim.report.views.text.plain import paragraph

    for line in paragraph(note, first="note: ", indent=2):
        print(line, file=file)


def format_json(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"


def write_json(content: Any, path: Path) -> Path:
    return write_atomically(path, format_json(content))
