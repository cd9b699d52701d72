"""`zsim tune`: the best configuration that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import (
    ExperimentOptions,
    Jobs,
    answer,
    folder_option,
    is_output,
    json_option,
    print_file,
    takes_experiment,
)
from zsim.errors import InputError
from zsim.specs.strategy.choices import values_of

_KINDS = ", ".join(values_of("tune.kind"))
_DEGREE_KINDS = ", ".join(values_of("tune.parallelism"))


@takes_experiment()
def tune(
    options: ExperimentOptions,
    goal: Annotated[
        str,
        typer.Option(
            help="fastest, cheapest, fewest-days (of [run], saves and failures included), smallest-cluster, "
            "largest-model, largest-batch or longest-sequence."
        ),
    ] = "fastest",
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Strategies to look at: {_KINDS}; else the experiment's own.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS", help="What to leave as it is, e.g. micro-batch; or all."),
    ] = None,
    quantised: Annotated[
        bool, typer.Option("--quantised", help="ZeRO++'s int8 gathers and int4 reductions too.")
    ] = False,
    parallelism: Annotated[
        bool,
        typer.Option(
            "--parallelism", help=f"Tensor, pipeline and context degrees too, with {_DEGREE_KINDS}."
        ),
    ] = False,
    simulations: Annotated[
        int | None, typer.Option(min=1, help="With degrees: how many configurations to simulate at most.")
    ] = None,
    headroom: Annotated[float, typer.Option(help="Fraction of GPU memory to leave free.")] = 0.0,
    top: Annotated[int, typer.Option(min=1, help="How many to show and write.")] = 5,
    jobs: Jobs = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Simulated points, shared with `zsim sweep --cache`.")
    ] = None,
    json_: Annotated[Path | None, json_option("the result")] = None,
    out: Annotated[Path | None, folder_option(help="Write the best few's files and tune.html there.")] = None,
) -> None:
    """Find the best configuration that fits. Say what to change in the one given, each change simulated.

    The global batch stays as it is. The experiment may be a DeepSpeed JSON, an Accelerate YAML or a
    torchtitan TOML. Without any of them (and without --kind) DeepSpeed and FSDP2 are looked at.

    With [rl]: the placement, the GPUs of the rollout, the ranks of its engines and their part of the memory
    (--keep placement, split, engine, utilization).
    """
    from zsim.study.tune.framework import usual_kinds
    from zsim.study.tune.result import tune as find_best

    experiment = options.load()
    if experiment.rl is not None:
        given = {
            "--goal": goal != "fastest", "--kind": kind, "--quantised": quantised,
            "--parallelism": parallelism, "--simulations": simulations, "--headroom": headroom,
            "--jobs": jobs, "--cache": cache, "--out": out,
        }  # fmt: skip
        for name, value in given.items():
            if value:
                raise InputError(
                    f"{name}: does nothing for an experiment with [rl], whose placement and engines are "
                    "searched in this process; expected --keep, --top and --json alone"
                )
        from zsim.study.tune.rollout import tune_rollout

        layouts = tune_rollout(experiment, keep=keep or (), count=top)
        answer(layouts.lines(), layouts.to_dict, json_)
        return
    is_open = options.experiment is None and not any(
        text.startswith("strategy.") for text in options.set_ or []
    )
    kinds = kind or (usual_kinds() if is_open else [])
    result = find_best(
        experiment, goal, kinds=kinds, keep=keep or (), quantised=quantised, parallelism=parallelism,
        simulations=simulations, headroom=headroom, top=top, jobs=jobs, cache=cache,
    )  # fmt: skip
    answer(result.lines(), result.to_dict, json_)
    if out is not None:
        result.save(out)
        if not is_output(json_):
            print_file("files", f"{out}/best, tune.html")
