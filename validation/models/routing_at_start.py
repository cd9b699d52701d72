"""How full the fullest expert is in the first steps of a mixture of experts.

    python validation/models/routing_at_start.py EXPERTS {packed|unpacked} SEED

trains a decoder of KempnerForge's width for 20 steps on the CPU and prints, per step, the rows of the fullest
expert over the mean (mean of all layers, and of the worst) and the fewest rows over the most. Width, heads,
initialisation (0.02; unpacked experts' second products by the root of twice the layers less), loss that
balances (0.01), AdamW and warm-up of 5 steps are those of its benchmark
(benchmarks/moe_packed/moe_packed_bench.sh, kempnerforge/model/init.py at 5666d0d1); 10 layers instead of 24,
and a text of Zipf's law of which every second token follows from the one before.

The width counts: a router's scores begin with the root of it, and as AdamW moves every weight by the same
step they move with the width itself. A copy 384 wide, which stood here, gave 1.77, 2.37, 2.31 and 2.90. An
expert's inner features are 256 instead of 7,168: its second product's weights are drawn wider by the root of
what is missing and learn as many times faster, so that its output begins and moves as the whole one's.
Figures of steps 11 to 20, seed 0: 8 experts, packed 3.73, unpacked 3.87; 16 experts, packed 6.90, unpacked
7.64, which the rules of published_sources.toml have; seed 1, 8 packed: 3.59. 6 to 20 min and 6 to 8 GB a run.
"""

from __future__ import annotations

import math
import sys
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, FEATURES, HEADS, KV_HEADS, VOCABULARY, LAYERS = 2048, 256, 16, 4, 16384, 10
MISSING = 7168 / FEATURES  # of an expert's inner features
SEQUENCES, LENGTH, STEPS, WARM_UP, TOP_K, RATE = 2, 512, 20, 5, 2, 3e-4
HEAD = WIDTH // HEADS
TOKENS = SEQUENCES * LENGTH


def drawn(*shape: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.02 * scale)


def layer(experts: int, is_packed: bool) -> dict[str, nn.Parameter]:
    less = 1 / math.sqrt(2 * LAYERS)
    return {
        "q": drawn(WIDTH, WIDTH), "k": drawn(KV_HEADS * HEAD, WIDTH), "v": drawn(KV_HEADS * HEAD, WIDTH),
        "o": drawn(WIDTH, WIDTH, scale=less), "router": drawn(experts, WIDTH),
        "norm": nn.Parameter(torch.ones(WIDTH)), "second_norm": nn.Parameter(torch.ones(WIDTH)),
        "gate": drawn(experts, FEATURES, WIDTH), "up": drawn(experts, FEATURES, WIDTH),
        "down": drawn(experts, WIDTH, FEATURES, scale=math.sqrt(MISSING) * (1.0 if is_packed else less)),
    }  # fmt: skip


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def attention(x: Tensor, one: dict[str, nn.Parameter], rotation: Tensor) -> Tensor:
    def heads(weight: Tensor) -> Tensor:
        return (x @ weight.T).view(SEQUENCES, LENGTH, -1, HEAD).transpose(1, 2)

    def rotated(given: Tensor) -> Tensor:
        pairs = torch.view_as_complex(given.reshape(*given.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotation).flatten(-2)

    q, k, v = rotated(heads(one["q"])), rotated(heads(one["k"])), heads(one["v"])
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(TOKENS, WIDTH) @ one["o"].T


def experts_of(x: Tensor, one: dict[str, nn.Parameter]) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the chosen experts, the rows of each, and the loss that balances them."""
    count = len(one["router"])
    scores = F.softmax(x @ one["router"].T, -1)
    weights, chosen = scores.topk(TOP_K, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = torch.bincount(chosen.flatten(), minlength=count)
    out = torch.zeros_like(x)
    for number in range(count):
        token, place = (chosen == number).nonzero(as_tuple=True)
        if len(token):
            given = x[token]
            hidden = F.silu(given @ one["gate"][number].T) * (given @ one["up"][number].T)
            out = out.index_add(0, token, hidden @ one["down"][number].T * weights[token, place, None])
    return out, rows, count * ((rows / (TOP_K * TOKENS)) * scores.mean(0)).sum()


def text(chances: Tensor, follower: Tensor) -> Tensor:
    tokens = torch.multinomial(chances, SEQUENCES * (LENGTH + 1), replacement=True).view(
        SEQUENCES, LENGTH + 1
    )
    for place in range(1, LENGTH + 1):
        follows = torch.rand(SEQUENCES) < 0.5
        tokens[follows, place] = follower[tokens[follows, place - 1]]
    return tokens


def main() -> None:
    experts, is_packed = int(sys.argv[1]), sys.argv[2] == "packed"
    torch.manual_seed(int(sys.argv[3]))
    torch.set_num_threads(1)
    layers = [layer(experts, is_packed) for _ in range(LAYERS)]
    embedding, head, last = (
        drawn(VOCABULARY, WIDTH),
        drawn(VOCABULARY, WIDTH),
        nn.Parameter(torch.ones(WIDTH)),
    )
    parameters = [embedding, head, last, *(one for made in layers for one in made.values())]
    downs = [one["down"] for one in layers]
    others = [one for one in parameters if not any(one is down for down in downs)]
    optimizer = torch.optim.AdamW(
        [{"params": others}, {"params": downs}], lr=RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    angles = torch.outer(torch.arange(LENGTH), 5e5 ** (-torch.arange(0, HEAD, 2) / HEAD))
    rotation = torch.polar(torch.ones_like(angles), angles)
    chances = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    chances /= chances.sum()
    follower = torch.multinomial(chances, VOCABULARY, replacement=True)
    late: list[float] = []
    for step in range(STEPS):
        for group, times in zip(optimizer.param_groups, (1.0, MISSING), strict=True):
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * times
            group["weight_decay"] = 0.1 / times
        tokens = text(chances, follower)
        x, balance, counts = embedding[tokens[:, :-1]].view(TOKENS, WIDTH), torch.zeros(()), []
        for one in layers:
            x = x + attention(normed(x) * one["norm"], one, rotation)
            out, rows, loss = experts_of(normed(x) * one["second_norm"], one)
            x, balance = x + out, balance + loss
            counts.append(rows)
        loss = F.cross_entropy(normed(x) * last @ head.T, tokens[:, 1:].reshape(-1)) + 0.01 * balance
        optimizer.zero_grad()
        backward: Any = loss.backward
        backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rows = torch.stack(counts)
        full = [float(each.max()) / (TOP_K * TOKENS / experts) for each in rows]
        late += [mean(full)] if step >= STEPS // 2 else []
        balanced = float(rows.min() / rows.max())
        figures = f"fullest {mean(full):.2f} (worst {max(full):.2f}), fewest over most {balanced:.4f}"
        print(f"{step + 1}: loss {loss.item():.2f}, {figures}", flush=True)
    print(f"steps {STEPS // 2 + 1} to {STEPS}: {mean(late):.2f}")


if __name__ == "__main__":
    main()
