"""`zsim replay`: a recorded step run again, unchanged or on other hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import answer, folder_option, is_output, json_option, print_file


def replay(
    trace: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="A rank's file, several of one run, a folder of ranks, or a .tar.gz of it.",
        ),
    ],
    cluster: Annotated[
        str | None, typer.Option(help="Run its collectives on this cluster: a preset, or a topology TOML.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="On so many GPUs of it.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="On so many nodes of it.")] = None,
    recorded_on: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="The GPU of the recording, where the trace does not name it."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which step; else the one of median length.")] = None,
    whole: Annotated[
        bool, typer.Option(help="Take each file for one step: for traces without step marks.")
    ] = False,
    json_: Annotated[Path | None, json_option("the result")] = None,
    out: Annotated[
        Path | None, folder_option(help="Write the replayed ranks there, as Kineto traces.")
    ] = None,
) -> None:
    """Run a recorded step again: kernels as long as recorded, collectives together.

    Without --cluster everything takes what it took, and the recorded step comes back, each part of it. With
    --cluster collectives run on that fabric, and ranks wait for each other there. The number of ranks is set
    by --gpus and --nodes.

    What stays as it was: model, batch per GPU, strategy, the host's time between launches, and the schedule.
    Kernels on another GPU go by the ratio of peaks or of memory bandwidths. With more ranks the outermost
    group grows and the full tensors stay. Only the optimizer's kernels shrink with the shards. What a stream
    waited for is read out of the recording's times and names. Memory is not replayed.
    """
    from zsim.study.replay.replay import replay as replay_trace
    from zsim.study.replay.text import replay_lines
    from zsim.trace.chrome.write import write_chrome_traces
    from zsim.trace.readers.read import read_trace

    result = replay_trace(
        read_trace(trace, whole=whole),
        cluster=cluster,
        gpus=gpus,
        nodes=nodes,
        recorded_on=recorded_on,
        step=step,
    )
    answer(replay_lines(result, ", ".join(str(path) for path in trace)), result.to_dict, json_)
    if out is not None:
        files = write_chrome_traces(result.written, out)
        if not is_output(json_):
            print_file("trace", f"{files[0].parent} ({len(files)} rank{'s' * (len(files) > 1)})")
