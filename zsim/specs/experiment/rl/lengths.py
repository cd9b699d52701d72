"""`[rl.lengths]`: how long prompts and responses are.

    [rl.lengths]
    max_response = 4096
    correlation = 0.4
    [rl.lengths.prompt]
    mean = 130
    [rl.lengths.response]
    mean = 1020
    sigma = 0.8

    [rl.lengths.growth]
    mean = 3000
    steps = 400

A response ends at the cap at the latest. `mean` is that of the lengths as they are cut, which is what
training logs print.
"""

# See [Note: annotations of tables].

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from zsim.specs.strategy.table import StrictTable

Length = Annotated[int, Field(gt=0, le=2**27, strict=True)]
LengthLawName = Literal["constant", "uniform", "exponential", "lognormal"]
DEFAULT_SIGMA = 0.8
"""Standard deviation of the logarithm of responses' lengths where nothing is said. Answers to one set of
mathematical questions: 0.6 to 0.9."""


class LengthLaw(StrictTable):
    """A law of lengths, in tokens."""

    law: LengthLawName | None = Field(
        default=None,
        description='"constant", "uniform" (low to high), "exponential" or "lognormal"; left out: lognormal '
        "where sigma is given, uniform where low and high are, else constant",
    )
    mean: Annotated[float, Field(gt=0, le=2**27)] | None = Field(
        default=None, description="mean length, after the cap; left out: median, or low and high, say it"
    )
    median: Annotated[float, Field(gt=0, le=2**27)] | None = Field(
        default=None,
        description="median length of the lognormal law, in place of mean; left out: mean says it",
    )
    sigma: Annotated[float, Field(ge=0, le=5)] | None = Field(
        default=None,
        description="standard deviation of the length's natural logarithm; left out: 0.8 for responses",
    )
    low: Length | None = Field(default=None, description="shortest length; left out: 1")
    high: Length | None = Field(default=None, description="longest length; left out: the cap")
    values: Annotated[tuple[Length, ...], Field(min_length=1, max_length=100_000)] | None = Field(
        default=None, description="lengths of real samples, drawn alike likely, in place of a law; left out: "
        "the law",
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        if self.values is not None:
            if any(
                value is not None
                for value in (self.law, self.mean, self.median, self.sigma, self.low, self.high)
            ):
                raise ValueError("found values beside a law; expected one of them")
            return self
        if self.mean is not None and self.median is not None:
            raise ValueError("found mean and median; expected one of them")
        if self.law == "uniform" or (self.law is None and self.mean is None and self.median is None):
            if self.low is None or self.high is None:
                raise ValueError("expected a mean, a median, low and high, or values")
        elif self.mean is None and self.median is None:
            raise ValueError(f"law '{self.law}' needs a mean or a median")
        if self.median is not None and self.law not in (None, "lognormal"):
            raise ValueError(f"law '{self.law}' has no median; expected mean")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"high is {self.high:,}, below the low of {self.low:,}")
        return self


class GrowthTable(StrictTable):
    """`[rl.lengths.growth]`: how responses get longer over a run, which `zsim goodput` simulates."""

    mean: Annotated[float, Field(gt=0, le=2**27)] = Field(description="mean length at the end of the growth")
    steps: Annotated[int, Field(gt=0, le=10**9, strict=True)] = Field(
        description="steps from response.mean to this mean, which stays from then on"
    )
    law: Literal["linear", "exponential"] = Field(
        default="linear", description="as many tokens more at every step, or as many percent"
    )

    def mean_at(self, step: float, first: float) -> float:
        """The mean at a step of a run that begins with `first` tokens."""
        part = min(1.0, step / self.steps)
        if self.law == "linear":
            return first + part * (self.mean - first)
        return float(first * (self.mean / first) ** part)


class RlLengthsTable(StrictTable):
    """`[rl.lengths]`."""

    prompt: LengthLaw = Field(description="tokens of prompts")
    response: LengthLaw = Field(description="tokens of responses, over all turns")
    max_response: Length | None = Field(
        default=None,
        description="the cap, at which generation stops; left out: that of the law, or sequence_length less "
        "the longest prompt",
    )
    correlation: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.3,
        description="correlation of the logarithms of lengths within a prompt, as hard questions have long "
        "answers",
    )
    growth: GrowthTable | None = Field(
        default=None, description="responses that get longer over the run; left out: they stay as they are"
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, strict=True, description="seed of the draws")
