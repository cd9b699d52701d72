"""One experiment: `zsim run`, `trust`, `plan`, `memory`, `goodput`, and the local page of `zsim ui`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zsim.commands.options import (
    Epochs,
    ExperimentOptions,
    Jobs,
    Samples,
    Tokens,
    answer,
    folder_option,
    format_json,
    is_output,
    json_option,
    print_file,
    print_note,
    settings,
    takes_experiment,
    write_json,
)
from zsim.errors import InputError
from zsim.files import make_folder

if TYPE_CHECKING:
    from zsim.api import Result
    from zsim.specs.experiment.job import Job
    from zsim.specs.experiment.tables import Experiment
    from zsim.study.memory import Variant
    from zsim.workflows.rl.result import RlResult


Detail = Literal["brief", "screen", "full"]


@takes_experiment()
def run(
    options: ExperimentOptions,
    unfold: Annotated[bool, typer.Option(help="Simulate every rank instead of one per class.")] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Three lines: fits, step, and what all takes.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="All of it: collectives, traffic, other memory, evidence, notes.")
    ] = False,
    tokens: Tokens = None,
    samples: Samples = None,
    epochs: Epochs = None,
    json_: Annotated[Path | None, json_option("the report")] = None,
    out: Annotated[
        Path | None, folder_option(help="Write report.html, report.json and trace.json.gz there.")
    ] = None,
) -> None:
    """Simulate one training step: memory, time and the reason for both."""
    if brief and full:
        raise InputError("--brief and --full contradict each other")
    options, length = options.add_length(tokens, samples, epochs)
    detail: Detail = "brief" if brief else "full" if full else "screen"
    if code := _run(options, unfold, detail, json_, out, length):
        raise typer.Exit(code)


@takes_experiment()
def trust(
    options: ExperimentOptions,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS", help="A step that you measured (5.1 s, 870 ms), of this job or with --at."
        ),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="What was different when it was measured: nodes=2; again for more."
        ),
    ] = None,
    json_: Annotated[Path | None, json_option("all of it")] = None,
) -> None:
    """Should I believe this? The validated runs nearest to a job with zsim's errors on them, why the step's
    interval is as wide as it is, what the step rests on, and what to measure to know it better.
    """
    from zsim.report.trust import trust_of
    from zsim.study.anchoring import anchor_step
    from zsim.study.search import simulate

    if at and measured is None:
        raise InputError(f"--at {at[0]}: expected --measured SECONDS beside it, the step measured there")
    seconds = None if measured is None else _seconds(measured)
    experiment = options.load()
    result = simulate(experiment)
    trust_report = trust_of(result.report)
    content, lines = trust_report.to_dict(), list(trust_report.lines())
    if seconds is not None:
        anchored_step = anchor_step(result, experiment, settings(at), seconds)
        content["anchored"] = anchored_step.to_dict()
        lines += ["", "From your measured step", *anchored_step.lines()]
    answer(lines, lambda: content, json_)


def _seconds(text: str) -> float:
    """Seconds of "5.1 s", "870 ms" or "5.1"."""
    from zsim.units import DURATION, SECONDS, parse_quantity

    is_bare = text.replace(".", "", 1).strip().isdigit()
    try:
        return parse_quantity(f"{text} s" if is_bare else text, {**DURATION, **SECONDS})
    except ValueError as error:
        raise InputError(f"--measured: {error}") from None


def _run(
    options: ExperimentOptions,
    unfold: bool,
    detail: Detail,
    json_: Path | None,
    out: Path | None,
    lengths: Collection[str] = (),
) -> int:
    """Simulate, write and print. Returns the exit code.

    `lengths` are the keys of the run's length that options gave.
    """
    from zsim.report.views.text.report import brief_lines, print_report
    from zsim.study.search import simulate

    experiment = options.load()
    if experiment.rl is not None:
        _refuse_for_rl(
            {
                "--full": detail == "full",
                "--unfold": unfold,
                **{f"--{key}": f"cost.{key}" in lengths for key in ("tokens", "samples", "epochs")},
            }
        )
        return _run_rl(experiment, json_, out, is_brief=detail == "brief")
    result = simulate(experiment, unfold=unfold, on_job=_warn_of_size)
    files: dict[str, Path] = {}
    problem: InputError | None = None
    if out is not None:
        try:
            files |= _write_all(result, out)
        except InputError as error:  # a trace too large to make, of a step that was simulated without
            problem = error
    if is_output(json_):
        print(format_json(result.report.to_dict()), end="")
    else:
        if json_ is not None:
            files["json"] = write_json(result.report.to_dict(), json_)
        if detail == "brief":
            for line in brief_lines(result.report):
                print(line)
            for kind, path in files.items():
                print_file(kind, path)
        else:
            print_report(result.report, files=files, is_full=detail == "full")
    if problem is not None:
        raise problem
    return result.report.verdict.exit_code


def _refuse_for_rl(is_given: Mapping[str, bool]) -> None:
    """Raises InputError for an option that does nothing for a step of reinforcement learning."""
    for name, is_option in is_given.items():
        if is_option:
            raise InputError(
                f"{name}: does nothing for an experiment with [rl], whose answer is one step; expected "
                f"the command without {name} (--json has all that there is)"
            )


def _run_rl(experiment: Experiment, json_: Path | None, out: Path | None, *, is_brief: bool) -> int:
    """Simulate a step of reinforcement learning, write and print it. Returns the exit code."""
    from zsim.workflows.rl.result import simulate_rl

    result = simulate_rl(experiment)
    files = {} if out is None else _write_rl(result, out)
    answer(result.brief_lines() if is_brief else result.lines(), result.to_dict, json_)
    if not is_output(json_):
        for kind, path in files.items():
            print_file(kind, path)
    return result.verdict.exit_code


def _write_rl(result: RlResult, folder: Path) -> dict[str, Path]:
    """The files of a step of reinforcement learning that were written, by kind."""
    from zsim.files import write_atomically
    from zsim.trace.chrome import write_document
    from zsim.workflows.rl.page import step_page, step_trace

    make_folder(folder)
    return {
        "report": write_atomically(folder / "report.html", step_page(result)),
        "trace": write_document(step_trace(result), folder / "trace.json.gz"),
        "json": write_json(result.to_dict(), folder / "report.json"),
    }


def _warn_of_size(job: Job) -> None:
    """Say on stderr, before it is simulated, that a step is large."""
    from zsim.specs.experiment.training.resolve import size_warning

    warning = size_warning(
        job.model,
        job.training,
        job.parallelism,
        every_micro_batch=job.simulation.every_micro_batch,
        may_repeat=job.may_repeat_micro_batches,
    )
    if warning is not None:
        print_note(warning, file=sys.stderr)


def _write_all(result: Result, folder: Path) -> dict[str, Path]:
    """The files that were written, by kind."""
    from zsim.report.views.html.report import write_html_report
    from zsim.trace.chrome import RankMarks, write_chrome_trace, write_rank_traces

    make_folder(folder)
    write_html_report(result.report, result.trace, folder / "report.html")
    write_chrome_trace(result.trace, folder / "trace.json.gz")
    write_json(result.report.to_dict(), folder / "report.json")
    files = {
        "report": folder / "report.html",
        "trace": folder / "trace.json.gz",
        "json": folder / "report.json",
    }
    section = result.report.pipeline
    if section is not None:
        ranks = [RankMarks(row.first_rank, row.marks(section.num_chunks)) for row in section.rows]
        files["ranks"] = write_rank_traces(result.trace, ranks, folder / "pipeline.json.gz")
    return files


@takes_experiment()
def plan(
    options: ExperimentOptions,
    json_: Annotated[Path | None, json_option("the plan")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many ops to list (0: all).")] = 60,
    rank: Annotated[
        int | None, typer.Option(help="Only this rank's program (pipeline ranks differ).")
    ] = None,
) -> None:
    """Print the work of a rank: ops, bytes, streams. Nothing is simulated."""
    from zsim.api import make_plan
    from zsim.report.views.text.plan import plan_to_dict, print_plan

    rank_plan = make_plan(options.load())
    if is_output(json_):
        print(format_json(plan_to_dict(rank_plan, rank)), end="")
        return
    files = {"json": write_json(plan_to_dict(rank_plan, rank), json_)} if json_ is not None else {}
    print_plan(rank_plan, limit=limit, rank=rank, files=files)


@takes_experiment()
def memory(
    options: ExperimentOptions,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="Side by side: strategy.replicate=1,2,4, or a TOML list."),
    ] = None,
    by: Annotated[
        str, typer.Option(help="With --vary: category, phase, or time, for which each is simulated.")
    ] = "category",
    limit: Annotated[int, typer.Option(min=0, help="How many rows of each table (0: all).")] = 12,
    json_: Annotated[Path | None, json_option("every owner")] = None,
) -> None:
    """Who holds a GPU's memory, and when: by phase, module and FSDP unit. No simulation where it fits."""
    from zsim.study.memory import MemoryVariants, variant_words, variants_heading
    from zsim.study.memory import memory as find_memory

    experiment, axes, is_quiet = options.load(), _axes(vary or []), is_output(json_)
    is_begun = False

    def show(variant: Variant) -> None:
        nonlocal is_begun
        if not is_begun and not is_quiet:
            print(variants_heading(axes, by))
        is_begun = True
        if not is_quiet:
            print(variant_words(variant, by))

    result = find_memory(experiment, vary=axes, by=by, on_variant=show)
    if isinstance(result, MemoryVariants):
        lines, code = result.legend(), 0
    else:
        lines, code = result.lines(limit), result.verdict.exit_code
    answer([*lines, *([""] if json_ is not None else [])], result.to_dict, json_)
    if code:
        raise typer.Exit(code)


