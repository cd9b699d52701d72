"""Save and resume: bit for bit, on other ranks, and never from a damaged file."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from tests.validation.ranks import ResumeCase, Resumed  # noqa: E402
from validation.launch import run  # noqa: E402
from validation.zero.checkpoint import CheckpointError, newest_intact, verify  # noqa: E402
from validation.zero.config import ZeroConfig  # noqa: E402

pytestmark = pytest.mark.torch
# two runs at once must not share files
NVME = Path(tempfile.gettempdir()) / f"zsim-validation-nvme-checkpoint-{os.getpid()}"
BF16 = torch.bfloat16
CONFIGS = {
    "stage 0": ZeroConfig(stage=0),
    "stage 1": ZeroConfig(stage=1),
    "stage 2 in bf16": ZeroConfig(stage=2, compute_dtype=BF16),
    "stage 3": ZeroConfig(stage=3),
    "stage 3 on NVMe": ZeroConfig(stage=3, optimizer_place="nvme", parameter_place="nvme", nvme_folder=NVME),
    "stage 3 in fp16": ZeroConfig(stage=3, compute_dtype=torch.float16, loss_scale="dynamic", scale_window=2),
    "stage 3, frozen and buffers": ZeroConfig(stage=3),
}


def model_of(name: str) -> str:
    return "awkward" if "frozen" in name else "tied"


LATER = "step-00000006"


@functools.cache
def saved() -> tuple[Path, dict[str, Resumed]]:
    """Two ranks train 6 steps with each config and save at 3; "pruned" saves at 2, 4 and 6, and keeps two."""
    root = Path(tempfile.mkdtemp(prefix="zsim-checkpoints-"))
    cases = {
        name: ResumeCase(config, 6, root / name, save_at=(3,), model=model_of(name))
        for name, config in CONFIGS.items()
    }
    cases["pruned"] = ResumeCase(ZeroConfig(stage=3), 6, root / "pruned", save_at=(2, 4, 6))
    results = run("tests.validation.ranks:resume", 2, (list(cases.values()),))[0]
    return root, dict(zip(cases, results, strict=True))


def again(name: str, config: ZeroConfig, source: str, **changes: Any) -> ResumeCase:
    """Other weights, overwritten by the checkpoint of step 3; trained on to 6."""
    root = saved()[0]
    return replace(
        ResumeCase(config, 6, root, root / source / "step-00000003", model=model_of(name), seed=99), **changes
    )


@functools.cache
def resumed(world_size: int) -> list[dict[str, Resumed]]:
    """By rank, what came of each resumption."""
    root, _ = saved()
    cases = {
        name: again(name, config, name)
        for name, config in CONFIGS.items()
        if world_size == 2 or "frozen" not in name
    }
    if world_size == 2:
        for stage, source in (("stage 0", "stage 3"), ("stage 3 on NVMe", "stage 0"), ("stage 1", "stage 3")):
            cases[f"{stage} from {source}"] = again(stage, CONFIGS[stage], source)
        damage_largest_file(root / "pruned" / LATER)
        cases["damaged"] = again("", ZeroConfig(stage=3), "", load=root / "pruned" / LATER)
        cases["before the damaged"] = again(
            "", ZeroConfig(stage=3), "", load=newest_intact(root / "pruned")[0], until=5
        )
        cases["another model"] = again("", ZeroConfig(stage=1), "stage 1", model="small")
    ranks = run("tests.validation.ranks:resume", world_size, (list(cases.values()),))
    return [dict(zip(cases, rank, strict=True)) for rank in ranks]


def damage_largest_file(folder: Path) -> None:
    """Cut the last byte off."""
    victim = max(folder.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])


@pytest.fixture(scope="module", autouse=True)
def _clean_up() -> Iterator[None]:
    yield
    if saved.cache_info().currsize:
        shutil.rmtree(saved()[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_resuming_gives_the_same_bits_as_going_on(name: str) -> None:
    before, after = saved()[1][name], resumed(2)[0][name]
    assert len(after.losses) >= 3  # fp16 tries some batches again, with a smaller scale
    assert after.losses == before.losses[-len(after.losses) :]
    for key, value in before.parameters.items():
        assert (after.parameters[key] == value).all(), key


@pytest.mark.parametrize("name", [name for name in CONFIGS if "frozen" not in name])
@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_can_resume(name: str, world_size: int) -> None:
    """The batch is the same, shared out otherwise: equal up to the order of sums and rounding."""
    before, after = saved()[1][name], resumed(world_size)[0][name]
    bound = 1e-2 if name.endswith("16") else 5e-5
    for key, value in before.parameters.items():
        assert abs(after.parameters[key] - value).max() <= bound, key


@pytest.mark.parametrize(
    "name", ["stage 0 from stage 3", "stage 3 on NVMe from stage 0", "stage 1 from stage 3"]
)
def test_another_stage_can_resume(name: str) -> None:
    """All fp32 stages of two ranks are equal to the bit, so going on in another one is too."""
    for key, value in saved()[1]["stage 3"].parameters.items():
        assert (resumed(2)[0][name].parameters[key] == value).all(), key


def test_the_newest_two_checkpoints_are_kept() -> None:
    assert sorted(path.name for path in (saved()[0] / "pruned").iterdir()) == ["step-00000004", LATER]


def test_a_truncated_checkpoint_is_refused_by_every_rank_and_the_one_before_is_kept() -> None:
    for rank in resumed(2):
        assert ".distcp: has" in rank["damaged"].refusal
        assert "bytes, expected" in rank["damaged"].refusal
        assert len(rank["before the damaged"].losses) == 1
    folder, refused = newest_intact(saved()[0] / "pruned")
    assert folder is not None
    assert folder.name == "step-00000004"
    assert refused == [resumed(2)[0]["damaged"].refusal]


def test_a_checkpoint_of_another_model_is_refused() -> None:
    refusal = resumed(2)[1]["another model"].refusal
    assert "is of another model or other blocks; they differ in ['root']" in refusal


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda f: (f / "buffers.pt").write_bytes(b"x" * (f / "buffers.pt").stat().st_size), "has changed"),
        (lambda f: (f / "rank0.pt").unlink(), "rank0.pt: is missing"),
        (lambda f: (f / "manifest.json").unlink(), "never finished"),
        (lambda f: (f / "manifest.json").write_text("{"), "is damaged"),
        (lambda f: (f / "manifest.json").write_text('{"format": 0, "files": {}}'), "format 0, expected 1"),
    ],
)
def test_changed_bytes_missing_files_and_unfinished_saves_are_refused(
    tmp_path: Path, damage: Callable[[Path], Any], complaint: str
) -> None:
    copy = tmp_path / "step-00000003"
    shutil.copytree(saved()[0] / "stage 1" / "step-00000003", copy)
    assert verify(copy)["step"] == 3
    damage(copy)
    with pytest.raises(CheckpointError, match=complaint):
        verify(copy)
    assert newest_intact(tmp_path)[0] is None
