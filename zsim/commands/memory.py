"""`zsim memory`: a GPU's memory by owner and time, and what would help if it is too small."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zsim.commands.options import ExperimentOptions, answer, is_output, json_option, takes_experiment
from zsim.errors import InputError

if TYPE_CHECKING:
    from zsim.study.memory import Variant


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
    from zsim.study.experiment_source import parse_setting

    key, value = parse_setting(text)
    if isinstance(value, list):
        return key, value
    if isinstance(value, str) and "," in value:
        return key, [parse_setting(f"{key}={part}")[1] for part in value.split(",")]
    return key, [value]
