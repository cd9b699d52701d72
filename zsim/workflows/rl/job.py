"""`[rl]` of an experiment with every default filled in: the trainer's jobs and the engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, gcd

from zsim.cost.inference.iteration import EAGER_KERNEL_SECONDS, IterationPricer, Speculation
from zsim.cost.inference.layers import EngineLayout, ServedModel, served_model
from zsim.engine.simulator import Simulator
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.rl import RlTable, Transport
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.adapters import base_model
from zsim.specs.model.expert_layer import has_experts
from zsim.workflows.rl.framework import (
    SINGLE_TENSOR_SECONDS,
    Offloads,
    RlFramework,
    SyncRates,
    workflow_of,
)
from zsim.workflows.rl.packing import PackedBatch, SampleBatching, batch_notes
from zsim.workflows.rl.samples import Samples, check_size, draw_samples
from zsim.workflows.rollout.engine import Engine, engine_of, largest_graph, tensor_all_reduce
from zsim.workflows.rollout.limits import BLOCK_TOKENS, EngineLimits, engine_limits, static_limits

_PACK_MULTIPLE = 64  # to which the tokens of a packed micro-batch are rounded


@dataclass(frozen=True)
class RlJob:
    """An RL step: its trainer, its engines, its samples."""

    experiment: Experiment
    table: RlTable
    framework: RlFramework
    cluster: Cluster
    model: ServedModel
    total_gpus: int
    training_gpus: int
    rollout_gpus: int
    sequence_length: int
    """Tokens of the longest sample, as the trainer has it."""
    samples: Samples
    micro_batch_room: int
    """Tokens that a packed micro-batch has room for."""
    update: PackedBatch
    """The micro-batches of one update."""
    updates: int
    """Updates of a step, epochs included."""
    whole_pass: PackedBatch
    """The micro-batches of a pass without backward over all samples."""
    update_job: Job
    """The job of one update."""
    passes: int
    """Passes without backward: old log-probabilities and the reference's."""
    has_reference: bool
    recomputes_logprobs: bool
    critic_job: Job | None
    """The job of one update of the critic, for PPO. Its head has one output, which is not told apart from the
    actor's."""
    reward_job: Job | None
    """The job of a pass of the reward model over all samples."""
    transport: Transport
    sync: SyncRates
    offloads: Offloads
    limits: EngineLimits
    engine: Engine
    enforces_eager: bool
    has_adapters: bool
    """The trainer trains adapters."""
    max_staleness: float
    continues_rollouts: bool
    """Responses go on over updates."""
    notes: tuple[str, ...]

    @property
    def replicas(self) -> int:
        """Replicas of the engine."""
        return self.rollout_gpus // self.model.layout.gpus

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on a GPU of the rollout."""
        local_blocks = self.limits.cache_blocks // self.model.layout.data
        return local_blocks * BLOCK_TOKENS * self.model.cache_bytes_per_token

    @property
    def serves_adapters(self) -> bool:
        """The engine computes with adapters beside the weights."""
        return self.has_adapters and not self.framework.merges_adapters

    @property
    def keeps_reference(self) -> bool:
        """A reference model of its own stays on the GPUs. With adapters the actor without them is it."""
        value = self.table.reference
        is_resident = self.framework.keeps_reference if value is None else value == "resident"
        return is_resident and self.has_reference and not self.has_adapters

    @property
    def rollout_batches(self) -> int:
        """Batches that a replica without continuous batching generates one after the other, else 1."""
        if not self.limits.has_static_batches:
            return 1
        return ceil(
            self.started_prompts * self.table.samples_per_prompt / self.replicas / self.limits.max_num_seqs
        )

    @property
    def is_colocated(self) -> bool:
        return self.table.placement == "colocated"

    @property
    def is_synchronous(self) -> bool:
        """Rollouts and updates take turns, so that every response is of the newest policy."""
        return self.max_staleness == 0 and not self.streams

    @property
    def streams(self) -> bool:
        """The trainer takes prompts as they end."""
        return self.table.stream_prompts is not None

    @property
    def trains_finished_first(self) -> bool:
        """The trainer takes prompts in the order in which they end."""
        return self.streams or (self.framework.trains_finished_first and not self.is_synchronous)

    @property
    def chunks(self) -> int:
        """Times that the trainer takes prompts in a step."""
        return self.table.prompts_per_step // (self.table.stream_prompts or self.table.prompts_per_step)

    @property
    def limits_samples(self) -> bool:
        """Samples that run have places, each its own. Else prompts have, until their last sample ends."""
        return isinstance(self.framework.in_flight, int) and not (self.streams or self.is_synchronous)

    @property
    def max_in_flight(self) -> int | None:
        """Prompts, or samples, that are under way at once. None for as many as may be started."""
        if self.streams:
            return self.framework.streamed_prompts * self.replicas
        in_flight = self.framework.in_flight
        if self.is_synchronous or in_flight is None:
            return None
        return (
            ceil(self.table.prompts_per_step * self.max_staleness) if in_flight == "staleness" else in_flight
        )

    @property
    def deals_beforehand(self) -> bool:
        """Requests are dealt out in equal parts, not to the replica with the fewest."""
        if self.table.rollout.balance is not None:
            return self.table.rollout.balance == "static"
        return self.framework.static_balance and self.is_synchronous

    @property
    def needed_prompts(self) -> int:
        """Prompts whose responses have to be finished before a step trains."""
        rounds = 1.0 if self.is_synchronous else self.table.sampling_rounds
        return ceil(self.table.prompts_per_step * rounds - 1e-9)

    @property
    def started_prompts(self) -> int:
        """Prompts of a batch, over-sampling included."""
        return ceil(self.needed_prompts * self.table.over_sampling - 1e-9)

    @property
    def num_samples(self) -> int:
        """Samples that a step trains on."""
        return self.table.prompts_per_step * self.table.samples_per_prompt

    def pricer(self) -> IterationPricer:
        """The price of an engine's iterations."""
        gpu = self.cluster.gpu
        return IterationPricer(
            self.model,
            gpu,
            self.engine.loop_host if self.framework.returns_logprobs else self.engine.host,
            max_graph=min(
                largest_graph(self.engine, gpu, self.model.layout.tensor), 2 * self.limits.max_num_seqs
            ),
            uses_graphs=not self.enforces_eager,
            launch_seconds=EAGER_KERNEL_SECONDS
            if self.enforces_eager or not self.engine.captures_prompts
            else self.cluster.host.seconds_per_launch,
            has_adapters=self.serves_adapters,
            speculation=Speculation(self.table.rollout.draft_tokens, self.table.rollout.acceptance or 0.0),
            all_reduce_seconds=tensor_all_reduce(self.cluster, self.model.layout.tensor),
        )


