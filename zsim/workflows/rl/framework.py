"""A framework of reinforcement learning: the defaults and the times of the host that a loop takes from it.

Each is a module `workflow` of a folder of `zsim.frameworks`, with `WORKFLOW`. `rl.framework` names the
folder, with hyphens for underscores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Literal, cast

from zsim.errors import InputError, did_you_mean
from zsim.specs.experiment.rl import Algorithm, Batching, Placement, Transport
from zsim.specs.strategy.registry import role_of, workflow_names

if TYPE_CHECKING:
    from zsim.specs.experiment.tables import Experiment

Fill = Literal["first-fit", "padded", "even"]
"""How samples fill packed micro-batches, see `zsim.workflows.rl.packing.pack`."""


@dataclass(frozen=True, slots=True)
class SyncRates:
    """The times of a weight sync that are the framework's own."""

    bucket_bytes: float
    seconds_per_tensor: float
    """Python of one parameter: gathering it, renaming it, and the engine's loading of it. At least
    `SINGLE_TENSOR_SECONDS` where none shares a bucket."""
    bytes_per_second: float
    """Rate at which an engine takes buckets over, with all copies. The path to it may be slower, and is the
    only limit where this is infinite.
    """
    seconds: float = 0.0
    """Whatever the model: metadata, and messages between processes."""
    seconds_per_quantized_tensor: float = 0.0
    """More for each where the engine's weights are of fewer bits than the trainer's."""
    trainer_joins: bool = False
    """All ranks of the trainer are members of a broadcast's group, whose rings leave the sender's node by all
    of its network cards. Else one rank is, and the broadcast leaves by its card.
    """


SINGLE_TENSOR_SECONDS = 0.83e-3
"""Seconds of a parameter that is gathered, sent and loaded by a call of its own: the geometric mean of 0.68
and 1.02 ms, those of two syncs of 30 and 235 billion parameters (verl-project/verl docs/advance/
fully_async.md, before its checkpoint engine), as `python -m validation.rl.calibration RUNS.csv` prints it.
With buckets Python has 14 to 54 us of it to find, cut and copy one of 64 to 512 experts (vLLM 0.11.2
models/qwen3_moe.py `load_weights`, whose calls take that on a Xeon with torch 2.13)."""
COMMON_SYNCS: Mapping[Transport, SyncRates] = {
    "reshard": SyncRates(1e9, 0.015e-3, 50e9, 0.25, 0.15e-3),
    "host": SyncRates(4e9, 0.0, 70e9, 0.4),
    "filesystem": SyncRates(4e9, 0.05e-3, 3e9, 1.0),
}
"""Transports that are alike whoever drives them. reshard: 13 syncs of 4 to 671 billion parameters by NCCL
from shard to shard (NVIDIA-NeMo/RL 7ea279ab docs/design-docs/nccl-reshard-refit.md and pull request 2971),
all within a factor of 1.51, simulated 3 % short on average.
host: six syncs from host memory, 212 GB to 1 TB (MoonshotAI/checkpoint-engine 415c3205 README.md), within 14
%. filesystem: assumed, a shared file system of 3 GB/s for writing and reading."""


@dataclass(frozen=True, slots=True)
class Offloads:
    """The states that leave the GPUs of a colocated job for the rollout, and the engine's sleep."""

    parameters: bool
    optimizer: bool
    sleep_level: Literal[0, 1, 2]


@dataclass(frozen=True, slots=True)
class ControllerRates:
    """Python of a step outside all phases: the controller, and the data that it hands out."""

    seconds: float
    """Seconds of a step."""
    seconds_per_million_tokens: float
    """The same for every million tokens of the rollout."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds more of a phase of the trainer, by its name: the data's way to the workers, states that are
    brought back, and results that are collected.
    """


@dataclass(frozen=True, slots=True)
class TrainerDefaults:
    """Keys of the trainer's tables that a framework of reinforcement learning sets, where nobody else
    does."""

    strategy: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    adapter_training: Mapping[str, Any] = field(default_factory=dict)
    """Those of `training` where adapters are trained, unless weights are stored in 16 bits."""
    expert_strategy: Mapping[str, Any] = field(default_factory=dict)
    """Those of `strategy` for models whose experts are spread."""
    expert_parallelism: Mapping[str, Any] = field(default_factory=dict)

    def missing(self, experiment: Experiment) -> dict[str, dict[str, Any]]:
        """These keys by table, where the experiment has none."""
        training = experiment.training
        has_adapters = training.lora is not None and training.stored_dtype == "fp32"
        adapters = self.adapter_training if has_adapters else {}
        tables = {"strategy": self.strategy, "training": {**self.training, **adapters}}
        if experiment.parallelism.expert > 1:
            tables["strategy"] = {**self.strategy, **self.expert_strategy}
            tables["parallelism"] = self.expert_parallelism
        return {
            name: {
                key: value
                for key, value in values.items()
                if key not in getattr(experiment, name).model_fields_set
            }
            for name, values in tables.items()
        }

    def apply(self, experiment: Experiment) -> Experiment:
        """The experiment with these keys where it has none."""
        return experiment.model_copy(
            update={
                name: getattr(experiment, name).model_copy(update=values)
                for name, values in self.missing(experiment).items()
            }
        )

    def changes(self, experiment: Experiment) -> list[str]:
        """The keys that `apply` changes, as "training.activation_checkpointing = full"."""
        return [
            f"{name}.{key} = {str(value).lower() if isinstance(value, bool) else value}"
            for name, values in self.missing(experiment).items()
            for key, value in values.items()
            if getattr(getattr(experiment, name), key) != value
        ]


