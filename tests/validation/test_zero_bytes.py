"""What the engine holds and sends, against closed forms: in the engine, on live tensors, on the wire."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from tests.oracles.model_states import model_state_bytes  # noqa: E402
from tests.validation.ranks import Bytes, EngineCase  # noqa: E402
from validation import network  # noqa: E402
from validation.launch import run  # noqa: E402
from validation.zero.closed_forms import held_bytes, volume_bytes, wire_bytes  # noqa: E402
from validation.zero.config import ZeroConfig  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zsim.comparison.plan_check import Call

pytestmark = pytest.mark.torch
# two runs at once must not share files
NVME = Path(tempfile.gettempdir()) / f"zsim-validation-nvme-bytes-{os.getpid()}"
BF16 = torch.bfloat16

CASES = {
    **{f"stage {s}": EngineCase(ZeroConfig(stage=s)) for s in (0, 1, 2, 3)},
    **{
        f"stage {s} in bf16 throughout": EngineCase(
            ZeroConfig(stage=s, compute_dtype=BF16, reduce_dtype=BF16, keep_gathered=False)
        )
        for s in (0, 1, 2, 3)
    },
    **{
        f"stage {s}, accumulated": EngineCase(ZeroConfig(stage=s, accumulation_steps=3)) for s in (0, 1, 2, 3)
    },
    "stage 2 in buckets": EngineCase(ZeroConfig(stage=2, bucket_bytes=10**5)),
    "stage 3, all resharded": EngineCase(ZeroConfig(stage=3, keep_gathered=False)),
    "stage 3, prefetch 2": EngineCase(ZeroConfig(stage=3, prefetch=2)),
    "stage 3, awkward": EngineCase(ZeroConfig(stage=3, broadcast_buffers=False), model="awkward"),
    "stage 1, awkward": EngineCase(ZeroConfig(stage=1, broadcast_buffers=False), model="awkward"),
    "stage 3, tied": EngineCase(ZeroConfig(stage=3), model="tied"),
    "stage 1, host": EngineCase(ZeroConfig(stage=1, optimizer_place="host")),
    "stage 2, host, bf16": EngineCase(ZeroConfig(stage=2, optimizer_place="host", compute_dtype=BF16)),
    "stage 3, host": EngineCase(ZeroConfig(stage=3, optimizer_place="host", parameter_place="host")),
    "stage 3, NVMe": EngineCase(
        ZeroConfig(stage=3, optimizer_place="nvme", parameter_place="nvme", nvme_folder=NVME)
    ),
}
WORLDS = (2, 3)


@functools.cache
def measured(world_size: int) -> dict[str, list[Bytes]]:
    """By case, each rank's bytes."""
    cases = [replace(case, looks_for_foreign=world_size == 2) for case in CASES.values()]
    ranks = run("tests.validation.ranks:measure_bytes", world_size, (cases,), timeout=300)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(CASES)}


def volume_of(calls: Sequence[Call]) -> dict[str, int]:
    volume: dict[str, int] = {}
    for call in calls:
        volume[call.kind] = volume.get(call.kind, 0) + call.bytes
    return volume


