"""The loss is varied of the best few, and where a configuration does not fit without another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import zsim
from tests.study.tune.conftest import TINY, tune
from zsim.errors import InputError
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.study.tune.axes import base_of, candidates
from zsim.study.tune.framework import CHECKPOINTING, LOSS
from zsim.study.tune.search import split_losses

Tiny = Callable[..., zsim.Experiment]


def test_every_configuration_is_looked_at_once_whatever_its_loss(make_tiny: Tiny) -> None:
    space = candidates([base_of(make_tiny({"kind": "fsdp2"}))])
    first, instead = split_losses(space)
    assert 3 * len(first) == len(space)
    assert {one.overrides[LOSS] for one in first} == {"eager"}
    for number, other in instead.items():
        assert space[number].key((LOSS,)) == other.key((LOSS,))


def test_the_best_few_differ_otherwise_and_have_the_better_loss(make_tiny: Tiny) -> None:
    """The loss takes six steps of these five, and its own place among the changes a few."""
    given = make_tiny({"stage": 3}, activation_checkpointing="full")
    result, without = tune(given), tune(given, keep=("cross-entropy",))
    keys = [measured.candidate.key((LOSS,)) for measured in result.best]
    assert len(set(keys)) == len(keys) == 5
    assert result.best[0].seconds <= without.best[0].seconds
    assert resolve(result.best[0].candidate.experiment()).training.cross_entropy != "eager"
    assert result.search.num_candidates == without.search.num_candidates
    assert result.num_simulated <= without.num_simulated + 12


def test_what_fits_only_with_another_loss_is_found(make_tiny: Tiny) -> None:
    wide = {"model.n_positions": 4096, "training.sequence_length": 4096, "model.vocab_size": 65536}
    made = make_tiny({"kind": "fsdp2"}, memory="3 GB", gradient_accumulation_steps=1)
    keep = ("offload", "replicas", "reshard", "no_sync")
    with pytest.raises(InputError, match="nothing fits"):
        tune(change_experiment(made, wide), keep=(*keep, "cross-entropy"))
    result = tune(change_experiment(made, wide), keep=keep)
    best, counts = result.best[0], result.search
    # Four of five configurations do not fit with their first loss, and one of them not with its second.
    assert (counts.num_candidates, counts.num_replaced, len(counts.replaced)) == (5, 4, 5)
    assert resolve(best.candidate.experiment()).training.cross_entropy in ("fused", "fused_linear")


def test_a_gain_too_small_to_tell_is_not_in_the_best() -> None:
    """On a node of H100 the fused loss of a large vocabulary is a few percent, which zsim cannot tell from
    none: it is named beside the best, which keeps the loss."""
    model = {**TINY, "n_embd": 2048, "n_head": 16, "n_layer": 8, "vocab_size": 32768}
    made = zsim.Experiment(
        model=model, cluster="dgx-h100", nodes=1, strategy={"kind": "fsdp2"},
        training={"sequence_length": 512, "micro_batch_size": 8, "activation_checkpointing": "full"},
    )  # fmt: skip
    keep = ("compile", "precision", "replicas", "reshard", "offload", "micro-batch", "no_sync", "wrapping")
    result = tune(made, keep=keep, top=3)
    content = result.to_dict()
    assert [change["key"] for step in content["steps"] for change in step["changes"]] == [CHECKPOINTING]
    doubtful = [change["key"] for step in content["doubtful_steps"] for change in step["changes"]]
    assert doubtful == [LOSS]
    assert LOSS not in result.best[0].candidate.overrides or (
        result.best[0].candidate.overrides[LOSS] == "eager"
    )
    assert result.best[0].seconds == result.steps[-1].after.seconds
    said = " ".join(" ".join(result.lines()).split())
    assert "Not in 1, since zsim cannot tell a gain of" in said
    assert "training.cross_entropy: eager -> fused" in said
    assert content["doubtful_steps"][-1]["is_told_apart"] is False
    several = replace(result, steps=[*result.steps, *result.doubtful, *result.doubtful], doubtful=[])
    said = " ".join(" ".join(several.lines()).split())
    change = "training.cross_entropy: eager -> fused (needs a change of the script: "
    assert said.count("In 1 as well, no difference that zsim can tell for each: " + change) == 1
    assert " 2 " not in said.partition("What to change")[2].partition("In 1 as well")[0]
    twice = replace(result, doubtful=[*result.doubtful, *result.doubtful])
    assert " ".join(" ".join(twice.lines()).split()).count("training.cross_entropy: eager -> fused") == 1
