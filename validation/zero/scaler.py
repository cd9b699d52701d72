"""Loss scaling: fp16 gradients are scaled up above fp16's smallest number, 6e-8, and back down before the
step.

Micikevicius et al. 2018, section 3.2. Dynamic: too large a scale overflows to inf, which is harmless if the
step is skipped; so halve on overflow, and double after a number of steps without."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScaler:
    """`scale` multiplies the loss; it doubles after `window` good steps (0: it never changes)."""

    scale: float
    window: int
    good_steps: int = 0
    skipped_steps: int = 0

    def update(self, overflowed: bool) -> None:
        """Update the scale after each step; all ranks must agree on `overflowed`."""
        if overflowed:
            self.skipped_steps += 1
            self.good_steps = 0
            if self.window:
                self.scale = max(1.0, self.scale / 2)
            return
        self.good_steps += 1
        if self.window and self.good_steps % self.window == 0:
            self.scale *= 2

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]
        self.good_steps, self.skipped_steps = int(state["good_steps"]), int(state["skipped_steps"])
