"""The question of a study of rents: the training, its length, and its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zsim.engine.simulator import Simulator
from zsim.errors import InputError
from zsim.report.energy import RunCost, run_cost
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.run_cost import CostTable
from zsim.specs.experiment.tables import Experiment
from zsim.specs.prices import Price
from zsim.study.differences import range_of_row, verdict_of_row
from zsim.study.tune.axis import Base
from zsim.study.tune.evaluate import CandidateResult
from zsim.study.tune.settings import base_of, change_kind
from zsim.validated.verdict import Verdict, verdict_content

# Global batches of Llama 2 (Touvron et al. 2023, arXiv 2307.09288): 4M tokens in pretraining (table 1), 64
# sequences in supervised fine-tuning (section 3.1).
PRETRAINING_BATCH_TOKENS = 4_194_304
FINE_TUNING_BATCH = 64
PRETRAINING_TOKENS = 1e9  # from this number of tokens on a run has the batch of pretraining
METHODS = ("full", "lora", "qlora")
_RANK = 16
# Tables on one cluster, or on what happens to it, and those that no step depends on.
_CLUSTER_KEYS = ("nodes", "gpus", "placement", "faults", "jitter", "jobs", "cost")


@dataclass(frozen=True)
class RentQuestion:
    """A training of so many tokens, its limits, and how it may be cut over GPUs."""

    data: Mapping[str, Any]
    """The experiment, file-shaped, without its cluster."""
    kinds: Sequence[str]
    """The strategies to look at."""
    batch: int
    """Sequences of a step of all GPUs, which every number of GPUs keeps."""
    length: CostTable
    """Tokens or samples to train on, and how often."""
    model_ranks: int = 1
    """Ranks that share a replica of the model."""
    max_hours: float = 720.0
    max_money: float | None = None
    max_gpus: int = 1024

    def base(self, cluster: str, gpus: int, kind: str, simulator: Simulator) -> Base:
        """The training on so many GPUs of a cluster, as the start of a search, with micro-batches of one
        sequence. `simulator` reads the cluster's files.

        Raises InputError and NotSimulatedError as `resolve` does.
        """
        steps = self.batch // (gpus // self.model_ranks)
        training = {**self.data.get("training", {}), "micro_batch_size": 1}
        training["gradient_accumulation_steps"] = steps
        data = {**self.data, "cluster": cluster, "gpus": gpus, "training": training}
        return change_kind(base_of(build_experiment(data, {}, origin="rent"), simulator), kind, simulator)

    def steps(self, base: Base) -> float:
        """Steps of the run, at least one."""
        sequence_length = base.job.training.sequence_length
        tokens = self.length.run_tokens(sequence_length)
        assert tokens is not None, "it has a length"
        return max(1.0, tokens / (self.batch * sequence_length))

    def allows(self, gpus: int) -> bool:
        """Whether replicas on so many GPUs divide the batch."""
        replicas, remainder = divmod(gpus, self.model_ranks)
        return gpus <= self.max_gpus and remainder == 0 and replicas > 0 and self.batch % replicas == 0


def method_changes(method: str, training: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides of an experiment with this `[training]` for a method of `METHODS`.

    Raises InputError for another name.
    """
    if method not in METHODS:
        raise InputError(f"--method {method}: expected one of {', '.join(METHODS)}")
    if method == "full":
        return {"training.lora": None} if training.get("lora") else {}
    changes: dict[str, Any] = {} if training.get("lora") else {"training.lora.rank": _RANK}
    return changes | {"training.lora.quantized": "nf4" if method == "qlora" else None}


