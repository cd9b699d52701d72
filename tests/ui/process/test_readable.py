"""The page's process opens no file of the disk that a setting names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ui.test_form import made
from zsim.errors import NotSimulatedError
from zsim.plan.make import make_plan
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.ui import answer as module
from zsim.ui.answer import answer, check_size
from zsim.ui.app import make_app
from zsim.ui.files import file_content
from zsim.ui.form import make_form
from zsim.ui.process.backend import named_files

# Asks the backend of an experiment for settings, and prints what is said of each. In a process of its own,
# which opens nothing else afterwards.
ASK = """
import json, sys
from pathlib import Path
given = json.loads(sys.argv[1])
from zsim.specs.experiment.tables import Experiment
from zsim.ui.process.backend import Backend
from zsim.ui.form import make_form
from zsim.ui.words import run_safely
form = make_form(Experiment.of_data(given["experiment"]))
backend = Backend(form, Path(given["folder"]))
opened = []  # by who comes behind the backend's own hook: what that did not refuse
sys.addaudithook(lambda event, found: opened.append(str(found[0])) if event == "open" else None)
for setting in given["settings"]:
    opened.clear()
    print(json.dumps(run_safely(lambda: backend.take(form.initial, "", setting["text"], "given.toml")
                          if "text" in setting else bool(backend.outcome(form.initial, setting["more"])))
                     + (any("secret" in path for path in opened),)))
"""
SECRET = "root:secret:0:0\n1,2\nsecret = 5\n"


def asked(folder: Path, settings: list[dict[str, str]], **experiment: Any) -> list[Any]:
    """What a backend says to each setting: is there an answer, the error, whether it read a secret."""
    (folder / "page").mkdir(exist_ok=True)
    given = {
        "experiment": made(**experiment).model_dump(mode="json", exclude_unset=True),
        "folder": str(folder / "page"), "settings": settings,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(given)], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def lines(path: Path) -> list[str]:
    """Settings that name a file, wherever an experiment can."""
    return [
        f"model = '{path}'",
        f"cluster = '{path}'",
        f"cluster = {{ extends = '{path}' }}",
        f"cluster.gpu = '{path}'",
        f"strategy.config = '{path}'",
        f"training.lengths = {{ file = '{path}' }}",
        f"training.lora = {{ config = '{path}' }}",
        f"jobs.b = {{ model = '{path}' }}",
        f"strategy.config = '{path} --training.seq_len=8'",
    ]


@pytest.mark.parametrize("suffix", ["", ".json", ".toml", ".yaml", ".csv", ".sh"])
def test_no_setting_reads_or_quotes_a_file_of_the_disk(tmp_path: Path, suffix: str) -> None:
    """The same with the file given as an experiment's: neither is there an answer, nor a word of the file."""
    path = tmp_path / f"secret{suffix}"
    path.write_text(SECRET)
    rest = "cluster = 'dgx-h100'\ngpus = 8\n"
    texts = [f"model = '{path}'\n{rest}", f"model = 'gpt2'\n{rest}strategy = {{config = '{path}'}}\n"]
    settings = [*({"more": line} for line in lines(path)), *({"text": text} for text in texts)]
    found = asked(tmp_path, settings)
    assert len(found) == len(settings)
    for (is_answered, error, is_read), setting in zip(found, settings, strict=True):
        assert not is_answered, setting
        assert not is_read, setting
        assert error, setting
        assert "root:" not in error
        assert "zsim made a mistake" not in error


def test_what_the_pages_own_experiment_names_is_read(tmp_path: Path) -> None:
    """A length of 64 tokens, in a file that the experiment names and one that it does not."""
    named, other = tmp_path / "lengths.csv", tmp_path / "other.csv"
    for path in (named, other):
        path.write_text("64,1\n")
    training = {"sequence_length": 512, "lengths": {"file": str(named)}}
    own, foreign = asked(
        tmp_path,
        [{"more": "training.expandable_segments = true"}, {"more": f"training.lengths.file = '{other}'"}],
        training=training,
    )
    assert own == [True, "", False]
    assert "zsim ui opens no file that a setting or an uploaded file names" in foreign[1]


