"""Requests to an inference engine, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class SampleRequest:
    """One response to be generated. Engines of zsim know beforehand where it ends."""

    number: int
    group: int
    """The prompt that it answers. Requests of one group share its tokens."""
    prompt_tokens: int
    response_tokens: int
    generated: int = 0
    """Tokens of the response that exist."""
    computed: int = 0
    """Tokens of prompt and response whose keys and values are in the cache."""
    shared_blocks: int = 0
    """Blocks of its prompt that another request of its group holds."""
    preemptions: int = 0
    start_seconds: float | None = None
    """Time at which it was first submitted."""
    first_seconds: float = 0.0
    """Time of its first token."""
    end_seconds: float = 0.0
    """Time of its last token."""

    later_turns: tuple[int, ...] = ()
    """Tokens of the turns that follow, after an environment has answered."""

    @property
    def is_finished(self) -> bool:
        """Whether all tokens of all turns exist."""
        return not self.later_turns and self.generated >= self.response_tokens

    def begin_turn(self, observation_tokens: int) -> None:
        """Go on with the next turn, behind the tokens of the environment."""
        self.prompt_tokens += observation_tokens
        self.response_tokens += self.later_turns[0]
        self.later_turns = self.later_turns[1:]

    @property
    def length(self) -> int:
        """Tokens of prompt and response that exist."""
        return self.prompt_tokens + self.generated

    @property
    def remaining(self) -> int:
        """Tokens that are still to be generated."""
        return self.response_tokens - self.generated


@dataclass(slots=True)
class EngineLog:
    """Counters of a replica, and how many sequences ran when."""

    prefill_tokens: int = 0
    """Tokens of prompts and of preempted sequences that were computed."""
    cached_tokens: int = 0
    """Tokens of prompts that were found in the cache."""
    recomputed_tokens: int = 0
    """Tokens among `prefill_tokens` that had been computed before, until a preemption."""
    generated_tokens: int = 0
    preemptions: int = 0
    iterations: int = 0
    busy_seconds: float = 0.0
    peak_blocks: int = 0
    """Largest number of blocks of the cache in use."""
    times: list[float] = field(default_factory=list)
    """Times at which the number of running sequences changed."""
    running: list[int] = field(default_factory=list)
    """Running sequences from each of these times on."""
    blocks: list[int] = field(default_factory=list)
    """Blocks in use from each of these times on."""
