"""`zsim memory`: a GPU's memory by owner and time, and what would help if it is too small."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from zsim.commands.options import ExperimentOptions, answer, is_output, json_option, takes_experiment
from zsim.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from zsim.report.views.text.memory import By
    from zsim.specs.experiment.tables import Experiment
    from zsim.study.memory import Variant

_BY = ("category", "phase", "time")


@takes_experiment()
def memory(
    asked: ExperimentOptions,
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
    """Who holds a GPU's memory, and when: by phase, module and FSDP unit; no simulation where it fits."""
    experiment = asked.load()
    if by not in _BY:
        raise InputError(f"--by {by}: expected one of {', '.join(_BY)}{did_you_mean(by, _BY)}")
    if vary:
        axes = _axes(vary)
        content, fits = _compare(experiment, axes, cast("By", by), quiet=is_output(json_)), True
    elif by != "category":
        raise InputError(f"--by {by} is for --vary; `zsim run` simulates one experiment")
    else:
        content, fits = _profile(experiment, limit, quiet=is_output(json_))
    answer([""] if json_ is not None else [], lambda: content, json_)
    if not fits:
        raise typer.Exit(1)


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


def _profile(asked: Experiment, limit: int, *, quiet: bool) -> tuple[Any, bool]:
    """Print one experiment's tables; returns the JSON content, and whether the experiment fits."""
    from zsim.report.views.text.memory import profile_lines
    from zsim.report.views.text.sentences import remedy_words
    from zsim.specs.experiment.labels import strategy_label
    from zsim.study.memory import profile_memory
    from zsim.study.tune.remedy import remedy_of

    found = profile_memory(asked)
    if not quiet:
        job = found.job
        print(f"{job.model.name} | {strategy_label(job)} | {job.cluster.name} | {job.world_size:,} GPUs\n")
        lines = profile_lines(
            found.profile,
            capacity_bytes=found.capacity_bytes,
            limit=limit,
            has_allocator=job.cluster.gpu.has_caching_allocator,
        )
        print("\n".join(lines))
    content = {"capacity_bytes": found.capacity_bytes, "fits": found.fits, **found.profile.to_dict()}
    if not found.fits:
        remedy = remedy_of(asked)
        content["remedy"] = None if remedy is None else asdict(remedy)
        if remedy is not None and not quiet:
            print("\n" + textwrap.fill(remedy_words(remedy), 80, break_on_hyphens=False))
    return content, found.fits


def _compare(asked: Experiment, axes: dict[str, list[Any]], by: By, *, quiet: bool) -> list[Any]:
    """Print one line per combination as it is computed; returns the JSON content."""
    from zsim.report.views.text.memory import heading
    from zsim.study.memory import compare_memory

    content, found = [], set()
    variants = compare_memory(asked, axes, simulates=by == "time")
    if not quiet:
        print(heading(", ".join(key.rpartition(".")[2] for key in axes), by))
    for variant in variants:
        content.append(_to_dict(variant))
        found |= {variant.report.verdict} if variant.report is not None else set()
        if not quiet:
            print(_line(variant, by))
    if all("error" in row for row in content):
        raise InputError(content[0]["error"])
    if not quiet and any(row.get("fits") is False for row in content):
        print("!  more than a GPU has" + ("; the step is as if it did fit" if by == "time" else ""))
    if not quiet and by != "time" and any(row.get("fits") for row in content):
        print("Judged by tensors; whether torch's allocator runs short, --by time marks (~)")
    if not quiet and "runs short" in found:
        print("~  torch's allocator runs short, which takes time (zsim run says more)")
    if not quiet and "may not fit" in found:
        print("?  torch's allocator may not find room for it (zsim run says more)")
    return content


def _line(variant: Variant, by: By) -> str:
    from zsim.report.views.text.memory import error_line, simulated_line, variant_line

    label = ", ".join(_word(value) for value in variant.overrides.values())
    if variant.profiled is None:
        return error_line(label, variant.error)
    profile, fits, report = variant.profiled.profile, variant.profiled.fits, variant.report
    if report is None:
        return variant_line(label, profile, by, fits=fits)
    tokens = report.tokens_per_second_per_gpu
    return simulated_line(
        label, profile.peak, verdict=report.verdict, seconds=report.step_seconds, tokens=tokens
    )


def _to_dict(variant: Variant) -> dict[str, Any]:
    row: dict[str, Any] = {"overrides": variant.overrides}
    if variant.profiled is None:
        return row | {"error": variant.error}
    row |= {"fits": variant.profiled.fits, "peak": variant.profiled.profile.to_dict()["peak"]}
    if variant.report is not None:
        row["may_run_out"] = variant.report.verdict == "may not fit"
        row["verdict"] = variant.report.verdict
        row["step_seconds"] = variant.report.step_seconds
        row["tokens_per_second_per_gpu"] = variant.report.tokens_per_second_per_gpu
    return row


def _axis(text: str) -> tuple[str, list[Any]]:
    """A dotted key and its values, from `nodes=1,2` or `nodes=[1, 2]`."""
    from zsim.specs.experiment.overrides import setting

    key, value = setting(text)
    if isinstance(value, list):
        return key, value
    if isinstance(value, str) and "," in value:
        return key, [setting(f"{key}={part}")[1] for part in value.split(",")]
    return key, [value]


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(inner)}" for key, inner in value.items()) or "as the rest"
    return str(value).lower() if isinstance(value, bool) else str(value)
