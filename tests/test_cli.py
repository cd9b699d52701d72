"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zsim.files import EXAMPLE

ZSIM = [sys.executable, "-c", "from zsim.cli import main; main()"]
SMALL = ["--model", "gpt2", "--gpus", "8", "--set", "training.sequence_length=512"]


def zsim(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    return subprocess.run(
        [*ZSIM, *arguments], capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


def refused(*arguments: str, cwd: Path | None = None) -> str:
    """The one paragraph on stderr of a command that must exit with 2."""
    done = zsim(*arguments, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("zsim: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_help_names_the_commands() -> None:
    done = zsim("--help")
    assert done.returncode == 0
    for command in ("run", "plan", "presets"):
        assert f"\n  {command} " in done.stdout


def test_a_run_on_the_terminal_imports_nothing_that_it_does_not_need() -> None:
    """What takes long to import, and what writes pages, JSON Schemas and Parquet."""
    code = (
        f"import sys; sys.argv = ['zsim', 'run', *{SMALL}]\n"
        "from zsim.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = ('numpy.ma', 'numpy.random', 'html', 'jinja2', 'plotly', 'pandas', 'networkx', 'joblib',\n"
        "    'zsim.specs.experiment.run.run')\n"
        "print('imported', [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported []"


def test_help_imports_neither_numpy_nor_pandas() -> None:
    """`zsim --help` stays quick because nothing heavy is imported for it."""
    code = (
        "import sys; sys.argv = ['zsim', '--help']\n"
        "from zsim.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('numpy', 'pandas', 'plotly', 'simpy', 'pydantic', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_commands_on_recorded_steps_import_neither_pages_nor_calibration() -> None:
    code = (
        "import sys, zsim.commands.recorded\n"
        "print([m for m in ('zsim.calibrate', 'zsim.report', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_prints_a_table_of_80_columns_and_exits_with_0() -> None:
    done = zsim("run", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "FITS" in done.stdout
    assert "Where the step goes" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_out_writes_report_trace_and_json(tmp_path: Path) -> None:
    done = zsim("run", *SMALL, "--out", str(tmp_path / "deep" / "out"))
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "deep" / "out").iterdir())
    assert names == ["report.html", "report.json", "trace.json.gz"]


def test_another_model_has_no_more_than_its_own_positions() -> None:
    """The example trains on 8192 tokens; GPT-2 has 1024 positions, and nobody asked for more."""
    done = zsim("run", "--model", "gpt2", "--gpus", "8", "--json", "-")
    assert json.loads(done.stdout)["experiment"]["training"]["sequence_length"] == 1024


def test_a_model_trains_by_the_same_defaults_with_a_file_and_without(tmp_path: Path) -> None:
    """What the example says of training stays with another model, as a file's does, and is said."""
    file = tmp_path / "job.toml"
    file.write_text(EXAMPLE.read_text())
    changes = ("--model", "gpt2", "--nodes", "1", "--set", "strategy.kind=fsdp2")
    named, filed = zsim("run", *changes).stdout, zsim("run", str(file), *changes).stdout
    assert filed.splitlines()[:8] == named.splitlines()[:8]
    assert named.splitlines()[1] == "bf16, full activation checkpointing"
    assert "'gpt2' in place of 'llama-3-70b'" in " ".join(named.split())


def test_a_training_file_is_not_simulated_for_a_model_or_cluster_that_nobody_named(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    given: list[str] = []
    for key, value in (("model", "gpt2"), ("cluster", "dgx-h100")):
        for command in ("run", "import", "tune"):
            said = refused(command, "ds.json", *given, cwd=tmp_path)
            assert said == f"zsim: ds.json names no {key}: give it (--{key})\n"
        given += [f"--{key}", value]


def test_json_to_standard_output_is_json_alone() -> None:
    done = zsim("run", *SMALL, "--json", "-")
    assert json.loads(done.stdout)["simulation"]["world_size"] == 8


def test_unfold_simulates_every_rank_with_the_same_result(tmp_path: Path) -> None:
    files = [tmp_path / "folded.json", tmp_path / "unfolded.json"]
    zsim("run", *SMALL, "--json", str(files[0]))
    zsim("run", *SMALL, "--unfold", "--json", str(files[1]))
    folded, unfolded = (json.loads(path.read_text()) for path in files)
    assert unfolded["simulation"]["rank_classes"] == 8
    assert unfolded["step_seconds"] == pytest.approx(folded["step_seconds"], rel=1e-9)


def test_a_job_that_does_not_fit_exits_with_1_and_says_why() -> None:
    done = zsim("run", "--model", "llama-3-70b", "--nodes", "1", "--set", "strategy.kind=ddp")
    assert done.returncode == 1
    assert "DOES NOT FIT" in done.stdout.upper()


def test_an_experiment_file_finds_its_neighbours(tmp_path: Path) -> None:
    """`config = "ds.json"` is next to the experiment, wherever the command runs."""
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 2}'
    )
    (tmp_path / "experiment.toml").write_text(
        'model = "gpt2"\ncluster = "dgx-h100"\ngpus = 4\n[strategy]\nkind = "deepspeed"\nconfig = "ds.json"\n'
    )
    done = zsim("run", str(tmp_path / "experiment.toml"), "--json", "-", cwd=Path("/"))
    report = json.loads(done.stdout)
    assert report["experiment"]["strategy"]["stage"] == 2
    assert report["experiment"]["training"]["micro_batch_size"] == 2


def test_a_plan_lists_ops_without_simulating(tmp_path: Path) -> None:
    done = zsim(
        "plan", *SMALL, "--set", "strategy.kind=fsdp2", "--limit", "5", "--json", str(tmp_path / "p.json")
    )
    assert done.returncode == 0, done.stderr
    assert "Ops in host issue order" in done.stdout
    plan = json.loads((tmp_path / "p.json").read_text())
    kinds = {op["kind"] for op in plan["ops"]}
    assert {"kernels", "all_gather", "reduce_scatter", "host"} <= kinds


def test_settings_win_over_the_file_and_drop_what_no_longer_belongs() -> None:
    """The example says `stage = 3`; changing the kind to fsdp2 drops it."""
    done = zsim("run", *SMALL, "--set", "strategy.kind=fsdp2", "--set", "strategy.replicate=2", "--json", "-")
    assert json.loads(done.stdout)["experiment"]["strategy"]["replicate"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.toml"], ["nowhere.toml"]),
        (["--model", "lama-3-70b"], ["lama-3-70b", "did you mean 'llama-3-70b'"]),
        (["--cluster", "dgx-h10"], ["dgx-h10", "did you mean"]),
        (["--nodes", "0"], ["nodes", "0"]),
        (["--gpus", "12"], ["12", "multiple of the 8 GPUs"]),
        (["--set", "trainin.precision=bf16"], ["trainin", "did you mean 'training'"]),
        (["--set", "foo=1"], ["unknown key 'foo'; expected one of model, cluster, nodes, gpus, placement,"]),
        (["--set", "strategy.foo=1"], ["unknown key 'foo'; expected one of ", "stage"]),
        (["--set", "training.precision=bf61"], ["bf61", "'bf16'"]),
        (["--set", "training.sequence_length=nan"], ["sequence_length", "nan"]),
        (["--set", "training.sequence_length=-1"], ["sequence_length", "-1"]),
        (["--set", "strategy.stage=5"], ["strategy", "stage", "5"]),
        (["--set", "strategy.kind=fsdp2", "--set", "strategy.replicate=3"], ["replicate", "3", "128"]),
        (["--set", "strategy"], ["KEY=VALUE"]),
        (["--set", "strategy.config=missing.json"], ["missing.json"]),
        (["--set", "cluster.gpu.memory.capacity=0"], ["memory.capacity: found 0, expected greater than 0"]),
        (["--nodes", "2", "--set", "nodes=3"], ["nodes", "2", "3"]),
        (["--model", "mixtral-8x77b"], ["mixtral-8x77b", "mixtral-8x7b"]),
        (["--cluster", "dgx-2", "--set", "training.precision=bf16"], ["bf16", "v100"]),
        (["--model", "gpt2", "--set", "training.sequence_length=4096"], ["4096", "1024 learned"]),
        (["--json", "/nonexistent/x.json", *SMALL], ["/nonexistent/x.json", "cannot be written"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_paragraph_and_exit_code_2(arguments: list[str], words: list[str]) -> None:
    message = refused("run", *arguments)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    "arguments", [["run"], ["import"], ["check", "--baseline"], ["sweep"], ["run", "--cluster"]], ids=" ".join
)
def test_a_folder_in_a_files_place_is_named(tmp_path: Path, arguments: list[str]) -> None:
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    assert refused(*arguments, str(folder)) == f"zsim: {folder}: is a folder, expected a file\n"


def test_a_json_that_is_no_deepspeed_config_is_said_to_be_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text('{"colour": 1}')
    message = refused("run", str(path))
    assert (
        "wrong.json: read as a DeepSpeed JSON, but none of its keys is DeepSpeed's: found 'colour'" in message
    )
    path.write_text('{"model_type": "llama", "hidden_size": 64}')
    assert "a model's config.json? --model takes it" in refused("run", str(path))
    path.write_text('{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16}')  # 'data_types' is near
    assert "PEFT's adapter_config.json? training.lora.config takes it" in refused("run", str(path))


def test_an_experiment_and_a_study_are_told_apart(tmp_path: Path) -> None:
    experiment, study = tmp_path / "experiment.toml", tmp_path / "study.toml"
    experiment.write_text('model = "gpt2"\ncluster = "dgx-h100"\n')
    study.write_text('experiment = "experiment.toml"\n[axes]\nnodes = [1]\n')
    assert "experiment.toml: is an experiment, not a study" in refused("sweep", str(experiment))
    assert "study.toml: is a study, not an experiment; zsim sweep runs it" in refused("run", str(study))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('model = "gpt2"\ncluster = ', "not a TOML file"),
        ("", "empty"),
        (
            'model = "gpt2"\ncluster = "dgx-h100"\n[training]\nsequence_lenght = 3\n',
            "did you mean 'sequence_length'",
        ),
        (
            'model = "gpt2"\ncluster = "dgx-h100"\n[strategy]\nkind = "fsdp2"\nstage = 3\n',
            "does not belong to kind",
        ),
    ],
)
def test_a_broken_experiment_file_is_named(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(content)
    message = refused("run", str(path))
    assert "experiment.toml" in message
    assert word in message, message


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"model_type": "llama", "hidden_', "JSON"),
        ('{"model_type": "resnet", "hidden_size": 64}', "resnet"),
        ('{"hidden_size": 64}', "model_type"),
        (
            '{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3, "num_hidden_layers": 2,'
            ' "intermediate_size": 64, "vocab_size": 10}',
            "100",
        ),
        (
            '{"model_type": "llama", "hidden_size": NaN, "num_attention_heads": 4, "num_hidden_layers": 2,'
            ' "intermediate_size": 64, "vocab_size": 10}',
            "hidden_size",
        ),
    ],
)
def test_a_broken_model_file_is_named(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    message = refused("run", "--model", str(path))
    assert "config.json" in message
    assert word in message, message


def test_a_wrong_unit_in_a_cluster_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'extends = "dgx-h100"\nname = "mine"\n[nic]\nsource = "somebody told me"\nevidence = "assumed"\n'
        "bandwidth = 400\n"
    )
    message = refused("run", "--cluster", str(path))
    assert "cluster.toml" in message
    assert "nic.bandwidth" in message
    assert "no unit" in message


@pytest.mark.parametrize(
    "table",
    ["strategy", "strategy.kind=megatron strategy", "strategy.kind=deepspeed strategy", "training", "cluster",
     "parallelism", "run.failures", "run.checkpoint", "cluster.network", "cluster.gpu.gemm",
     "strategy.config.zero_optimization"],
)  # fmt: skip
def test_a_key_that_is_near_to_nothing_is_answered_in_a_few_lines(table: str) -> None:
    """The list of Megatron's keys has more than 1,000 characters."""
    *before, table = table.split()
    sets = [word for setting in (*before, f"{table}.qqqqq=1") for word in ("--set", setting)]
    said = refused("run", *SMALL, *sets)
    assert "qqqqq" in said
    assert len(said) < 500


def test_groups_of_no_ranks_are_a_usage_error() -> None:
    """0 was taken for "left out"."""
    done = zsim("topology", "bench", "dgx-h100", "--group", "0")
    assert done.returncode == 2
    assert "--group" in done.stderr


def test_a_typo_in_an_option_is_a_usage_error() -> None:
    done = zsim("run", "--nodez", "2")
    assert done.returncode == 2
    assert "--nodes" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["run", *SMALL, "--out"],
        ["export", *SMALL, "--out"],
        ["replay", "absent.json", "--out"],
        ["tune", *SMALL, "--out"],
        ["sweep", "absent.toml", "--out"],
        ["scaling", *SMALL[:2], "--out"],
    ],
    ids=lambda words: words[0],
)
def test_a_file_where_a_folder_goes_is_refused_alike_before_the_work(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file.txt").write_text("kept")
    error = refused(*words, "file.txt", cwd=tmp_path)
    assert "file.txt: cannot be made: file.txt is a file, expected a folder" in error
    assert (tmp_path / "file.txt").read_text() == "kept"


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "absent.json", "absent.json", "--json"],
        ["compare", "absent.json", "absent.json", "--out"],
        ["replay", "absent.json", "--json"],
        ["tune", *SMALL, "--json"],
        ["calibrate", "absent.json", "--base", "dgx-h100", "--page"],
        ["check", "absent.toml", "--junit"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(words: list[str], tmp_path: Path) -> None:
    assert "no/r.x: cannot be written: there is no folder" in refused(*words, "no/r.x", cwd=tmp_path)


def test_the_json_may_be_written_to_standard_output_by_its_name() -> None:
    done = zsim("plan", *SMALL, "--limit", "1", "--json", "/dev/stdout")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout[: done.stdout.rindex("\n}") + 2])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize(
    "words",
    [["run", *SMALL], ["plan", *SMALL, "--json", "-"], ["run", "--help"], ["presets"]],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_standard_output_that_takes_nothing_is_one_paragraph(
    words: list[str], *, is_buffered: bool
) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*ZSIM, *words], stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert done.stderr == "zsim: standard output: cannot be written: No space left on device\n"
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["run", "NAME"], "NAME: cannot be read: File name too long"),
        (["run", "NAME.toml"], "NAME.toml: cannot be read: File name too long"),
        (["run", "--model", "NAME"], "unknown model 'NAME'; expected a preset"),
        (["run", "--model", "NAME.json"], "NAME.json: cannot be read: File name too long"),
        (["run", "--cluster", "NAME"], "unknown cluster 'NAME'; expected a preset"),
        (["run", "--set", "cluster.gpu=NAME"], "unknown GPU 'NAME'; expected a preset"),
        (["run", "--set", "strategy.config=NAME"], "NAME: cannot be read: File name too long"),
        (["import", "NAME.toml"], "NAME.toml: no such file; expected a training file"),
        (["replay", "NAME"], "NAME: no such file or folder"),
        (["calibrate", "NAME", "--base", "dgx-h100"], "NAME: cannot be read: File name too long"),
        (["check", "NAME"], "NAME: no such file"),
        (["run", *SMALL, "--json", "NAME"], "NAME: cannot be written: File name too long"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_name_longer_than_a_file_may_have_is_refused_like_another(words: list[str], reason: str) -> None:
    """255 characters is what most file systems take."""
    name = "n" * 300
    error = refused(*(word.replace("NAME", name) for word in words))
    assert reason.replace("NAME", name) in error


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("9" * 5000, "--set training.seed: has a number of more than 4,000 digits"),
        ("[" * 50_000, "--set training.seed: is nested more than 64 levels deep; expected a few"),
    ],
)
def test_a_hostile_setting_is_one_short_paragraph(value: str, reason: str) -> None:
    assert refused("plan", "--set", f"training.seed={value}") == f"zsim: {reason}\n"


def test_what_a_reason_quotes_is_cut_and_moves_no_cursor() -> None:
    said = refused("plan", "--set", "\x1b[2J" + "a" * 50_000)
    assert len(said) < 3100
    assert "\x1b" not in said
    assert said.endswith("expected KEY=VALUE, e.g. --set training.micro_batch_size=2\n")


def test_three_gigabytes_of_blanks_in_a_trace_are_refused(tmp_path: Path) -> None:
    """Three megabytes on disk."""
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [') + gzip.compress(b" " * 2**20) * 3072)
    assert "unpacks to more than 200 times its size" in refused("replay", str(path))
