"""Small models and plans of them, for the tests of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Plan
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import (
    Activation,
    Attention,
    Block,
    Embedding,
    Linear,
    Loss,
    ModelSpec,
    Module,
    Norm,
    Parameter,
    Residual,
)
from zsim.specs.strategy.training import TrainingConfig

MakePlan = Callable[..., Plan]


def training(**changes: Any) -> TrainingConfig:
    """Two sequences of three tokens in bf16, plain SGD."""
    values: dict[str, Any] = {
        "sequence_length": 3,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "precision": "bf16",
        "activation_checkpointing": "none",
        "attention": "flash",
        "compile": False,
        "optimizer": "sgd",
        "gradient_clipping": 0.0,
    }
    return TrainingConfig(**{**values, **changes})


def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Module:
    """A Linear from `columns` to `rows` features."""
    parameters = [Parameter("weight", (rows, columns))]
    if bias:
        parameters.append(Parameter("bias", (rows,)))
    return Module(name, Linear(columns, rows), tuple(parameters))


def linear_blocks(shapes: Sequence[tuple[int, int]], root: int = 0, *, bias: bool = False) -> ModelSpec:
    """Blocks of one Linear each, of the given (rows, columns); `root` elements outside them, in a norm that
    runs first."""
    norm = (Module("norm", Norm(root), (Parameter("weight", (root,)),)),) if root else ()
    blocks = tuple(Block("linear", (linear("linear", *shape, bias=bias),)) for shape in shapes)
    return ModelSpec(
        name="linears",
        family="toy",
        hidden_size=shapes[0][1],
        vocab_size=8,
        max_positions=None,
        before=norm,
        blocks=blocks,
        after=(Module("loss", Loss(8)),),
        block_prefix="layers",
        is_tied=False,
        source="made up",
    )


def transformer(
    num_blocks: int = 4, width: int = 16, vocab: int = 100, *, is_tied: bool = False
) -> ModelSpec:
    """Embedding, blocks of attention (4 w^2) and MLP (8 w^2), norm, head; module names as in Llama.

    With width 16 a block has 1024 + 2048 = 3072 elements, embedding and head 1600 each, the norm 32.
    """
    block = Block(
        "toy",
        (
            linear("attn.qkv", 3 * width, width),
            Module("attn.core", Attention(2, 2, width // 2, width // 2, rotary=False)),
            linear("attn.o", width, width),
            Module("attn_residual", Residual(width)),
            linear("mlp.up", 4 * width, width),
            Module("mlp.act", Activation(4 * width, False, "relu")),
            linear("mlp.down", width, 4 * width),
            Module("residual", Residual(width)),
        ),
    )
    table = (Parameter("weight", (vocab, width)),)
    norm = (Parameter("weight", (width,)), Parameter("bias", (width,)))
    return ModelSpec(
        name="toy",
        family="toy",
        hidden_size=width,
        vocab_size=vocab,
        max_positions=None,
        before=(Module("model.emb", Embedding(vocab, width), table),),
        blocks=(block,) * num_blocks,
        after=(
            Module("model.norm", Norm(width, "layer"), norm),
            Module("lm_head", Linear(width, vocab), () if is_tied else table),
            Module("loss", Loss(vocab)),
        ),
        block_prefix="model.layers",
        is_tied=is_tied,
        source="made up",
    )


def plan_for(**keys: Any) -> Plan:
    """The plan of an experiment; by default Llama-2-7B on two DGX H100 nodes, 2048 tokens."""
    base: dict[str, Any] = {"model": "llama-2-7b", "cluster": "dgx-h100", "nodes": 2}
    keys.setdefault("training", {})
    keys["training"] = {"sequence_length": 2048, **keys["training"]}
    return make_plan(resolve(Experiment(**{**base, **keys})))


def collectives_of(plan: Plan, kind: str | None = None) -> list[Collective]:
    """Collective calls in issue order."""
    works = [op.work for op in plan.ops if isinstance(op.work, Collective)]
    return [work for work in works if kind in (None, work.kind)]


def host_levels(plan: Plan) -> dict[str, list[int]]:
    """GPU bytes of each category after each change, in the order in which the host makes them."""
    now: dict[str, int] = {}
    for memory in plan.resident:
        now[memory.category] = now.get(memory.category, 0) + memory.bytes
    levels: dict[str, list[int]] = {category: [level] for category, level in now.items()}
    for change in plan.memory:
        now[change.category] = now.get(change.category, 0) + change.bytes
        levels.setdefault(change.category, [0]).append(now[change.category])
    return levels


def host_peaks(plan: Plan) -> dict[str, int]:
    """The highest level of each category."""
    return {category: max(levels) for category, levels in host_levels(plan).items()}


@pytest.fixture(name="plan_for", scope="session")
def _plan_for() -> MakePlan:
    return plan_for


@pytest.fixture(name="toys", scope="session")
def _toys() -> Any:
    """The functions of this file, as attributes."""
    return SimpleNamespace(
        training=training,
        linear=linear,
        linear_blocks=linear_blocks,
        transformer=transformer,
        collectives_of=collectives_of,
        host_levels=host_levels,
        host_peaks=host_peaks,
    )