def usual_batch(tokens: float, sequence_length: int) -> int:
    """Sequences of a step where nothing says how many: those of `PRETRAINING_BATCH_TOKENS`, as a power of two
    that many numbers of GPUs divide, or `FINE_TUNING_BATCH` below `PRETRAINING_TOKENS`.
    """
    if tokens < PRETRAINING_TOKENS:
        return FINE_TUNING_BATCH
    sequences = max(1, PRETRAINING_BATCH_TOKENS // sequence_length)
    return 1 << (sequences.bit_length() - 1)


def rent_question(
    experiment: Experiment,
    length: CostTable,
    kinds: Sequence[str] = (),
    *,
    batch: int | None = None,
    is_batch_usual: bool = False,
    max_hours: float = 720.0,
    max_money: float | None = None,
    max_gpus: int = 1024,
) -> RentQuestion:
    """The question on an experiment's training, whose cluster does not count.

    `kinds` are by default the experiment's own. `batch` is by default its global batch, or with
    `is_batch_usual` that of `usual_batch`. Raises InputError for a run without a length, limits that are not
    positive, and experiments of reinforcement learning.
    """
    if experiment.rl is not None:
        raise InputError("rent: found [rl], whose steps are not searched; expected a training")
    if length.tokens is None and length.samples is None:
        raise InputError("rent: how long is the run? expected --tokens N (20M, 1T) or --samples N")
    for name, limit in (("--max-hours", max_hours), ("--max-money", max_money)):
        if limit is not None and not limit > 0:
            raise InputError(f"{name} {limit:g}: expected more than 0")
    start = base_of(experiment)
    split, sequence_length = start.job.parallelism, start.job.training.sequence_length
    tokens = length.run_tokens(sequence_length)
    assert tokens is not None, "it has a length"
    usual = usual_batch(tokens, sequence_length) if is_batch_usual else start.batch_sequences
    data = {key: value for key, value in start.data.items() if key not in _CLUSTER_KEYS}
    training = {key: value for key, value in data.get("training", {}).items() if key != "global_batch_size"}
    return RentQuestion(
        {**data, "training": training}, tuple(kinds) or (start.kind,), batch or usual, length,
        split.model_ranks, max_hours, max_money, max_gpus,
    )  # fmt: skip


_HOURS_PER_DAY = 24.0


@dataclass(frozen=True)
class Offer:
    """A number of GPUs of a cluster, the configuration to run on them, and what the run then takes."""

    cluster: str
    gpus: int
    label: str
    """The configuration in words."""
    overrides: Mapping[str, Any]
    """The configuration as keys of an experiment."""
    verdict: Verdict
    step_seconds: float
    step_seconds_range: tuple[float, float]
    """The interval of 80 %."""
    cost: RunCost
    price: Price | None

    @property
    def hours(self) -> float:
        return _HOURS_PER_DAY * (self.cost.days or 0.0)

    @property
    def gpu_hours(self) -> float:
        return self.cost.gpu_hours or 0.0

    @property
    def money(self) -> float | None:
        return self.cost.money

    @property
    def outlay(self) -> float:
        """Money, or GPU-hours where the price is not known: the quantity to be minimised."""
        return self.gpu_hours if self.money is None else self.money

    def scale(self, value: float) -> tuple[float, float]:
        """The interval of a quantity that is proportional to the step."""
        low, high = self.step_seconds_range
        return value * low / self.step_seconds, value * high / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        money = self.money
        return {
            "cluster": self.cluster, "gpus": self.gpus, "label": self.label,
            "overrides": dict(self.overrides), **verdict_content(self.verdict),
            "step_seconds": self.step_seconds, "step_seconds_range": list(self.step_seconds_range),
            "days": self.cost.days, "days_range": list(self.scale(self.cost.days or 0.0)),
            "gpu_hours": self.gpu_hours, "money": money,
            "money_range": None if money is None else list(self.scale(money)),
            "currency": self.cost.currency,
            "price": None if self.price is None else self.price.model_dump(),
        }  # fmt: skip


def offer_of(
    result: CandidateResult, cluster: str, length: CostTable, price: Price | None, currency: str
) -> Offer:
    """The offer of a simulated configuration on a cluster, for a run of this length."""
    row, base = result.row, result.candidate.base
    table = length.model_copy(
        update={"gpu_hour_price": None if price is None else price.gpu_hour_price, "currency": currency}
    )
    cost = run_cost(
        table, None, step_seconds=result.seconds, step_tokens=row["step_tokens"],
        step_samples=base.batch_sequences, gpus=result.gpus, nodes=row["nodes"],
        parameters=base.job.model.numel,
    )  # fmt: skip
    verdict = verdict_of_row(row)
    assert verdict is not None, "a row of this release has one"
    interval = range_of_row(row) or (result.seconds, result.seconds)
    return Offer(
        cluster, result.gpus, result.candidate.label, result.candidate.overrides, verdict, result.seconds,
        interval, cost, price,
    )  # fmt: skip
