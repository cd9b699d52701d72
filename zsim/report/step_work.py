"""Work of one step: tokens, and FLOPs by a convention and as its kernels compute them."""

from __future__ import annotations

from dataclasses import dataclass

_SHOWN = 0.1  # of the model's FLOPs


@dataclass(frozen=True, slots=True)
class Padding:
    """Tokens of a mean replica's step."""

    tokens: float
    """Tokens of documents."""
    padded_tokens: float
    """Tokens that are computed."""
    slowest_over_mean: float
    """The FLOPs of the slowest rank over those of the mean one."""

    def to_dict(self, step_seconds: float, gpus: int) -> dict[str, float]:
        """The entry `lengths` of a report. `gpus` train on a replica."""
        return {
            "tokens_per_second_per_gpu": self.tokens / gpus / step_seconds,
            "padded_tokens_per_second_per_gpu": self.padded_tokens / gpus / step_seconds,
            "padding_fraction": 1 - self.tokens / self.padded_tokens,
            "slowest_over_mean": self.slowest_over_mean,
        }


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a step. FLOPs are means over GPUs."""

    tokens: float
    """Tokens of a replica."""
    model_flops: float
    """FLOPs of the model by `convention`."""
    hardware_flops: float
    """FLOPs of everything that ran, by `convention`."""
    peak_flops_per_second: float | None
    """The dense peak in `peak_dtype`."""
    convention: str
    peak_dtype: str = ""
    gpus_per_replica: int = 1
    padding: Padding | None = None
    masked_flops: tuple[float, float] = (0.0, 0.0)
    """What masks leave out of the FLOPs of the model, and of everything that ran."""

    @property
    def tokens_per_gpu(self) -> float:
        """One GPU's share of the step's tokens."""
        return self.tokens / self.gpus_per_replica

    @property
    def is_much_masked(self) -> bool:
        """Whether a tenth or more of the model's FLOPs by the convention are pairs that a mask leaves out."""
        return self.masked_flops[0] >= _SHOWN * self.model_flops > 0

    def step_tokens(self, gpus: int) -> int:
        """Tokens of the whole step on `gpus` GPUs, the global batch."""
        return round(self.tokens * (gpus // self.gpus_per_replica))

    def utilisation(self, flops: float, seconds: float) -> float | None:
        """The fraction `flops` of the peak's FLOPs in `seconds`. None without a peak or a time."""
        if not seconds or not self.peak_flops_per_second:
            return None
        return flops / seconds / self.peak_flops_per_second