def resolve_rl(experiment: Experiment, simulator: Simulator) -> RlJob:
    """The RL step that an experiment asks for.

    Raises InputError for contradictions, NotSimulatedError for what zsim cannot simulate yet.
    """
    table = experiment.rl
    assert table is not None
    framework = workflow_of(table.framework)
    _check_offered(table, framework)
    bare = experiment.model_copy(update={"rl": None})
    check_size(table)
    notes: list[str] = []
    if (defaults := framework.trainer.get(bare.strategy.kind)) is not None:
        if changes := defaults.changes(bare):
            notes.append(
                f"the trainer has what {framework.name} sets and the file leaves out: {', '.join(changes)}"
            )
        bare = defaults.apply(bare)
    cluster = simulator.cluster(experiment.cluster)
    total_gpus = gpus_of(experiment, cluster)
    is_listed = experiment.placement.gpus_per_node is not None
    rollout_gpus, training_gpus = _gpus(table, total_gpus, total_gpus if is_listed else cluster.gpus_per_node)
    update_base = simulator.job(bare if training_gpus == total_gpus else _trainer_on(bare, training_gpus))
    continues_rollouts = _continues_rollouts(table, framework)
    drawn = 1.0 if continues_rollouts else table.over_sampling
    samples = draw_samples(
        table.lengths, ceil(table.prompts_per_step * drawn - 1e-9), table.samples_per_prompt,
        update_base.training.sequence_length,
    ).shortest(table.prompts_per_step)  # fmt: skip
    totals = samples.totals + (table.environment.turns - 1) * table.environment.observation_tokens
    mini_batch = table.mini_batch_samples or totals.size
    if totals.size % mini_batch:
        raise InputError(
            f"rl.mini_batch_samples: found {mini_batch:,}, expected a divisor of the {totals.size:,} samples "
            "of a step"
        )
    if totals.max() > update_base.training.sequence_length:
        raise InputError(
            f"training.sequence_length: found {update_base.training.sequence_length:,}, but samples with the "
            f"tokens of their environment are up to {int(totals.max()):,} tokens; expected at least that"
        )
    replicas = update_base.data_parallel_size
    if mini_batch < replicas:
        raise InputError(
            f"rl.mini_batch_samples: found {mini_batch:,}, fewer than the trainer's {replicas:,} replicas; "
            f"expected at least {replicas:,}"
        )
    dealt = SampleBatching(table, framework, update_base, samples)
    update = dealt.batch(totals[:mini_batch])
    whole_pass = dealt.batch(totals, is_pass=True)
    has_adapters = experiment.training.lora is not None
    layout = EngineLayout(
        table.rollout.tensor, table.rollout.expert, table.rollout.precision, table.rollout.kv_dtype
    )
    if table.rollout.expert > 1 and not has_experts(update_base.model):
        raise InputError(
            f"rl.rollout.expert: found {table.rollout.expert}, but {update_base.model.name} has no experts; "
            "expected 1"
        )
    if rollout_gpus % layout.gpus:
        raise InputError(
            f"rl.rollout.tensor: a replica has {layout.gpus} GPUs, and the rollout {rollout_gpus}; expected "
            "a divisor"
        )
    model = served_model(base_model(update_base.model), layout)
    reference = _has_reference(table, framework)
    updates = table.epochs * (totals.size // mini_batch)
    recomputes = _recomputes_logprobs(table, framework, updates)
    transport = _transport(table, framework)
    sync = _sync(table, framework.syncs[transport])
    offloads = _offloads(table, framework)
    engine = _engine(table, framework)
    limits = _limits(table, framework, cluster, model, engine, update_base)
    return RlJob(
        experiment,
        table,
        framework,
        cluster,
        model,
        total_gpus,
        training_gpus,
        rollout_gpus,
        update_base.training.sequence_length,
        samples,
        dealt.max_tokens,
        update,
        updates,
        whole_pass,
        packed_job(update_base, update),
        reference + recomputes,
        reference,
        recomputes,
        _critic_job(table, bare, simulator, training_gpus, update),
        _reward_job(table, bare, simulator, training_gpus, whole_pass),
        transport,
        sync,
        offloads,
        limits,
        engine,
        _enforces_eager(table, framework, has_adapters and not framework.merges_adapters),
        has_adapters,
        _staleness(table, framework),
        continues_rollouts,
        (*notes, *_idle_notes(table), *batch_notes(experiment, update, dealt), *update_base.notes),
    )


def packed_job(job: Job, batch: PackedBatch, *, forward_only: bool = False) -> Job:
    """The trainer's job on the micro-batches of `batch`, each of samples alike with as many tokens and about
    as much attention as its own have.

    Micro-batches are alike, so that few of them are simulated, unless jitter makes each its own.
    """
    multiple = _PACK_MULTIPLE * job.parallelism.tensor * job.parallelism.context
    multiple //= gcd(multiple, _PACK_MULTIPLE) if multiple > job.training.micro_batch_tokens else 1
    samples = max(1, round(batch.tokens / batch.sample_tokens))
    length = max(multiple, round(batch.tokens / samples / multiple) * multiple)
    training = replace(
        job.training,
        sequence_length=length,
        micro_batch_size=max(1, round(batch.tokens / length)),
        gradient_accumulation_steps=batch.micro_batches,
        forward_only=forward_only,
        activation_checkpointing="none" if forward_only else job.training.activation_checkpointing,
        block_checkpointing=() if forward_only else job.training.block_checkpointing,
    )
    every_micro_batch = job.jitter is not None or bool(job.colocated_jobs)
    simulation = job.simulation.model_copy(update={"every_micro_batch": every_micro_batch})
    return replace(job, training=training, simulation=simulation, sequences=None)


def _check_offered(table: RlTable, framework: RlFramework) -> None:
    for name, is_asked in (
        (
            "over_sampling beside turns of an environment",
            table.environment.turns > 1 and table.over_sampling > 1,
        ),
        ("sampling_rounds beside stream_prompts", table.sampling_rounds > 1 and bool(table.stream_prompts)),
        ("over_sampling with placement 'async'", table.over_sampling > 1 and table.placement == "async"),
        ("algorithm = 'dpo', whose pairs are data,", table.algorithm == "dpo"),
    ):
        if is_asked:
            raise NotSimulatedError(f"rl.{name}: is not simulated yet")
    if table.algorithm not in framework.algorithms:
        raise InputError(
            f"rl.algorithm: {framework.name} has no '{table.algorithm}'; expected "
            f"{' or '.join(framework.algorithms)}"
        )
    if table.placement not in framework.placements:
        raise InputError(
            f"rl.placement: {framework.name} has no '{table.placement}'; expected "
            f"{' or '.join(framework.placements)}"
        )
    if table.rollout.draft_tokens and table.rollout.acceptance is None:
        raise InputError(
            "rl.rollout.acceptance: missing beside draft_tokens; zsim does not predict which part of "
            "proposed tokens is accepted"
        )
    if framework.in_flight and _staleness(table, framework) % 1:
        raise InputError(
            f"rl.max_staleness: found {table.max_staleness:g}, but {framework.name} lets samples be older by "
            "whole steps; expected 0, 1 or more"
        )
    if table.sync.overlap and not _staleness(table, framework):
        raise InputError(
            "rl.sync.overlap: found true where every response is of the newest policy, so that the rollout "
            "waits for its weights; expected false, or placement 'async' with max_staleness above 0"
        )
    if table.stream_prompts is not None:
        _check_stream(table.stream_prompts, table, framework)
    if table.max_staleness and table.placement != "async":
        raise InputError(
            f"rl.max_staleness: found {table.max_staleness:g} with placement '{table.placement}', where "
            "every response is of the newest policy; expected 0, or placement 'async'"
        )


def _idle_notes(table: RlTable) -> Iterator[str]:
    """The keys that an experiment states and that nothing of its step depends on."""
    runs_over = table.placement == "async" or table.over_sampling > 1
    for is_used, prefix, owner, names, need in (
        (table.placement == "colocated", "rl.offload", table.offload,
         ("parameters", "optimizer", "sleep_level"), "placement 'colocated'"),
        (table.environment.turns > 1, "rl.environment", table.environment,
         ("seconds", "sigma", "concurrency", "observation_tokens"), "turns above 1"),
        (table.rollout.draft_tokens > 0, "rl.rollout", table.rollout, ("acceptance",), "draft_tokens"),
        (table.reward.seconds_per_sample > 0, "rl.reward", table.reward, ("overlap",), "seconds_per_sample"),
        (runs_over, "rl", table, ("partial_rollout",), "over_sampling above 1 or placement 'async'"),
    ):  # fmt: skip
        idle = [f"{prefix}.{name}" for name in names if getattr(owner, name)]
        if idle and not is_used:
            yield f"{', '.join(idle)}: no effect without {need}"


def _check_stream(prompts: int, table: RlTable, framework: RlFramework) -> None:
    if not framework.streamed_prompts or table.placement != "async":
        cause = f"placement '{table.placement}'" if framework.streamed_prompts else framework.name
        raise InputError(
            f"rl.stream_prompts: found {prompts} with {cause}, where updates await the rollout; expected none"
        )
    total, samples = table.prompts_per_step, table.samples_per_prompt
    mini_batch = table.mini_batch_samples or total * samples
    valid = [n for n in range(1, total + 1) if total % n == 0 and n * samples % mini_batch == 0]
    if prompts not in valid:
        missing = "" if table.mini_batch_samples else ", the whole step without rl.mini_batch_samples"
        nearest = min(valid, default=total, key=lambda count: abs(count - prompts))
        raise InputError(
            f"rl.stream_prompts: found {prompts:,}, expected a divisor of the {total:,} prompts of a step "
            f"whose samples are whole mini-batches of {mini_batch:,}{missing}, such as {nearest:,}"
        )


def _critic_job(
    table: RlTable, bare: Experiment, simulator: Simulator, gpus: int, batch: PackedBatch
) -> Job | None:
    """The critic's update, on the trainer's GPUs, by the trainer's means."""
    if table.algorithm != "ppo":
        if table.critic.model is not None:
            raise InputError(
                f"rl.critic.model: found a critic with algorithm '{table.algorithm}', which has none; "
                "expected algorithm 'ppo'"
            )
        return None
    model = table.critic.model or bare.model
    experiment = _trainer_on(bare, gpus).model_copy(update={"model": model})
    return packed_job(simulator.job(experiment), batch)


def _reward_job(
    table: RlTable, bare: Experiment, simulator: Simulator, gpus: int, batch: PackedBatch
) -> Job | None:
    if table.reward.model is None:
        return None
    experiment = _trainer_on(bare, gpus).model_copy(update={"model": table.reward.model})
    return packed_job(simulator.job(experiment), batch, forward_only=True)


def gpus_of(experiment: Experiment, cluster: Cluster) -> int:
    """GPUs of the job, those of its engines among them."""
    if experiment.gpus is not None:
        return experiment.gpus
    return (experiment.nodes or 1) * cluster.gpus_per_node


def _gpus(table: RlTable, total: int, per_node: int) -> tuple[int, int]:
    """GPUs of the rollout and of the trainer, which has whole nodes where it has more than one."""
    requested = table.rollout.gpus
    if table.placement == "colocated":
        if requested is not None:
            raise InputError(
                f"rl.rollout.gpus: found {requested} with placement 'colocated', where all GPUs do both; "
                "expected none, or placement 'split' or 'async'"
            )
        return total, total
    rollout = total // 2 if requested is None else requested
    if not 0 < rollout < total:
        raise InputError(
            f"rl.rollout.gpus: found {rollout} of {total} GPUs, which leaves {total - rollout} to "
            f"training; expected 1 to {total - 1}"
        )
    training = total - rollout
    if training > per_node and (rest := training % per_node):
        nearest = " or ".join(str(gpus) for gpus in (rollout + rest - per_node, rollout + rest) if gpus > 0)
        raise InputError(
            f"rl.rollout.gpus: found {rollout} of {total} GPUs, which leaves {training} to training, no "
            f"whole nodes of {per_node}; expected {nearest}"
        )
    return rollout, total - rollout


def _trainer_on(experiment: Experiment, gpus: int) -> Experiment:
    return experiment.model_copy(update={"gpus": gpus, "nodes": None})


def _has_reference(table: RlTable, framework: RlFramework) -> bool:
    if table.reference is not None:
        return table.reference != "none"
    return framework.has_reference and table.algorithm != "dapo"


def _recomputes_logprobs(table: RlTable, framework: RlFramework, updates: int) -> bool:
    if table.old_logprobs == "skipped" and updates > 1:
        raise InputError(
            f"rl.old_logprobs: found 'skipped' with {updates} updates of a rollout, of which the later ones "
            "need them; expected 'recomputed' or 'rollout'"
        )
    if table.old_logprobs is not None:
        return table.old_logprobs == "recomputed"
    return framework.recomputes_logprobs


def _transport(table: RlTable, framework: RlFramework) -> Transport:
    transport = table.sync.transport or framework.transports[table.placement]
    if transport not in framework.syncs:
        raise InputError(
            f"rl.sync.transport: {framework.name} has no '{transport}'; expected "
            f"{' or '.join(framework.syncs)}"
        )
    if transport == "ipc" and table.placement != "colocated":
        raise InputError(
            f"rl.sync.transport: found 'ipc' with placement '{table.placement}', whose engines are on other "
            "GPUs than the trainer; expected 'broadcast', 'reshard', 'host' or 'filesystem'"
        )
    return transport


def _sync(table: RlTable, rates: SyncRates) -> SyncRates:
    bucket = table.sync.bucket
    if bucket == 0:
        seconds = max(rates.seconds_per_tensor, SINGLE_TENSOR_SECONDS)
        return replace(rates, seconds_per_tensor=seconds)
    return rates if bucket is None else replace(rates, bucket_bytes=float(bucket))


def _offloads(table: RlTable, framework: RlFramework) -> Offloads:
    if table.placement != "colocated":
        return Offloads(parameters=False, optimizer=False, sleep_level=0)
    default, requested = framework.offloads, table.offload
    return Offloads(
        default.parameters if requested.parameters is None else requested.parameters,
        default.optimizer if requested.optimizer is None else requested.optimizer,
        default.sleep_level if requested.sleep_level is None else requested.sleep_level,
    )


def _engine(table: RlTable, framework: RlFramework) -> Engine:
    names = [*framework.engines]
    name = table.rollout.engine or names[0]
    if name not in framework.engines:
        expected = " or ".join(engine for engine in names if engine != "generate") or "none"
        raise InputError(f"rl.rollout.engine: {framework.name} has no '{name}'; expected {expected}")
    if (version := table.rollout.engine_version) is not None and name != "vllm":
        raise InputError(
            f"rl.rollout.engine_version: found '{version}' with engine '{name}', whose releases are not told "
            "apart; expected none, or engine 'vllm'"
        )
    is_ray = framework.runs_engines_by_ray and table.rollout.tensor > 1
    return engine_of(name, version or "", is_ray=is_ray)


def _limits(
    table: RlTable, framework: RlFramework, cluster: Cluster, model: ServedModel, engine: Engine, trainer: Job
) -> EngineLimits:
    """The bounds of a replica, whose cache has what weights and activations leave of its memory."""
    rollout = table.rollout
    batch = framework.engines[engine.name]
    if batch is None:
        for name in ("gpu_memory_utilization", "max_num_batched_tokens"):
            if (value := getattr(rollout, name)) is not None:
                raise InputError(
                    f"rl.rollout.{name}: found {value:,} with {framework.name}, whose cache is as large as a "
                    "batch needs; expected none, or max_num_seqs"
                )
        size = rollout.max_num_seqs or trainer.training.micro_batch_size * rollout.tensor
        return static_limits(size, trainer.training.sequence_length)
    return engine_limits(
        model,
        cluster.gpu,
        rollout.gpu_memory_utilization or framework.memory_utilization[table.placement],
        rollout.max_num_seqs or batch[0],
        rollout.max_num_batched_tokens or batch[1],
        prefix_caching=rollout.prefix_caching,
        reserves_responses=engine.reserves_responses,
        shares_at_once=engine.shares_at_once,
    )


def _enforces_eager(table: RlTable, framework: RlFramework, serves_adapters: bool) -> bool:
    """Engines with adapters that change at every step run without CUDA graphs, unless the user says
    otherwise."""
    if table.rollout.enforce_eager is not None:
        return table.rollout.enforce_eager
    return framework.enforces_eager or serves_adapters


def _continues_rollouts(table: RlTable, framework: RlFramework) -> bool:
    if table.partial_rollout is not None:
        return table.partial_rollout
    return framework.continues_rollouts and table.placement == "async"


def _staleness(table: RlTable, framework: RlFramework) -> float:
    if table.max_staleness is not None:
        return table.max_staleness
    return framework.max_staleness if table.placement == "async" else 0
