"""DeepSpeed's `TrainSchedule`, instruction by instruction."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from validation.pipeline_calls.stubs import real_modules

_WORDS = {
    "SendActivation": ("send", "SEND_F"),
    "RecvActivation": ("recv", "RECV_F"),
    "SendGrad": ("send", "SEND_B"),
    "RecvGrad": ("recv", "RECV_B"),
    "ForwardPass": ("", "F"),
    "BackwardPass": ("", "B"),
}
_LEFT_OUT = ("LoadMicroBatch", "ReduceTiedGrads", "OptimizerStep")


def version(root: Path) -> str:
    """DeepSpeed's version, from the sdist's `version.txt` or the name of its folder."""
    file = root / "version.txt"
    text = file.read_text() if file.exists() else root.name
    found = re.search(r"\d+\.\d+\.\d+", text)
    return found[0] if found else "unknown"


def recorded(root: Path) -> dict[str, list[str]]:
    """The instructions of every rank, joined by ", ", by the name of the configuration; without those on
    data, tied weights and the optimizer."""
    (schedule,) = real_modules(root, ["deepspeed.runtime.pipe.schedule"], {})
    return {
        f"p{ranks} m{micro_batches}": [
            _log(schedule.TrainSchedule(micro_batches, ranks, rank), rank) for rank in range(ranks)
        ]
        for ranks, micro_batches in ((2, 1), (2, 4), (3, 4), (4, 2), (4, 8), (5, 6))
    }


def _log(schedule: Any, rank: int) -> str:
    log = []
    done: Counter[str] = Counter()
    for commands in schedule.steps():
        for command in commands:
            name = type(command).__name__
            if name == "ReduceGrads":
                log.append(f"{rank}REDUCE_GRAD")
            elif name not in _LEFT_OUT:
                verb, kind = _WORDS[name]
                assert command.buffer_id == done[name] % schedule.num_pipe_buffers()
                log.append(f"{verb} {rank}{kind}{done[name]}".strip())
                done[name] += 1
    return ", ".join(log)
