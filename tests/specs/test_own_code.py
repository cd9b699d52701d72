"""A model `package.module:function` in data is never imported: each door of data is tried with a module in
the working directory that leaves a mark when it is imported."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import zsim
from zsim.cli import app
from zsim.errors import InputError
from zsim.specs.experiment.load import build_experiment, change_experiment, experiment_of, load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.user_code import UserCode
from zsim.study.check.check import run_check
from zsim.study.sweep.points import study_points
from zsim.study.sweep.study_file import load_study
from zsim.ui.files import settings_of_file
from zsim.ui.form import make_form

NAME = "left_here:made"
FILE = f"""model = "{NAME}"
cluster = "dgx-h100"
gpus = 8
"""
GPT2: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 8}
REST = 'cluster = "dgx-h100"\ngpus = 8\n'


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that appears when the module is imported."""
    found = tmp_path / "imported"
    (tmp_path / "left_here.py").write_text(
        f"open({str(found)!r}, 'w').close()\nimport torch\n"
        "def made():\n    return torch.nn.Linear(8, 8), torch.zeros(2, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "left_here", raising=False)
    return found


def _file(text: str, name: str = "given.toml") -> Path:
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    return path


def _study(text: str) -> Any:
    (point, *_) = study_points(load_study(_file(text, "study.toml")))
    if point.experiment is None:
        raise InputError(point.error or "")
    return resolve(point.experiment)


def _form() -> Any:
    return make_form(Experiment.of_data(GPT2))


def _case() -> dict[str, Any]:
    path = next(Path(__file__).parents[2].glob("validation/**/oracle/**/*.json"), None)
    path = path or next(Path(__file__).parents[2].glob("traces/gloo/*/summary.json"))
    content = json.loads(path.read_text())
    content["experiment"] = {**(content.get("experiment") or {}), "model": NAME}
    return dict(content)


def _pickled() -> Experiment:
    """As a worker gets it, and with a name that nobody checked."""
    unchecked = Experiment.of_data(GPT2).model_copy(update={"model": NAME})
    found: Experiment = pickle.loads(pickle.dumps(unchecked))
    return found


DOORS: dict[str, Callable[[], Any]] = {
    "an experiment": lambda: load_experiment(_file(FILE)),
    "an experiment given as a path": lambda: experiment_of("given.toml" if _file(FILE) else None),
    "a dict": lambda: experiment_of({**GPT2, "model": NAME}),
    "changes of a dict": lambda: experiment_of(GPT2, {"model": NAME}),
    "a co-located job": lambda: load_experiment(_file(f"model = 'gpt2'\n{REST}[jobs.b]\nmodel = '{NAME}'\n")),
    "a dotted co-located job": lambda: load_experiment(
        _file(f"model = 'gpt2'\n{REST}"), {"jobs.b.model": NAME}
    ),
    "a table of a co-located job": lambda: load_experiment(
        _file(f"model = 'gpt2'\n{REST}"), {"jobs.b": {"model": NAME}}
    ),
    "a change of an experiment": lambda: change_experiment(Experiment.of_data(GPT2), {"model": NAME}),
    "a worker's experiment": lambda: resolve(_pickled()),
    "an error's other names": lambda: build_experiment(
        {**GPT2, "model": NAME, "nodez": 2, "cluster": "dgx"}, {}, origin="test"
    ),
    "a study's base": lambda: _study(f"[base]\nmodel = '{NAME}'\n{REST}[axes]\ngpus = [8, 16]\n"),
    "a study's axis": lambda: _study(f"[base]\nmodel = 'gpt2'\n{REST}[axes]\nmodel = ['{NAME}']\n"),
    "a study's zip": lambda: _study(f"[base]\nmodel = 'gpt2'\n{REST}[[zip]]\nmodel = ['{NAME}']\n"),
    "a study's rule": lambda: _study(
        f"[base]\nmodel = 'gpt2'\n{REST}[axes]\nnodes = [1]\n[[set]]\nmodel = '{NAME}'\n"
    ),
    "a study's expression": lambda: _study(
        f"[base]\nmodel = 'gpt2'\n{REST}[axes]\nnodes = [1]\n"
        f"[[set]]\nmodel = {{ value = \"'left_here' + ':made'\" }}\n"
    ),
    "a study's experiment": lambda: _study(
        f'experiment = "{_file(FILE)}"\n[axes]\ngpus = [8, 16]\n'
    ),
    "a training file's beside": lambda: build_experiment(
        {**GPT2, "model": NAME}, {"strategy.config": str(_file('{"zero_optimization": {}}', "d.json"))},
        origin="test",
    ),
    "an experiment to check": lambda: run_check([_file(FILE)], Path()),
    "a recorded case to check": lambda: run_check([_file(json.dumps(_case()), "case.json")], Path()),
    "another setting of the page": lambda: _form().experiment(_form().initial, f"model = {NAME}"),
    "a table of the page": lambda: _form().experiment(_form().initial, f"jobs.b = {{model = '{NAME}'}}"),
    "a field of the page": lambda: _form().experiment({**_form().initial, "model": NAME}),
    "an experiment given to the page": lambda: settings_of_file(_form(), _form().initial, FILE, "e.toml"),
}  # fmt: skip


@pytest.mark.parametrize("door", list(DOORS))
def test_no_door_of_data_imports_a_function(door: str, mark: Path) -> None:
    with pytest.raises(InputError):
        DOORS[door]()
    assert not mark.exists()


def test_the_refusal_says_what_where_why_and_the_way_out() -> None:
    with pytest.raises(InputError) as refused:
        load_experiment(_file(FILE))
    assert str(refused.value) == (
        "given.toml: model 'left_here:made': is a function, which would be imported and called, and no file, "
        "setting or address runs code; expected a preset or the path of a config.json. If the function is "
        "yours: --model left_here:made on the command line, --allow-code beside a file that you trust (not "
        "with zsim ui), or zsim.Experiment(model='left_here:made') in Python"
    )


COMMANDS = (
    "run", "trust", "memory", "tune", "scaling", "sensitivity", "needs", "goodput", "plan", "ui",
    "export --out x", "topology compare dgx-h100 --experiment", "check", "compare given.toml",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_reads_an_experiment_refuses_it_with_exit_code_2(command: str, mark: Path) -> None:
    _file(FILE)
    done = CliRunner().invoke(app, [*command.split(), "given.toml"])
    assert isinstance(done.exception, InputError)
    assert "model 'left_here:made': is a function" in str(done.exception)
    assert not mark.exists()


def test_set_does_not_run_it_either(mark: Path) -> None:
    done = CliRunner().invoke(app, ["run", "--set", f"model={NAME}"])
    assert str(done.exception).startswith("--set: model 'left_here:made': is a function")
    assert not mark.exists()


def test_another_model_on_the_command_line_leaves_it_alone(mark: Path) -> None:
    assert load_experiment(_file(FILE), {"model": "gpt2"}).model == "gpt2"
    assert not mark.exists()


class TestWithTorch:
    """What may run it: 8 x 8 weights and 8 biases are 72 parameters."""

    @pytest.fixture(autouse=True)
    def torch(self) -> None:
        pytest.importorskip("torch")

    @pytest.mark.parametrize("words", [["--model", NAME], ["given.toml", "--allow-code"],
                                       ["--set", f"model={NAME}", "--allow-code"]])  # fmt: skip
    def test_the_command_line_runs_it_where_its_user_says_so(self, words: list[str], mark: Path) -> None:
        _file(FILE)
        done = CliRunner().invoke(app, ["plan", *words])
        assert done.exit_code == 0, done.exception
        assert mark.exists()

    def test_python_runs_it(self) -> None:
        experiment = zsim.Experiment(**{**GPT2, "model": NAME})
        assert resolve(experiment).model.numel == 72

    def test_a_study_runs_it_with_the_permission_and_its_rows_name_it(self) -> None:
        text = f"[base]\nmodel = 'gpt2'\n{REST}[axes]\nmodel = ['{NAME}', 'gpt2']\n"
        own, preset = study_points(load_study(_file(text, "study.toml"), code=UserCode()))
        assert own.values["model"] == NAME
        assert own.experiment is not None
        assert resolve(own.experiment).model.numel == 72
        assert preset.experiment is not None

    def test_once_it_has_run_its_model_is_data_that_changes_keep(self) -> None:
        experiment = zsim.Experiment(**{**GPT2, "model": NAME})
        assert change_experiment(experiment, {"gpus": 16}).model is experiment.model
        assert experiment.model_dump()["model"] is experiment.model
        assert pickle.loads(pickle.dumps(experiment)).model.function == NAME

    def test_what_is_exported_names_the_function_and_is_read_with_the_permission(self) -> None:
        from zsim.specs.formats.toml import experiment_toml

        experiment = zsim.Experiment(**{**GPT2, "model": NAME})
        path = _file(experiment_toml(experiment), "again.toml")
        assert 'model = "left_here:made"' in path.read_text()
        with pytest.raises(InputError, match="is a function"):
            load_experiment(path)
        assert load_experiment(path, code=UserCode()).model == experiment.model

    def test_what_its_code_raises_is_one_sentence(self) -> None:
        Path("leaves.py").write_text("def made():\n    raise SystemExit(7)\n")
        with pytest.raises(InputError, match="model 'leaves:made': the function raised SystemExit: 7"):
            zsim.Experiment(**{**GPT2, "model": "leaves:made"})
