"""Variables of launch scripts as settings."""

from __future__ import annotations

import pytest

from zsim.programs.environment import read_environment
from zsim.specs.formats.config_file import TrainingFile


@pytest.mark.parametrize(
    ("variables", "is_expandable"),
    [
        ({"PYTORCH_ALLOC_CONF": "expandable_segments: True, max_split_size_mb:64"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        (
            {
                "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
            False,
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_the_older_name_of_the_allocators_variable_counts_less(
    variables: dict[str, str], is_expandable: bool
) -> None:
    """torch looks at the older name where the newer one is not set, and leaves spaces out."""
    file = TrainingFile("run.sh")
    read_environment(file, variables)
    assert file.settings.get("training.expandable_segments", False) is is_expandable


def test_the_allocators_numbers_are_read() -> None:
    file = TrainingFile("run.sh")
    text = "max_split_size_mb:128, roundup_power2_divisions:8,garbage_collection_threshold:0.8"
    read_environment(file, {"PYTORCH_CUDA_ALLOC_CONF": text})
    assert file.settings == {
        "training.max_split_size_mb": 128,
        "training.roundup_power2_divisions": 8,
        "training.garbage_collection_threshold": 0.8,
    }


def test_what_the_allocator_is_told_beyond_that_is_noted() -> None:
    """Parts by size, and a limit of splits that expandable segments go without."""
    file = TrainingFile("run.sh")
    text = "expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2]"
    read_environment(file, {"PYTORCH_CUDA_ALLOC_CONF": text})
    assert file.settings == {"training.expandable_segments": True}
    assert [note.split()[2] for note in file.notes] == ["max_split_size_mb", "roundup_power2_divisions"]


@pytest.mark.parametrize(
    "told",
    ["roundup_power2_divisions:0.5", "max_split_size_mb:64.5", "garbage_collection_threshold:1.0",
     "garbage_collection_threshold:0.0", "max_split_size_mb:20", "roundup_power2_divisions:12"],
)  # fmt: skip
def test_what_torchs_allocator_refuses_is_noted_with_its_variable(told: str) -> None:
    file = TrainingFile("run.sh")
    read_environment(file, {"PYTORCH_CUDA_ALLOC_CONF": told})
    assert file.settings == {}
    assert f"PYTORCH_CUDA_ALLOC_CONF: {told.partition(':')[0]} of" in file.notes[0]
