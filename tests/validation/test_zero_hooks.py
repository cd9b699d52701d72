"""When the engine gathers, frees and reduces: on a fake process group, so any world fits in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

import torch.nn as nn  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from validation.examples import blocks_of, make_batch, make_model  # noqa: E402
from validation.oracle.run import fake_world  # noqa: E402
from validation.zero.config import ZeroConfig  # noqa: E402
from validation.zero.engine import ZeroEngine  # noqa: E402

pytestmark = pytest.mark.torch


@contextmanager
def engine_on(
    world_size: int, model: nn.Module, blocks: list[nn.Module], **options: Any
) -> Iterator[ZeroEngine]:
    """Rank 0 of a fake world; its collectives move nothing, so numbers mean nothing there."""
    with fake_world(world_size):
        engine = ZeroEngine(model, ZeroConfig(**options), blocks=blocks)
        yield engine
        engine.close()


def calls_of_a_step(engine: ZeroEngine) -> list[str]:
    tokens, labels = make_batch(0, 2, 8, 67)
    engine.comm.calls.clear()
    engine.backward(engine(tokens, labels).loss)
    engine.step()
    short = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}
    return [f"{short[call.kind]} {call.module.removeprefix('model.layers.')}" for call in engine.comm.calls]


def test_stage_3_gathers_one_unit_ahead_and_keeps_both_ends() -> None:
    """The issue order of FSDP2 with torchtitan 0.1's wrapping, from the second step on: AG root, AG 0, AG 1 |
    RS 1 with AG 0 before it, RS 0, RS root; block 1 is the last and stays."""
    model = make_model("small")
    with engine_on(64, model, blocks_of(model), stage=3) as engine:
        assert calls_of_a_step(engine) == ["AG root", "AG 0", "AG 1", "AG 0", "RS 1", "RS 0", "RS root"]
        assert calls_of_a_step(engine) == ["AG root", "AG 0", "AG 1", "AG 0", "RS 1", "RS 0", "RS root"]
        assert engine.held_bytes()["device"]["parameters"] * 64 < 1.01 * 4 * sum(
            flat.layout.padded_numel for flat in engine.flats
        )


def test_stage_3_without_prefetch_gathers_when_needed() -> None:
    model = make_model("small")
    with engine_on(64, model, blocks_of(model), stage=3, prefetch=0, keep_gathered=False) as engine:
        calls_of_a_step(engine)
        expected = ["AG root", "AG 0", "AG 1", "AG root", "AG 1", "RS 1", "AG 0", "RS 0", "RS root"]
        assert calls_of_a_step(engine) == expected


def test_stages_1_and_2_reduce_during_backward_and_gather_after_the_step() -> None:
    for stage in (1, 2):
        model = make_model("small")
        with engine_on(8, model, blocks_of(model), stage=stage) as engine:
            expected = ["RS 1", "RS 0", "RS root", "AG root", "AG 0", "AG 1"]
            assert calls_of_a_step(engine) == expected


def test_small_units_share_a_bucket() -> None:
    model = make_model("small")
    with engine_on(8, model, blocks_of(model), stage=0, bucket_bytes=150_000) as engine:
        assert calls_of_a_step(engine) == ["AR 1+model.layers.0", "AR root"]


def test_everything_is_freed_after_the_step_and_after_evaluation() -> None:
    model = make_model("small")
    with engine_on(8, model, blocks_of(model), stage=3) as engine:
        calls_of_a_step(engine)
        assert all(flat.full.untyped_storage().nbytes() == 0 for flat in engine.flats)
        with torch.no_grad():
            engine(*make_batch(0, 2, 8, 67))
        assert all(flat.full.untyped_storage().nbytes() == 0 for flat in engine.flats)


def test_the_running_and_the_next_unit_are_gathered_and_no_more() -> None:
    """Seen from inside each block, forward: itself and, ahead of its turn, the following one."""
    model = make_model("small")
    blocks = blocks_of(model)
    with engine_on(8, model, blocks, stage=3, keep_gathered=False) as engine:
        seen: list[list[str]] = []

        def note_gathered(*_: Any) -> None:
            seen.append([flat.name for flat in engine.flats[1:] if flat.full.untyped_storage().nbytes()])

        for block in blocks:
            block.get_submodule("mlp").register_forward_hook(note_gathered)
        calls_of_a_step(engine)
        seen.clear()
        calls_of_a_step(engine)
        assert seen == [["model.layers.0", "model.layers.1"], ["model.layers.1"]]


# -- modules as people write them -------------------------------------------------------------------------


class Odd(nn.Module):
    """Blocks called twice, skipped, checkpointed from outside, and given no input with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor, *, skips: bool = False) -> Tensor:
        x = self.blocks[0](x)  # x needs no gradient
        x = self.blocks[1](self.blocks[1](x))
        x = checkpoint(self.blocks[2], x, use_reentrant=False)
        if not skips:
            x = self.blocks[3](x)
        loss: Tensor = self.out(x).square().mean()
        return loss


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("keep", [True, False])
def test_odd_modules_train_as_plain_ones(stage: int, keep: bool) -> None:
    """One rank, two micro-batches, four steps; block 3 sits out in every other step.

    Nothing is decayed: to AdamW's decay a gradient of zero is not the same as none.
    """
    torch.manual_seed(0)
    plain, sharded = Odd(), Odd()
    sharded.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0, foreach=False)
    config = {
        "stage": stage,
        "accumulation_steps": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.0,
        "poison": True,
    }
    with engine_on(1, sharded, list(sharded.blocks), keep_gathered=keep, **config) as engine:
        for step in range(4):
            skips = step % 2 == 1
            for micro in range(2):
                x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + micro))
                (plain(x, skips=skips) / 2).backward()
                engine.backward(engine(x, skips=skips))
            for parameter in plain.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            engine.step()
        named = dict(plain.named_parameters())
        for name, value in engine.full_parameters():
            torch.testing.assert_close(value, named[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_around_a_block_does_not_delay_its_reduction(stage: int) -> None:
    """Backward runs block 2 forward again; its hooks see that and leave its one use alone."""
    model = Odd()
    with engine_on(8, model, list(model.blocks), stage=stage) as engine:
        engine.backward(engine(torch.randn(3, 6)))
        engine.step()
        units = [call.module for call in engine.comm.calls if call.kind == "reduce_scatter"]
        assert units == ["blocks.3", "blocks.2", "blocks.1", "blocks.0", "root"]


def test_padding_of_gradients_is_zero() -> None:
    """Whatever memory held before: it would count in the gradient's norm."""
    model = Odd()
    with engine_on(5, model, list(model.blocks), stage=2) as engine:
        flat = engine.flats[1]
        into = torch.full((flat.layout.padded_numel,), 7.0)
        flat.take_gradients(into, accumulate=False)
        assert (flat.layout.numel, flat.layout.padded_numel) == (42, 45)
        assert into.abs().sum() == 0


def test_a_parameter_that_is_not_gathered_has_its_shape_and_no_number() -> None:
    model = make_model("small")
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    with engine_on(8, model, blocks_of(model), stage=3):
        assert weight.shape == (112, 48)
        assert weight.isnan().all()
        with pytest.raises(RuntimeError, match="single memory location"):
            weight.data.add_(1)


def test_a_step_before_all_micro_batches_is_an_error() -> None:
    model = make_model("small")
    with engine_on(2, model, blocks_of(model), stage=1, accumulation_steps=2) as engine:
        engine.backward(engine(*make_batch(0, 2, 8, 67)).loss)
        with pytest.raises(RuntimeError, match="step after 1 of 2 micro-batches"):
            engine.step()


def test_overflow_skips_the_step_and_halves_the_scale() -> None:
    model = make_model("small")
    options = {"stage": 2, "compute_dtype": torch.float16, "loss_scale": "dynamic"}
    with engine_on(1, model, blocks_of(model), **options) as engine:
        tokens, labels = make_batch(0, 2, 8, 67)
        before = dict(engine.full_parameters())
        engine.backward(engine(tokens, labels).loss * float("inf"))
        assert engine.step() is False
        assert (engine.step_count, engine.scaler.scale) == (0, 2.0**15)
        assert all(torch.equal(before[name], value) for name, value in engine.full_parameters())
        engine.backward(engine(tokens, labels).loss)
        assert engine.step() is True


def test_a_model_on_the_meta_device_is_filled_unit_by_unit() -> None:
    with torch.device("meta"):
        model = make_model("tied")
    seen: list[str] = []

    def fill(name: str, tensor: Tensor) -> None:
        seen.append(name)
        tensor.fill_(0.02)

    with fake_world(4):
        engine = ZeroEngine(model, ZeroConfig(stage=3), blocks=blocks_of(model), initialize=fill)
        head, table = "lm_head.weight", "model.embed_tokens.weight"
        assert model.get_parameter(head) is model.get_parameter(table)
        assert len(seen) == len(set(seen)) == len(list(model.parameters()))
        assert not any(parameter.is_meta for parameter in model.parameters())
        assert len(calls_of_a_step(engine)) == 7
        engine.close()
        with pytest.raises(ValueError, match="is on the meta device"), torch.device("meta"):
            ZeroEngine(make_model("tied"), ZeroConfig(stage=3))