def _axes(words: list[str]) -> dict[str, list[Any]]:
    """The values of each varied key."""
    axes: dict[str, list[Any]] = {}
    for word in words:
        if not word.partition("=")[2].strip():
            raise InputError(f"--vary {word}: expected KEY=VALUES, e.g. --vary strategy.replicate=1,2,4")
        key, values = _axis(word)
        if not values:
            raise InputError(f"--vary {word}: expected at least one value")
        if key in axes:
            raise InputError(f"--vary {word}: {key} is there twice; expected all of its values in one")
        axes[key] = values
    return axes


def _axis(text: str) -> tuple[str, list[Any]]:
    """A dotted key and its values, from `nodes=1,2` or `nodes=[1, 2]`."""
    from zsim.specs.experiment.load import parse_setting

    key, value = parse_setting(text)
    if isinstance(value, list):
        return key, value
    if isinstance(value, str) and "," in value:
        return key, [parse_setting(f"{key}={part}")[1] for part in value.split(",")]
    return key, [value]


@takes_experiment()
def goodput(
    options: ExperimentOptions,
    tokens: Tokens = None,
    samples: Samples = None,
    epochs: Epochs = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs that are drawn; else run.seeds.")] = None,
    json_: Annotated[Path | None, json_option("the answer")] = None,
    out: Annotated[Path | None, folder_option(help="Write goodput.html and goodput.json there.")] = None,
    jobs: Jobs = None,
) -> None:
    """Simulate a whole run: days and money to the last token, with saves, failures and recovery."""
    from zsim.study.whole_runs import simulate_run

    options, _ = options.add_length(tokens, samples, epochs)
    run = simulate_run(options.load(), seeds=seeds, jobs=jobs)
    answer(run.lines(), run.to_dict, json_)
    if out is not None:
        for path in run.save(out):
            print_file(path.suffix[1:], path)
    if code := run.verdict.exit_code:
        raise typer.Exit(code)


@takes_experiment(without=("allow_code",))
def ui(
    options: ExperimentOptions,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where it listens; 0: any free one.")] = 8050,
    host: Annotated[
        str, typer.Option(help="Another address than this machine's own lets others run simulations.")
    ] = "127.0.0.1",
) -> None:
    """Open a local page: change the settings of an experiment, see what they do, download its files.

    EXPERIMENT may be a DeepSpeed JSON, an Accelerate YAML or a torchtitan TOML too.
    """
    from zsim.ui.app import require_dash, serve

    require_dash()
    serve(options.load(), host, port)
