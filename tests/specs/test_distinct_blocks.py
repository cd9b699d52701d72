"""Equal blocks of a model are one object, and are changed as one."""

from __future__ import annotations

from dataclasses import replace

from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import Block


def test_a_change_is_made_once_per_shape() -> None:
    """DeepSeek-V3: 3 dense layers, then 58 with experts."""
    model, made = load_model("deepseek-v3"), []

    def change(block: Block) -> Block:
        made.append(block)
        return replace(block, kind=f"{block.kind} again")

    changed = model.map_blocks(change)
    assert tuple(made) == model.unique_blocks == (model.blocks[0], model.blocks[3])
    assert [block.kind for block in changed.blocks] == [f"{block.kind} again" for block in model.blocks]
    assert len(changed.unique_blocks) == 2
