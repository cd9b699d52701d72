"""Steps against what the pipeline schedules of Megatron-Core, DeepSpeed and nanotron did themselves
(`python -m validation.pipeline_calls`)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.plan.pipeline.runtimes import megatron_settings, steps_of
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.actions import Action, MessageCall, MessageWait, Overlap, Step

RECORDED = Path(__file__).parent / "recorded"
Log = list[str]


def calls(name: str) -> dict[str, list[Log]]:
    """The recorded logs of every rank, by configuration."""
    found = json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))["calls"]
    return {case: [log.split(", ") for log in logs] for case, logs in found.items()}


def counts(case: str) -> dict[str, int]:
    """ "p4 v2 m8 n4 ..." as numbers by letter."""
    return {word[0]: int(word[1:]) for word in case.split() if word[1:].isdigit()}


def settings(case: str, *, waits_sends: bool) -> MegatronConfig:
    return megatron_settings(
        micro_batch_group=counts(case)["n"],
        overlap_p2p="overlap_p2p_comm" in case.split(),
        overlap_p2p_warmup_flush="overlap_p2p_comm_warmup_flush" in case,
        waits_sends=waits_sends,
        overlap_grad_reduce="align_grad_reduce" in case,
        overlap_param_gather="align_param_gather" in case,
    )


def written(rank: int, steps: list[Step]) -> Log:
    """Steps as the recorder writes Megatron's; the waits that belong to a step stand on their own there."""
    log: Log = []
    posted: dict[Action, str] = {}
    for step in steps:
        assert not isinstance(step, Overlap)
        if isinstance(step, Action):
            received = step._replace(kind="RECV_F" if step.kind == "F" else "RECV_B")
            if step.kind in ("F", "B") and received in posted:
                log.append(f"wait {posted.pop(received)}")
            log.append(str(step))
        elif isinstance(step, MessageWait):
            log += [f"wait {posted.pop(message)}" for message in step.messages]
        elif step.is_batched:
            text = " ".join(str(message) for message in step.messages)
            log += [f"batch {text}", f"wait {text}"] if text else []
            log += ["synchronize"] if step.waits == "host" else []
        else:
            names = {message: f"{message}{place(rank, step, message)}" for message in step.messages}
            log += [
                f"{'isend' if message.kind.startswith('SEND') else 'irecv'} {name}"
                for message, name in names.items()
            ]
            if step.waits == "stream":
                log += [f"wait {name}" for name in names.values()]
            else:
                posted |= names
    return log


def place(rank: int, call: MessageCall, message: Action) -> str:
    """Two ranks have the world's communicator for what the odd one sends."""
    sender = rank if message.kind.startswith("SEND") else 1 - rank
    return "/world" if call.has_communicator_per_direction and sender % 2 else ""


@pytest.mark.parametrize(("version", "waits_sends"), [("0.16.1", False), ("0.19.1", True)])
def test_megatron_s_calls_are_megatron_s(version: str, waits_sends: bool) -> None:
    """1F1B, and interleaved 1F1B with and without overlap, with groups above the pipeline ranks and a last
    group that is shorter; messages, batches, host waits, gathers and reductions in order."""
    found = calls(f"megatron-{version}")
    assert len(found) == 23
    for case, logs in found.items():
        count = counts(case)
        schedule = "interleaved-1f1b" if count["v"] > 1 else "1f1b"
        programs = steps_of(
            "megatron", schedule, count["p"], count["v"], count["m"],
            settings=settings(case, waits_sends=waits_sends),
        )  # fmt: skip
        for rank, (steps, log) in enumerate(zip(programs, logs, strict=True)):
            assert written(rank, steps) == log, f"{case}, rank {rank}"


def blocking(steps: list[Step]) -> Log:
    """Steps of frameworks whose messages are lone and waited at once."""
    log: Log = []
    for step in steps:
        if isinstance(step, Action):
            log.append(str(step))
        else:
            assert isinstance(step, MessageCall)
            assert (step.is_batched, step.waits) == (False, "stream")
            log += [f"{message.kind[:4].lower()} {message}" for message in step.messages]
    return log


def test_deepspeed_s_instructions_are_deepspeed_s() -> None:
    found = calls("deepspeed-0.19.8")
    assert len(found) == 6
    for case, logs in found.items():
        count = counts(case)
        programs = steps_of("deepspeed", "1f1b", count["p"], 1, count["m"])
        assert [blocking(steps) for steps in programs] == logs, case


def test_nanotron_s_engines_are_nanotron_s() -> None:
    found = calls("nanotron-2411b022")
    assert len(found) == 12
    for case, logs in found.items():
        count = counts(case)
        schedule = "gpipe" if case.startswith("afab") else "1f1b"
        programs = steps_of("nanotron", schedule, count["p"], 1, count["m"])
        assert [blocking(steps) for steps in programs] == logs, case
        shapes = {
            step.num_shape_messages for steps in programs for step in steps if isinstance(step, MessageCall)
        }
        assert shapes == {2}