def test_files_are_found_wherever_an_experiment_names_them(tmp_path: Path) -> None:
    for name in ("a.json", "folder/config.json", "c.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    data = {"model": str(tmp_path / "folder"), "training": {"lengths": {"file": str(tmp_path / "c.csv")}},
            "strategy": {"config": [str(tmp_path / "a.json"), "--flag"]}, "nodes": 2}  # fmt: skip
    found = {Path(one).relative_to(tmp_path).as_posix() for one in named_files(data)}
    assert found == {"a.json", "folder/config.json", "c.csv"}


# -- How large a step the page simulates -------------------------------------------------------------------


STEPS = "training.gradient_accumulation_steps"


def test_a_step_of_too_many_ops_is_refused_with_the_bound_and_the_way_out() -> None:
    with pytest.raises(NotSimulatedError) as refused:
        check_size(resolve(change_experiment(made(), {STEPS: 2_000})))
    said = str(refused.value)
    assert said.startswith("training.gradient_accumulation_steps: 2,000 micro-batches are about 1,")
    assert "up to 1,000,000. With simulation.every_micro_batch = false" in said
    check_size(resolve(change_experiment(made(), {STEPS: 2_000, "simulation.every_micro_batch": False})))
    check_size(resolve(change_experiment(made(), {STEPS: 100})))


def test_a_step_whose_micro_batches_repeat_is_answered_from_few_of_them() -> None:
    """Whatever their number: six and seven are simulated. Their difference is what each further one adds."""
    few, many = (answer(change_experiment(made(), {STEPS: count})) for count in (7, 2_000))
    assert few.step is not None
    assert many.step is not None
    assert many.step.outcome_micro_batches == 6
    assert "whole_outcome" not in vars(many.step)
    seven, six = few.outcome.step_seconds, many.step.outcome.trace.step_seconds
    assert many.outcome.step_seconds == pytest.approx(six + 1_994 * (seven - six))
    assert "timelines and film show 6 of 2,000 micro-batches, of which the others repeat one" in many.notes
    assert not [note for note in few.notes if "film" in note]


def test_a_step_whose_micro_batches_differ_is_refused_where_they_are_too_many() -> None:
    """Under jitter each is simulated; a file with a span of each is refused as well."""
    unlike = change_experiment(made(), {STEPS: 2_000, "jitter": {"seed": 1, "steps": 1}})
    with pytest.raises(NotSimulatedError, match="2,000 micro-batches are about 1,"):
        answer(unlike)
    with pytest.raises(NotSimulatedError, match="2,000 micro-batches are about 1,"):
        file_content(change_experiment(made(), {STEPS: 2_000}), "trace.json.gz")


def test_the_report_of_a_loop_is_of_the_micro_batches_that_were_simulated() -> None:
    report = file_content(change_experiment(made(), {STEPS: 2_000}), "report.html").decode()
    assert "timelines and film show 6 of 2,000 micro-batches" in report


def test_a_click_on_a_file_that_is_too_large_says_so(tmp_path: Path) -> None:
    """The trace of 2,000 micro-batches is refused, and the page shows the message."""
    app, form = make_app(made(), tmp_path), make_form(made())
    request = {"shown": {**form.initial, STEPS: 2_000}, "more": ""}
    key = '{"name":"trace.json.gz","type":"file"}'
    answer = app.server.test_client().post(
        "/_dash-update-component",
        json={
            "output": "..download.data...file-words.children..",
            "outputs": [{"id": "download", "property": "data"}, {"id": "file-words", "property": "children"}],
            "inputs": [[{"id": json.loads(key), "property": "n_clicks", "value": 1}]],
            "changedPropIds": [f"{key}.n_clicks"],
            "state": [{"id": "asked", "property": "data", "value": request}],
        },
    )
    assert "micro-batches are about" in answer.get_json()["response"]["file-words"]["children"]


def test_ops_are_counted_from_plans_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of 40 micro-batches is that of their plan: a bound at it passes, one below does not."""
    job = resolve(change_experiment(made(), {STEPS: 40}))
    ops = sum(len(program.ops) for program in make_plan(job).programs)
    monkeypatch.setattr(module, "MAX_OPS", ops)
    check_size(job)
    monkeypatch.setattr(module, "MAX_OPS", ops - 1)
    with pytest.raises(NotSimulatedError, match=f"{ops:,} ops"):
        check_size(job)
