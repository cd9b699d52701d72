"""Variables of launch scripts as settings."""

from __future__ import annotations

import pytest

from zsim.programs.environment import read_environment
from zsim.specs.formats.training_file import TrainingFile


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
