"""States in files: the same as in memory, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from validation.launch import RankError, run  # noqa: E402
from validation.tracing import Tracer  # noqa: E402
from validation.zero.config import ZeroConfig  # noqa: E402
from validation.zero.files import BLOCK, padded  # noqa: E402
from validation.zero.nvme import NvmeParameters, NvmeStates  # noqa: E402
from validation.zero.places import MemoryStates  # noqa: E402

pytestmark = pytest.mark.torch
MEBIBYTE = 2**20


def test_sizes_are_padded_to_blocks() -> None:
    assert [padded(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, 4096, 4096, 8192]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_files_keep_what_memory_keeps(tmp_path: Path, count: int) -> None:
    """Random states and gradients through three steps of changes, tensors of different sizes."""
    generator = torch.Generator().manual_seed(count)
    in_files = NvmeStates(tmp_path, 0, Tracer(is_on=False), torch.float32)
    in_memory = MemoryStates(is_host=False)
    names = [f"unit{index}" for index in range(count)]
    for index, name in enumerate(names):
        master = torch.randn(1000 * (index + 1) + 7, generator=generator)
        in_files.create(name, master)
        in_memory.create(name, master.clone())
    for _ in range(3):
        for is_first in (True, False):
            for name in names:
                piece = torch.randn(in_memory.read(name).master.numel(), generator=generator)
                in_files.add_gradient(name, piece, is_first=is_first)
                in_memory.add_gradient(name, piece.clone(), is_first=is_first)
        for name in names:
            assert torch.equal(in_files.gradient(name), in_memory.gradient(name))
        for keeper in (in_files, in_memory):
            for _name, states, gradient in keeper.walk(names):
                states.master.sub_(gradient)
                states.mean.add_(1)
                states.square.add_(gradient)
    for name in names:
        for mine, theirs in zip(in_files.read(name), in_memory.read(name), strict=True):
            assert torch.equal(mine, theirs)
    in_files.close()
    assert list(tmp_path.rglob("rank*")) == []


def test_the_pipeline_reads_ahead_and_uses_three_buffers(tmp_path: Path) -> None:
    """The read of tensor i + 1 is issued before the write of tensor i; memory does not grow with tensors."""
    tracer = Tracer()
    states = NvmeStates(tmp_path, 0, tracer, torch.float32)
    names = [f"unit{index}" for index in range(6)]
    for name in names:
        states.create(name, torch.ones(5000))
        states.add_gradient(name, torch.ones(5000), is_first=True)
    assert len(list(states.tensors())) == 3
    submitted: list[tuple[str, str]] = []
    for op in ("read", "write"):
        original = getattr(states.drive, op)

        def noted(name: str, *rest: Any, op: str = op, original: Callable[..., None] = original) -> None:
            submitted.append((op, name))
            original(name, *rest)

        setattr(states.drive, op, noted)
    for name, _, _ in states.walk(names):
        submitted.append(("step", name))
    states.close()
    expected = [("read", "unit0")]
    for index, name in enumerate(names):
        following = [("read", f"unit{index + 1}")] if index < 5 else []
        expected += [*following, ("step", name), ("write", name)]
    assert submitted == expected
    section = padded(4 * 5000)
    assert {e["bytes"] for e in tracer.events if e["kind"] == "io" and e["op"] == "read"} == {4 * section}


def test_a_file_that_lost_its_end_is_an_error(tmp_path: Path) -> None:
    states = NvmeStates(tmp_path, 0, Tracer(is_on=False), torch.float32)
    states.create("unit", torch.ones(5000))
    (path,) = tmp_path.rglob("rank0.unit")
    with open(path, "r+b") as file:
        file.truncate(4096)
    with pytest.raises(OSError, match="ends at byte 4096, expected"):
        states.read("unit")


def test_parameters_come_back_after_overlapping_writes_and_reads(tmp_path: Path) -> None:
    keeper = NvmeParameters(tmp_path, 0, Tracer(is_on=False), torch.device("cpu"))
    shards = {f"unit{i}": torch.full((3000 + i,), float(i), dtype=torch.bfloat16) for i in range(6)}
    for name, shard in shards.items():
        keeper.create(name, shard)
    for name in shards:
        keeper.put(name, shards[name].float() + 1)
        keeper.fetch(name)
    for name, shard in shards.items():
        taken = keeper.take(name)
        assert taken.dtype is torch.bfloat16
        assert torch.equal(taken, shard + 1)
    keeper.close()


# 25 million parameters are 16 x 25 = 403 MB of states; the process may take 160 MiB.
BUDGET = 160 * MEBIBYTE
DEFAULT_MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TOP_PAD_": "131072",
}


def test_nvme_trains_a_model_whose_states_exceed_the_memory_that_the_process_may_have(tmp_path: Path) -> None:
    """RLIMIT_DATA holds the process to it: a byte more is an error, as the next test shows."""
    config = ZeroConfig(stage=3, optimizer_place="nvme", parameter_place="nvme", nvme_folder=tmp_path)
    ((states, loss, used),) = run(
        "tests.validation.ranks:train_within", 1, (config, BUDGET, 2), environment=DEFAULT_MALLOC, timeout=180
    )
    assert states > 2.4 * BUDGET
    assert used <= BUDGET
    assert 0 < loss < 10


def test_without_offload_the_same_budget_is_not_enough() -> None:
    with pytest.raises(RankError, match=r"can't allocate memory|MemoryError"):
        run(
            "tests.validation.ranks:train_within",
            1,
            (ZeroConfig(stage=3), BUDGET, 2),
            environment=DEFAULT_MALLOC,
            timeout=180,
        )
