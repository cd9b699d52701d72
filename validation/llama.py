"""Llama in plain torch, with the module names of Hugging Face's `LlamaForCausalLM`.

Small enough to read, real enough to shard: grouped-query attention, rotary embedding, RMSNorm, SwiGLU,
optional tied head, checkpointing per block. `model(tokens, labels)` gives the loss and the logits.

The same numbers in two implementations, because they save different tensors for backward: `transformers`
(5.23) spells RMSNorm out in fp32; `torchtitan` uses the fused kernel that it is on a GPU.

# [Note: Hugging Face's modules] Every module of `LlamaForCausalLM` exists here, in the same order, including
those without parameters: DeepSpeed's ZeRO-3 hooks them all, and each hook is a chance to prefetch.
Checkpointing is inside the block's forward, so hooks on the block stay outside of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from validation import fused


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama, named as in Hugging Face's config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool = False
    rope_theta: float = 500_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_config(cls, path: Path) -> LlamaShape:
        """The shape in a Hugging Face config.json of a Llama."""
        config = json.loads(path.read_text())
        if config.get("model_type") != "llama":
            raise ValueError(f"{path}: model_type is {config.get('model_type')!r}; expected 'llama'")
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            vocab_size=config["vocab_size"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
        )


# Sizes from the config.json of each model on Hugging Face.
SHAPES = {
    "llama-2-7b": LlamaShape(4096, 11008, 32, 32, 32, 32000),
    "llama-2-70b": LlamaShape(8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": LlamaShape(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": LlamaShape(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": LlamaShape(16384, 53248, 126, 128, 8, 128256),
    "llama-3.2-1b": LlamaShape(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
    "llama-tiny": LlamaShape(64, 160, 4, 4, 2, 128),  # for tests; no such model was released
}


Code = Literal["transformers", "torchtitan"]


def find_shape(name: str) -> LlamaShape:
    """A shape by name; `name@4` for only its first four blocks; or from the path of a config.json."""
    base, _, layers = name.partition("@")
    if base in SHAPES:
        shape = SHAPES[base]
    elif Path(base).is_file():
        shape = LlamaShape.from_config(Path(base))
    else:
        raise ValueError(f"no Llama named '{base}'; expected one of {', '.join(SHAPES)} or a config.json")
    return replace(shape, num_hidden_layers=int(layers)) if layers else shape


class Output(NamedTuple):
    """The loss and the logits of a language model."""

    loss: Tensor
    logits: Tensor


class RMSNorm(nn.Module):
    """x / rms(x) * weight, each operation in the order of `LlamaRMSNorm`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class FusedRMSNorm(RMSNorm):
    """[Note: one kernel where the GPU has one kernel]"""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = fused.rms_norm(x, self.weight, 1e-5)[0]
        return normed


NORMS: dict[Code, type[RMSNorm]] = {"transformers": RMSNorm, "torchtitan": FusedRMSNorm}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: the two halves of each head as real and imaginary parts."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        kv_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, heads(self.v_proj(x)), is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One block. With `checkpointing` only its input is saved, and backward recomputes its forward."""

    def __init__(self, shape: LlamaShape, checkpointing: bool, code: Code) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = NORMS[code](shape.hidden_size)
        self.post_attention_layernorm = NORMS[code](shape.hidden_size)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(self.compute, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            return out
        return self.compute(x, cos, sin)

    def compute(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class RotaryEmbedding(nn.Module):
    """cos and sin for each position and half-head coordinate, each repeated for both halves."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim, self.theta = shape.head_dim, shape.rope_theta

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length, device = x.shape[1], x.device
        exponents = torch.arange(0, self.head_dim, 2, device=device) / self.head_dim
        angles = torch.outer(torch.arange(length, device=device).float(), self.theta**-exponents)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Decoder(nn.Module):
    """Embedding, blocks, final norm. [Note: Hugging Face's modules]"""

    def __init__(self, shape: LlamaShape, checkpointing: bool, code: Code) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, checkpointing, code) for _ in range(shape.num_hidden_layers)
        )
        self.norm = NORMS[code](shape.hidden_size)
        self.rotary_emb = RotaryEmbedding(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed


class Llama(nn.Module):
    """`loss, logits = model(tokens, labels)`, both of shape (batch, length); label i is for token i."""

    def __init__(
        self, shape: LlamaShape, *, checkpointing: bool = False, code: Code = "transformers"
    ) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, checkpointing, code)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Output:
        logits = self.lm_head(self.model(tokens))
        return Output(F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), logits)
