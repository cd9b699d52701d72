"""Small training examples: models with every awkward property, and learnable data.

Random tokens cannot be learned: the loss does not move, and comparing runs on them proves nothing. So the
data are arithmetic progressions. Everything follows from a seed, so all world sizes see the same batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from validation.llama import Llama, LlamaShape, Output

SMALL = LlamaShape(48, 112, 2, 4, 2, 67)  # 67 is prime: nothing divides evenly
MEDIUM = LlamaShape(256, 704, 4, 4, 4, 512)  # 3.5 million parameters: enough to measure bytes on a wire
DEEP = LlamaShape(256, 1024, 24, 4, 4, 256)  # 25 million, in 24 units
TIED = LlamaShape(48, 112, 2, 4, 2, 67, tie_word_embeddings=True)


class Awkward(nn.Module):
    """Uneven shapes, biases, a buffer that changes, a frozen layer, a weight used twice, an unused one."""

    def __init__(self, width: int = 37, vocab: int = 61) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        blocks = [AwkwardBlock(width, is_frozen=index == 1) for index in range(3)]
        blocks[2].second.weight = blocks[0].second.weight  # tied across blocks
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.tensor(1.5))  # no dimension at all
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor, labels: Tensor) -> Output:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x.flatten(0, 1)) * self.scale)
        return Output(F.cross_entropy(logits.float(), labels.flatten()), logits)


class AwkwardBlock(nn.Module):
    def __init__(self, width: int, is_frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, 3 * width + 1)
        self.second = nn.Linear(3 * width + 1, width, bias=False)
        self.unused = nn.Parameter(torch.ones(5))
        if is_frozen:
            self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)))


def small_llama(checkpointing: bool = False) -> nn.Module:
    return Llama(SMALL, checkpointing=checkpointing)


def medium_llama(checkpointing: bool = False) -> nn.Module:
    return Llama(MEDIUM, checkpointing=checkpointing)


def deep_llama(checkpointing: bool = False) -> nn.Module:
    return Llama(DEEP, checkpointing=checkpointing)


def tied_llama(checkpointing: bool = False) -> nn.Module:
    return Llama(TIED, checkpointing=checkpointing)


def awkward(checkpointing: bool = False) -> nn.Module:
    return Awkward()


MODELS: dict[str, Callable[..., nn.Module]] = {
    "small": small_llama,
    "medium": medium_llama,
    "deep": deep_llama,
    "tied": tied_llama,
    "awkward": awkward,
}


def make_model(name: str, seed: int = 0, checkpointing: bool = False) -> nn.Module:
    """The model, with the same weights for the same seed in every process."""
    torch.manual_seed(seed)
    return MODELS[name](checkpointing)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded as separate units."""
    layers = model.model.layers if isinstance(model, Llama) else model.blocks
    return list(layers)  # type: ignore[arg-type]


def vocab_of(model: nn.Module) -> int:
    head = model.lm_head if isinstance(model, Llama) else model.head
    assert isinstance(head, nn.Linear)
    return head.out_features


def make_batch(step: int, sequences: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Global batch of a step: progressions `first + stride i (mod vocab)`, and the next element as label."""
    generator = torch.Generator().manual_seed(1000 + step)
    first = torch.randint(0, vocab, (sequences, 1), generator=generator)
    stride = torch.randint(1, 4, (sequences, 1), generator=generator)
    tokens = (first + stride * torch.arange(length + 1)) % vocab
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
