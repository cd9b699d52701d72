"""Real and padded tokens of a step whose documents differ in length."""

from __future__ import annotations

from zsim.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Padding:
    """Tokens of a mean replica's step: `tokens` of documents, `padded_tokens` that are computed; and
    `slowest_over_mean`, the FLOPs of the slowest rank over those of the mean one."""

    tokens: float
    padded_tokens: float
    slowest_over_mean: float

    def to_dict(self, step_seconds: float, gpus: int) -> dict[str, float]:
        """The entry `lengths` of a report; `gpus` train on a replica."""
        return {
            "tokens_per_second_per_gpu": self.tokens / gpus / step_seconds,
            "padded_tokens_per_second_per_gpu": self.padded_tokens / gpus / step_seconds,
            "padding_fraction": 1 - self.tokens / self.padded_tokens,
            "slowest_over_mean": self.slowest_over_mean,
        }