@dataclass(frozen=True, slots=True)
class RlFramework:
    """The defaults and times of a framework of reinforcement learning."""

    name: str
    engines: Mapping[str, tuple[int, int] | None]
    """Names of `zsim.workflows.rollout.engine.ENGINES`, the default first, with the sequences at once and the
    tokens of an iteration where nobody says how many. None for a hybrid engine, which has the trainer's
    micro-batches."""
    memory_utilization: Mapping[Placement, float]
    """Empty where a hybrid engine takes what its batches need."""
    transports: Mapping[Placement, Transport]
    """The transport of new weights that is the default of a placement."""
    syncs: Mapping[Transport, SyncRates]
    offloads: Offloads
    """Those of the colocated placement."""
    algorithms: tuple[Algorithm, ...]
    controllers: Mapping[Placement, ControllerRates]
    trainer: Mapping[str, TrainerDefaults] = field(default_factory=dict)
    """What the framework sets of its trainer, by the trainer's kind."""
    has_reference: bool = True
    """A reference pass unless the experiment says otherwise."""
    recomputes_logprobs: bool = True
    """A pass for the old log-probabilities unless the experiment says otherwise. Else the engine's are
    taken, however many updates a rollout has (AReaL 4aef98d8 areal/api/cli_args.py `recompute_logprob`)."""
    static_balance: bool = True
    """Requests are dealt out to replicas beforehand."""
    enforces_eager: bool = False
    merges_adapters: bool = False
    """Adapters are added to the weights that engines get. Else engines compute with them beside those."""
    keeps_reference: bool = False
    """A reference stays on the GPUs unless the experiment says otherwise. Else it waits on the host."""
    returns_logprobs: bool = True
    """Engines return a log-probability with every token."""
    runs_engines_by_ray: bool = False
    """Ray runs the ranks of an engine of several GPUs."""
    continues_rollouts: bool = False
    """Responses go on over updates of an asynchronous loop, unless the experiment says otherwise. Else they
    end before the update."""
    in_flight: Literal["staleness"] | int | None = None
    """At most so many samples are under way at once, or a step's prompts times the staleness that is allowed.
    None for all that may still be trained on."""
    max_staleness: float = 1
    """Of an asynchronous loop, unless the experiment says otherwise."""
    trains_finished_first: bool = False
    """The trainer takes prompts in the order in which they end, not in that of their starts. What still runs
    of those that new weights make older than the staleness is given up."""
    max_batches_ahead: float = inf
    """No prompt starts while more batches have ended beyond those in the weights of the engines."""
    streamed_prompts: int = 0
    """Prompts of a replica under way at once where its asynchronous trainer takes them as they end, see
    [Note: stream] of `loop`. 0 where it cannot."""
    reload_bandwidth: float = inf
    """Bytes/s at which a colocated job's offloaded parameters come to the GPUs for each pass of the trainer,
    and leave again. Infinite where they stay until the next rollout.
    """
    has_one_dtype: bool = False
    """The weights that are sent and those of a reference are of the type that the trainer's are. Else of the
    engine's, and in 16 bits.
    """
    recomputes_caches: bool = False
    """After new weights, the caches of responses that go on are computed again."""
    batching: Batching = "packed"
    """How samples become micro-batches of the trainer."""
    fill: Fill = "first-fit"
    """How samples fill packed micro-batches."""
    pads_for_stages: bool = False
    """Packed micro-batches of a trainer with pipeline stages are padded to the fullest."""
    padding: Literal["micro-batch", "rollout", "sides", "cap"] = "micro-batch"
    """The tokens of a padded sample: those of the longest of its micro-batch, of the longest of the rollout,
    of the rollout's longest prompt and longest response, or as many as a sample may have.
    """
    tensor: int = 1
    """Tensor ranks of an engine where nobody says how many."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where the numbers come from, by field."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(self.transports)


def workflow_of(name: str) -> RlFramework:
    """The framework of a name. Raises InputError for one that zsim does not know."""
    if name not in workflow_names():
        raise InputError(
            f"rl.framework: found '{name}', expected one of {', '.join(workflow_names())}"
            f"{did_you_mean(name, workflow_names())}"
        )
    return cast(RlFramework, role_of(name.replace("-", "_"), "workflow", "WORKFLOW"))
