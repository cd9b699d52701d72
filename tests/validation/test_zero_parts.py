"""The engine's parts, one by one, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.expect import there

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

import torch.nn as nn  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from validation.examples import Awkward, make_batch, make_model, vocab_of  # noqa: E402
from validation.zero.adamw import runs_of_equal_decay, step_shard  # noqa: E402
from validation.zero.config import ZeroConfig  # noqa: E402
from validation.zero.layout import Layout  # noqa: E402
from validation.zero.partition import find_blocks, partition  # noqa: E402
from validation.zero.scaler import LossScaler  # noqa: E402

pytestmark = pytest.mark.torch
SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=6)


# -- layout -----------------------------------------------------------------------------------------------


def test_a_flat_tensor_is_padded_to_equal_shards() -> None:
    """2 x 3 and 5 elements are 11; four ranks hold 3 each, 12 in all; the last has 2 elements and a pad."""
    layout = Layout.of([("a", (2, 3)), ("b", (5,))], world_size=4)
    assert (layout.numel, layout.shard_numel, layout.padded_numel) == (11, 3, 12)
    assert [layout.filled(rank) for rank in range(4)] == [3, 3, 3, 2]
    assert [(p.slot.name, p.start, p.stop) for p in layout.pieces(layout.shard_of(1))] == [("a", 0, 3)]
    assert [(p.slot.name, p.start, p.stop) for p in layout.pieces(layout.shard_of(3))] == [("b", 0, 2)]


def test_ranks_beyond_the_last_element_hold_padding_only() -> None:
    """3 elements on 5 ranks: one each, and two ranks with nothing."""
    layout = Layout.of([("a", (3,))], world_size=5)
    assert [layout.filled(rank) for rank in range(5)] == [1, 1, 1, 0, 0]
    assert list(layout.pieces(layout.shard_of(4))) == []


@given(SHAPES, st.integers(1, 9))
def test_shards_hold_every_element_once(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = Layout.of([(str(index), shape) for index, shape in enumerate(shapes)], world_size)
    held = sum(
        piece.stop - piece.start
        for rank in range(world_size)
        for piece in layout.pieces(layout.shard_of(rank))
    )
    assert held == layout.numel == sum(layout.filled(rank) for rank in range(world_size))
    assert 0 <= layout.padded_numel - layout.numel < world_size


# -- partition --------------------------------------------------------------------------------------------


def test_blocks_are_found_and_what_they_share_goes_to_the_root() -> None:
    model = Awkward()
    root, *blocks = partition(model, find_blocks(model))
    assert [part.name for part in blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert "blocks.0.second.weight" in [member.name for member in root.trained]
    (shared,) = [member for member in root.trained if len(member.places) > 1]
    assert [module for module, _ in shared.places] == [model.blocks[0].second, model.blocks[2].second]
    assert [member.name for member in blocks[1].frozen] == ["blocks.1.first.weight"]
    assert [member.name for member in blocks[2].trained] == [
        "blocks.2.unused",
        "blocks.2.first.weight",
        "blocks.2.first.bias",
    ]


def test_every_parameter_is_in_exactly_one_part() -> None:
    for name in ("small", "tied", "awkward"):
        model = make_model(name)
        members = [m for part in partition(model, find_blocks(model)) for m in (*part.trained, *part.frozen)]
        assert sorted(map(id, model.parameters())) == sorted(id(member.parameter) for member in members)


def test_blocks_inside_blocks_are_refused() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    model = nn.Sequential(inner)
    with pytest.raises(ValueError, match="blocks must not contain each other"):
        partition(model, [inner, inner[0]])


# -- the update -------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(0, 4))
def test_adamw_on_a_shard_is_torchs_to_the_bit(world_size: int, rank: int) -> None:
    """Three steps on a shard that begins and ends inside parameters, one of them not decayed."""
    rank %= world_size
    config = ZeroConfig(stage=3, no_decay=("bias",), learning_rate=0.1, weight_decay=0.3)
    generator = torch.Generator().manual_seed(world_size * 10 + rank)
    shapes = [("weight", (7, 5)), ("bias", (11,)), ("other", (13,))]
    layout = Layout.of(shapes, world_size)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for _, shape in shapes]
    groups = [
        {"params": [parameters[0], parameters[2]], "weight_decay": 0.3},
        {"params": [parameters[1]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    owned = layout.shard_of(rank)

    def shard(tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return nn.functional.pad(flat, (0, layout.padded_numel - layout.numel))[owned].clone()

    states = (shard(parameters), torch.zeros(layout.shard_numel), torch.zeros(layout.shard_numel))
    for step in range(1, 4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        step_shard(layout, owned, config, step, states, shard([there(p.grad) for p in parameters]))
        optimizer.step()
    assert torch.equal(states[0], shard(parameters))


def test_neighbours_of_equal_decay_are_updated_together() -> None:
    layout = Layout.of([("a", (4,)), ("b", (4,)), ("norm", (4,)), ("c", (4,))], world_size=1)
    runs = list(runs_of_equal_decay(layout, slice(0, 16), ZeroConfig(no_decay=("norm",), weight_decay=0.1)))
    assert runs == [(slice(0, 8), 0.1), (slice(8, 12), 0.0), (slice(12, 16), 0.1)]


def test_the_loss_scale_halves_on_overflow_and_doubles_after_a_window() -> None:
    scaler = LossScaler(scale=8.0, window=2)
    seen = []
    for overflowed in (True, False, False, False, True, True, True, True, True):
        scaler.update(overflowed)
        seen.append(scaler.scale)
    assert seen == [4.0, 4.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    assert scaler.skipped_steps == 6


def test_a_fixed_loss_scale_stays() -> None:
    scaler = LossScaler(scale=128.0, window=0)
    for overflowed in (True, False, False):
        scaler.update(overflowed)
    assert scaler.scale == 128.0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stage": 4}, "stage: found 4"),
        ({"stage": 2, "parameter_place": "host"}, "only stage 3 has parameter shards"),
        ({"stage": 0, "optimizer_place": "nvme"}, "stage 0 shards nothing"),
        ({"optimizer_place": "nvme"}, "nvme_folder is needed"),
        ({"accumulation_steps": 0}, "accumulation_steps: found 0"),
        ({"compute_dtype": torch.float16}, "loss_scale: fp16 gradients vanish"),
    ],
)
def test_configs_that_cannot_work_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ZeroConfig(**options)


# -- examples ---------------------------------------------------------------------------------------------


def test_batches_are_progressions_and_labels_their_next_elements() -> None:
    tokens, labels = make_batch(step=3, sequences=4, length=9, vocab=61)
    assert tokens.shape == labels.shape == (4, 9)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    strides = (labels - tokens) % 61
    assert (strides == strides[:, :1]).all()
    assert not torch.equal(tokens, make_batch(step=4, sequences=4, length=9, vocab=61)[0])


def test_the_same_seed_makes_the_same_model() -> None:
    first, second = make_model("small", 5), make_model("small", 5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert vocab_of(first) == 67
