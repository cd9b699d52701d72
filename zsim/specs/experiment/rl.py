"""`[rl]` of an experiment: reinforcement learning on the trainer that the other tables describe.

    [rl]
    algorithm = "grpo"
    placement = "colocated"
    framework = "verl"
    prompts_per_step = 64
    samples_per_prompt = 32

What is left out is the framework's own default.

`[rl.lengths]` says how long prompts and responses are.

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

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, field_validator, model_validator

from zsim.specs.lazy_model import StrictTable
from zsim.specs.strategy.registry import default_workflow, workflow_names
from zsim.specs.strategy.table import Count
from zsim.units import Bytes, Duration, Length

LengthLawName = Literal["constant", "uniform", "exponential", "lognormal"]
DEFAULT_SIGMA = 0.8
"""Standard deviation of the logarithm of responses' lengths where nothing is said. Answers to one set of
mathematical questions: 0.6 to 0.9."""


class LengthLaw(StrictTable):
    """A law of lengths, in tokens."""

    law: LengthLawName | None = Field(
        default=None,
        description="distribution; left out: lognormal with sigma, uniform with low and high, else constant",
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
        default=None, description="lengths of real samples to draw from; left out: the law",
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
        description="steps from response.mean to this mean, then constant"
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
        description="correlation of the logarithms of lengths within a prompt",
    )
    growth: GrowthTable | None = Field(
        default=None, description="responses that get longer over the run; left out: they stay as they are"
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, strict=True, description="seed of the draws")


Algorithm = Literal["grpo", "ppo", "dapo", "rloo", "dpo", "online-dpo"]
Placement = Literal["colocated", "split", "async"]
Transport = Literal["ipc", "broadcast", "reshard", "filesystem", "host"]
Batching = Literal["packed", "unpadded", "padded"]
Fraction = Annotated[float, Field(gt=0, le=1)]


class RolloutTable(StrictTable):
    """`[rl.rollout]`: the inference engine and its replicas."""

    engine: Literal["vllm", "sglang", "trtllm"] | None = Field(
        default=None, description="the inference engine; left out: the framework's"
    )
    engine_version: str | None = Field(
        default=None,
        description='release, as "0.11": vLLM before 0.14 (under Ray 0.25) schedules no iteration '
        "ahead; left out: a recent one",
    )
    gpus: Count | None = Field(
        default=None,
        description="GPUs of a separate rollout, from the job's; left out: half",
    )
    tensor: Count = Field(default=1, description="ranks of a replica that share every layer")
    expert: Count = Field(default=1, description="ranks that share a layer's experts; 1: as tensor has them")
    gpu_memory_utilization: Fraction | None = Field(
        default=None, description="part of the GPU's memory that the engine takes; left out: the framework's"
    )
    max_num_seqs: Count | None = Field(
        default=None, description="sequences that a replica runs at once; left out: the framework's"
    )
    max_num_batched_tokens: Count | None = Field(
        default=None, description="tokens of one iteration; left out: the framework's"
    )
    enforce_eager: StrictBool | None = Field(
        default=None, description="kernels are launched one by one, without CUDA graphs; left out: the "
        "framework's",
    )  # fmt: skip
    prefix_caching: StrictBool = Field(
        default=True, description="prompts that a replica has computed are not computed again"
    )
    precision: Literal["bf16", "fp16", "fp8"] = Field(default="bf16", description="type of the weights")
    kv_dtype: Literal["bf16", "fp16", "fp8"] = Field(default="bf16", description="type of keys and values")
    balance: Literal["static", "least-loaded"] | None = Field(
        default=None,
        description="requests are assigned in advance, or to the replica with the fewest; left out: "
        "the framework's",
    )
    draft_tokens: Annotated[int, Field(ge=0, le=16, strict=True)] = Field(
        default=0, description="tokens that speculative decoding proposes per iteration"
    )
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="part of the proposed tokens that is accepted; left out: not used"
    )

    @field_validator("engine_version")
    @classmethod
    def _check_release(cls, value: str | None) -> str | None:
        if value is not None and re.match(r"\d+\.\d+", value) is None:
            raise ValueError(f"found '{value}', expected a release, as \"0.11\"")
        return value


class SyncTable(StrictTable):
    """`[rl.sync]`: how new weights come to the engines."""

    transport: Transport | None = Field(
        default=None,
        description="shared GPU memory, the trainer's broadcast, shard to shard, files, or host "
        "memory; left out: the framework's",
    )
    bucket: Bytes | None = Field(
        default=None,
        description="bytes handed over at once, 0: one parameter; left out: the framework's",
    )
    every: Count = Field(default=1, description="steps between two syncs")
    overlap: StrictBool = Field(
        default=False, description="the trainer goes on while engines get new weights"
    )


class OffloadTable(StrictTable):
    """`[rl.offload]`: what leaves the GPUs of a colocated job between phases."""

    parameters: StrictBool | None = Field(
        default=None, description="the trainer's parameters during the rollout; left out: the framework's"
    )
    optimizer: StrictBool | None = Field(
        default=None, description="the optimizer's states during the rollout; left out: the framework's"
    )
    sleep_level: Literal[0, 1, 2] | None = Field(
        default=None,
        description="the engine while training: 0 stays, 1 weights on the host, 2 weights dropped; "
        "left out: the framework's",
    )


class RewardTable(StrictTable):
    """`[rl.reward]`: what scores a response."""

    seconds_per_sample: Annotated[Duration, Field(ge=0)] = Field(
        default=0.0, description="time of a rule, on one of its workers"
    )
    workers: Count = Field(default=64, description="responses that are scored at once")
    overlap: StrictBool = Field(default=False, description="responses are scored as soon as they end")
    model: str | dict[str, Any] | None = Field(
        default=None,
        description="preset or config.json of a reward model, on the trainer's GPUs; left out: a rule",
    )


class CriticTable(StrictTable):
    """`[rl.critic]`: the model of values, for PPO."""

    model: str | dict[str, Any] | None = Field(
        default=None, description="preset or config.json of the critic; left out: as large as the actor"
    )


class TurnsTable(StrictTable):
    """`[rl.environment]`: turns between the model and an environment."""

    turns: Count = Field(default=1, description="times that the model answers within one sample")
    seconds: Annotated[Duration, Field(ge=0)] = Field(
        default=0.0, description="mean time of the environment between two turns"
    )
    sigma: Annotated[float, Field(ge=0, le=5)] = Field(
        default=0.0, description="standard deviation of the logarithm of that time"
    )
    concurrency: Count | None = Field(
        default=None, description="environments that answer at once; left out: as many as ask"
    )
    observation_tokens: Annotated[int, Field(ge=0, le=2**20, strict=True)] = Field(
        default=0, description="tokens that the environment adds after a turn"
    )


class RlTable(StrictTable):
    """`[rl]`."""

    algorithm: Algorithm = Field(
        default="grpo", description="the algorithm, which decides the models and passes"
    )
    placement: Placement = Field(
        default="colocated",
        description="rollout and training in turn on the same GPUs, in turn on separate ones, or at once",
    )
    framework: str = Field(
        default_factory=default_workflow,
        description=f"whose phases, offloads and times of the host: {', '.join(workflow_names())}; left out: "
        f"{default_workflow()}",
    )
    prompts_per_step: Count = Field(description="prompts of a rollout")
    samples_per_prompt: Count = Field(default=1, description="responses to a prompt")
    mini_batch_samples: Count | None = Field(
        default=None, description="responses of one update; left out: all of the rollout"
    )
    epochs: Count = Field(default=1, description="times that a rollout is trained on")
    batching: Batching | None = Field(
        default=None,
        description="the trainer's micro-batches: packed up to a number of tokens, or "
        "training.micro_batch_size samples, padded or not; left out: the framework's",
    )
    micro_batch_tokens: Count | None = Field(
        default=None,
        description="tokens of a packed micro-batch; left out: those of training.micro_batch_size sequences",
    )
    logprob_micro_batch_size: Count | None = Field(
        default=None,
        description="samples of a micro-batch without backward; left out: training.micro_batch_size",
    )
    logprob_micro_batch_tokens: Count | None = Field(
        default=None,
        description="tokens of such a micro-batch; left out: those of logprob_micro_batch_size sequences, "
        "or of an update",
    )
    reference: Literal["none", "resident", "host"] | None = Field(
        default=None,
        description="reference model: none, on the GPUs, or on the host between passes; left out: the "
        "algorithm's and framework's",
    )
    old_logprobs: Literal["recomputed", "rollout", "skipped"] | None = Field(
        default=None,
        description="old log-probabilities: a pass of the trainer, the engine's, or none (one update "
        "per rollout); left out: the framework's",
    )
    max_staleness: Annotated[float, Field(ge=0, le=64, strict=True)] | None = Field(
        default=None,
        description="steps that responses may lag behind the policy; below 1: the part of prompts one step "
        "old; left out: 0, with async the framework's",
    )
    partial_rollout: StrictBool | None = Field(
        default=None,
        description="unfinished responses continue after a sync; false: they finish first, or with "
        "over_sampling are dropped; left out: the framework's",
    )
    stream_prompts: Count | None = Field(
        default=None,
        description="asynchronous trainers take this many prompts as they end; left out: those of a step, "
        "in the framework's order",
    )
    over_sampling: Annotated[float, Field(ge=1, le=16)] = Field(
        default=1.0, description="prompts started for each one trained on"
    )
    sampling_rounds: Annotated[float, Field(ge=1, le=100)] = Field(
        default=1.0, description="rollouts per step, with DAPO's dynamic sampling"
    )
    lengths: RlLengthsTable = Field(description="tokens of prompts and responses")
    rollout: RolloutTable = Field(default=RolloutTable.model_construct(), description="the engines")
    sync: SyncTable = Field(default=SyncTable.model_construct(), description="new weights for the engines")
    offload: OffloadTable = Field(
        default=OffloadTable.model_construct(), description="what leaves the GPUs between phases"
    )
    reward: RewardTable = Field(default=RewardTable.model_construct(), description="what scores responses")
    critic: CriticTable = Field(default=CriticTable.model_construct(), description="the model of values")
    environment: TurnsTable = Field(
        default=TurnsTable.model_construct(), description="turns with an environment"
    )
