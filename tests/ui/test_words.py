"""What stands on the page beside the figures."""

from __future__ import annotations

import json
import re
from math import exp

import pytest

from tests.browser import Page
from tests.ui.test_form import made
from zsim.specs.experiment.resolve import resolve
from zsim.ui.answer import Tier, answer, scaling_counts
from zsim.ui.files import file_content
from zsim.ui.words import answer_words, change_words, sentence
from zsim.validated.ratios import NO_DIFFERENCE, SEVERAL_SETTINGS, shipped_bound

SAID = {"source": "made up", "evidence": "assumed"}


@pytest.mark.parametrize(
    ("now", "before", "said"),
    [
        (1000.0, None, ""),
        (1000.0, 1000.5, ""),
        (1300.0, 1000.0, "30.0 % more tokens per second than before (1,000)."),
        (700.0, 1000.0, "30.0 % fewer tokens per second than before (1,000)."),
        (
            1050.0,
            1000.0,
            "5.0 % more tokens per second than before (1,000): no difference that zsim can tell.",
        ),
        (7500.0, 1000.0, "7.5 times as many tokens per second as before (1,000)."),
    ],
)
def test_a_change_is_said_against_what_stood_there_before(
    now: float, before: float | None, said: str
) -> None:
    assert change_words(now, before, is_shared=False) == said


def test_a_change_from_shared_replicas_is_judged_as_one() -> None:
    """Between what is told apart with a rank to a replica before and now, and with several before."""
    bounds = [shipped_bound([SEVERAL_SETTINGS], is_shared=is_shared) for is_shared in (False, True)]
    found, between = answer(made(nodes=1)), sum(bounds) / 2
    last = {"tokens_per_second": found.tokens_per_second * exp(-between)}
    assert not found.outcome.is_shared
    said = [str(answer_words(found, {**last, "is_shared": was_shared})) for was_shared in (False, True)]
    assert [NO_DIFFERENCE in words for words in said] == [bound > between for bound in bounds]


def test_a_tier_without_a_limit_fits() -> None:
    assert Tier("NVMe", 5, None, "").fits
    assert Tier("NVMe", 5, 5, "").fits
    assert not Tier("NVMe", 5, 4, "").fits


def test_every_tier_says_what_is_left_or_missing() -> None:
    """A gigabyte of host memory holds no optimizer states of gpt2: 124,439,808 x 12 bytes are 1.49 GB."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    cluster = {"extends": "dgx-h100", "name": "small", "host": {"memory": "1 GB"} | SAID}
    found = answer(made(cluster=cluster, nodes=1, strategy={"kind": "deepspeed", "config": config}))
    gpu, host = found.tiers
    assert gpu.fits
    assert " free; " in gpu.words
    assert re.search(r"; torch allocates .* GB and reserves .* GB$", gpu.words)
    assert host.name == "Host memory of a node"
    assert host.words.endswith(" too much")
    assert found.fit.verdict.word == "does not fit"
    assert found.fit.words.startswith("Host memory of a node: ")


@pytest.mark.parametrize(
    ("where", "counts"),
    [
        ({"nodes": 2}, [2, 4, 8, 16, 32, 64, 128]),
        ({"nodes": 3}, [3, 6, 24, 48, 96, 192]),
        ({"nodes": None, "gpus": 6}, [3, 6, 24, 48]),
        ({"nodes": None, "gpus": 2}, [1, 2, 4, 8, 16]),
        ({"nodes": 1024}, [1024, 2048, 4096, 8192, 16384]),
    ],
)
def test_the_curve_has_whole_nodes_and_an_end(where: dict[str, int | None], counts: list[int]) -> None:
    """24 GPUs halved are 12, a node and a half; 6 doubled too."""
    assert scaling_counts(resolve(made(**where))) == counts


def test_files_are_those_of_the_exporters() -> None:
    experiment = made(strategy={"kind": "fsdp2"}, training={"sequence_length": 512})
    assert "fully_shard" in file_content(experiment, "fsdp2.py").decode()
    assert 'kind = "fsdp2"' in file_content(experiment, "experiment.toml").decode()


def test_the_figures_are_the_reports_own() -> None:
    """Figure by figure, the JSON that plotly.js draws is that of the report of the same experiment."""
    experiment = made(nodes=1, strategy={"kind": "fsdp2"})
    report = Page(file_content(experiment, "report.html").decode())
    figures = answer(experiment).figures
    assert set(figures) == {"step", "timeline", "waterfall-gpu", "memory-gpu"}
    for name, figure in figures.items():
        assert json.loads(figure.to_json()) == json.loads(report.figures[f"plot-{name}"])


def test_notes_are_sentences_and_files_keep_their_names() -> None:
    assert sentence("the optimizer is the script's") == "The optimizer is the script's."
    assert sentence("torchtitan.toml: clips nothing.") == "torchtitan.toml: clips nothing."