def model_states(held: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Without buffers (gathered parameters, staging)."""
    return {
        place: {category: count for category, count in parts.items() if category != "buffers"}
        for place, parts in held.items()
    }


@pytest.mark.parametrize(("world_size", "name"), list(product(WORLDS, CASES)))
def test_model_states_are_the_closed_form_to_the_byte(world_size: int, name: str) -> None:
    """Measured on live storages, after backward and after the step, padding included."""
    config = CASES[name].config
    for rank in measured(world_size)[name]:
        before, after = model_states(rank.held_before_step), model_states(rank.held_after_step)
        assert before == held_bytes(rank.flats, config, with_gradients=True)
        assert after == held_bytes(rank.flats, config, with_gradients=False)


@pytest.mark.parametrize("name", CASES)
def test_no_tensor_lives_that_the_engine_does_not_count(name: str) -> None:
    """All Python tensors of the process, before the step, less those that lived before the engine."""
    assert [rank.foreign for rank in measured(2)[name]] == [0, 0]


@pytest.mark.parametrize(("world_size", "name"), list(product(WORLDS, CASES)))
def test_volume_is_the_closed_form_to_the_byte(world_size: int, name: str) -> None:
    for rank in measured(world_size)[name]:
        assert volume_of(rank.calls) == volume_bytes(rank.flats, CASES[name].config)


@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_volume_is_the_papers(stage: int, times: int) -> None:
    """Rajbhandari et al. 2020, section 7: 2 Psi in stages 0 to 2, 3 Psi in stage 3; an all-reduce is two.

    bf16 throughout, everything resharded; Psi here is padded.
    """
    for rank in measured(2)[f"stage {stage} in bf16 throughout"]:
        volume = volume_of(rank.calls)
        psi = 2 * sum(flat.padded_numel for flat in rank.flats)
        assert volume.pop("all_reduce", 0) * 2 + sum(volume.values()) == times * psi


def test_volume_with_both_ends_kept_is_two_for_them_and_three_for_the_others() -> None:
    """Root and last block are gathered once and reduced once."""
    for rank in measured(2)["stage 3"]:
        ends = sum(flat.padded_numel for flat in rank.flats if flat.is_kept)
        others = sum(flat.padded_numel for flat in rank.flats if not flat.is_kept)
        assert others > 0
        assert sum(call.bytes for call in rank.calls) == 4 * (2 * ends + 3 * others)


@pytest.mark.parametrize(
    ("stage", "parts"), [(0, (2, 2, 12)), (1, (2, 2, 6)), (2, (2, 1, 6)), (3, (1, 1, 6))]
)
def test_bytes_per_parameter_are_the_papers_figure_1(stage: int, parts: tuple[int, int, int]) -> None:
    """bf16 on 2 ranks: 2 + 2 + 12 bytes per parameter, each halved from its stage on. Nothing pads here: all
    flat tensors of the example are even."""
    rank = measured(2)[f"stage {stage} in bf16 throughout"][0]
    numel = sum(flat.padded_numel for flat in rank.flats)
    held = rank.held_before_step["device"]
    assert tuple(held[name] for name in ("parameters", "gradients", "optimizer_states")) == tuple(
        part * numel for part in parts
    )


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("suffix", "sizes"), [("", (4, 4, 8)), (" in bf16 throughout", (2, 2, 12))])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_states_are_zsims_footprint_to_the_byte(
    stage: int, suffix: str, sizes: tuple[int, int, int], world_size: int
) -> None:
    """zsim's formula on each padded flat tensor, against live storages of every rank. In fp32 parameters are
    their own master weights: 8 bytes of states and not 12."""
    for rank in measured(world_size)[f"stage {stage}{suffix}"]:
        names = ("parameters", "gradients", "optimizer_states")
        expected = dict.fromkeys(names, 0.0)
        for flat in rank.flats:
            states = model_state_bytes(
                flat.padded_numel,
                stage,
                world_size,
                parameter_bytes=sizes[0],
                gradient_bytes=sizes[1],
                optimizer_bytes=sizes[2],
                is_padded=True,
            )
            for name in names:
                expected[name] += getattr(states, name)
        held = rank.held_before_step["device"]
        assert {name: held[name] for name in names} == expected


@functools.cache
def on_the_wire(world_size: int) -> dict[str, list[Bytes]]:
    cases = {
        **{f"stage {s}": EngineCase(ZeroConfig(stage=s), model="medium", steps=3) for s in (0, 1, 2, 3)},
        "stage 3, native": EngineCase(ZeroConfig(stage=3, reduce_scatter="native"), model="medium", steps=3),
    }
    ranks = run(
        "tests.validation.ranks:measure_bytes",
        world_size,
        (list(cases.values()), "lo"),
        prefix=network.PRIVATE,
        environment={"GLOO_SOCKET_IFNAME": "lo"},
    )
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(cases)}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["stage 0", "stage 1", "stage 2", "stage 3", "stage 3, native"])
def test_the_wire_carries_what_the_closed_form_says(world_size: int, name: str) -> None:
    """All ranks' traffic of each of three steps, on a loopback of their own: never less, and within 0.5 % for
    headers and barriers when TCP is not held up (a busy machine makes it send more, smaller segments).
    """
    if network.why_not_private():
        pytest.skip(network.why_not_private() or "")
    ranks = on_the_wire(world_size)[name]
    native = "native" if "native" in name else "all_to_all"
    config = ZeroConfig(stage=int(name[6]))  # type: ignore[arg-type]
    expected = world_size * wire_bytes(volume_bytes(ranks[0].flats, config), world_size, native)
    assert expected <= min(ranks[0].received) <= 1.005 * expected
