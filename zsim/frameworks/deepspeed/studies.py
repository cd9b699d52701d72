"""DeepSpeed in searches, whole runs and on the page: what to vary, bounds, what a save writes, its fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.checkpoint_files import deepspeed_files
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.deepspeed.settings.text import drop_comments, load_object
from zsim.frameworks.deepspeed.settings.zero_schema import ZERO_KEYS, ZeroBlock, json_key
from zsim.frameworks.torch.studies import ZERO_STAGE
from zsim.goodput.checkpoints.saved import (
    STATE_MEASURED,
    FrameworkCheckpoint,
    ModelStates,
    SavedFiles,
)
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.run.checkpoint import CheckpointTable
from zsim.study.tune.axes import CHECKPOINTINGS, COMPILATIONS, LOSSES, MICRO_BATCHES, RECIPES
from zsim.study.tune.framework import (
    ACCUMULATION,
    MICRO_BATCH,
    AxisChoice,
    Base,
    Choices,
    Chosen,
    FrameworkBounds,
    FrameworkTuning,
    TunedAxis,
    format_choice,
    key_choices,
)
from zsim.ui.field import STAGE as FIELD_STAGE
from zsim.ui.field import Field, FrameworkFields

ZERO = "strategy.config.zero_optimization."
STAGE = ZERO + "stage"
NVME_PATH = "/local_nvme"
_DRIVES = {"device": "nvme", "nvme_path": NVME_PATH, "pin_memory": True}
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_IN_JSON = {
    MICRO_BATCH: "strategy.config.train_micro_batch_size_per_gpu",
    ACCUMULATION: "strategy.config.gradient_accumulation_steps",
}


def stage_of(base: Base, chosen: Chosen) -> int:
    stage = chosen.get(STAGE, base.data["strategy"]["config"]["zero_optimization"].get("stage", 0))
    assert isinstance(stage, int)
    return stage


def _stages(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    return [AxisChoice(f"ZeRO-{stage}" if stage else "no ZeRO", {STAGE: stage}) for stage in (0, 1, 2, 3)]


def state_offload_block(device: str | None) -> dict[str, Any] | None:
    """The block for optimizer states on "cpu" or "nvme", or None for the GPU."""
    if device != "nvme":
        return None if device is None else {"device": device, "pin_memory": True}
    return {**_DRIVES, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}


def parameter_offload_block(device: str | None, largest_shard_numel: int) -> dict[str, Any] | None:
    """The block for parameters, with buffers for the largest shard, or None for the GPU."""
    if device != "nvme":
        return state_offload_block(device)
    return {**_DRIVES, "buffer_size": max(10**8, largest_shard_numel), "buffer_count": 12}


def _offloads(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Nothing, the optimizer states, or states and parameters on the host or on the drives."""
    stage = stage_of(base, chosen)
    keys = (ZERO + "offload_optimizer", ZERO + "offload_param")
    no_offload = AxisChoice("", dict.fromkeys(keys))
    if stage == 0:
        return [no_offload]
    cpu = state_offload_block("cpu")
    choices = [no_offload, AxisChoice("optimizer on CPU", dict(zip(keys, (cpu, None), strict=True)))]
    if stage < 3:
        return choices
    choices.append(AxisChoice("optimizer, parameters on CPU", dict(zip(keys, (cpu, cpu), strict=True))))
    if base.job.cluster.nvme is None or base.job.cluster.nvme.drives == 0:
        return choices
    states, shards = state_offload_block("nvme"), parameter_offload_block("nvme", base.largest_shard_numel)
    choices += [
        AxisChoice("optimizer on NVMe", dict(zip(keys, (states, None), strict=True))),
        AxisChoice("optimizer on NVMe, parameters on CPU", dict(zip(keys, (states, cpu), strict=True))),
        AxisChoice(
            "optimizer, parameters on NVMe",
            {**dict(zip(keys, (states, shards), strict=True)), ZERO + "stage3_max_reuse_distance": 0},
        ),
    ]
    return choices


def _zero_plus_plus(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Secondary shards inside the node (hpZ), so that gathers of backward stay inside it. Not with parameters
    offloaded."""
    key, per_node = ZERO + "zero_hpz_partition_size", base.job.gpus_per_node
    if stage_of(base, chosen) != 3 or base.job.num_nodes == 1 or chosen.get(ZERO + "offload_param"):
        return []
    return [AxisChoice("", {key: 1}), AxisChoice(f"hpZ {per_node}", {key: per_node})]


def _quantised(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """int8 gathers (qwZ) and int4 reductions (qgZ). They change the numerics, so they are tried only on
    request."""
    weights, gradients = ZERO + "zero_quantized_weights", ZERO + "zero_quantized_gradients"
    if stage_of(base, chosen) != 3 or base.job.num_nodes == 1 or chosen.get(ZERO + "offload_param"):
        return []
    return [
        AxisChoice("", {weights: False, gradients: False}),
        AxisChoice("qwZ", {weights: True, gradients: False}),
        AxisChoice("qwZ qgZ", {weights: True, gradients: True}),
    ]


def _reuse_distances(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """How long a gathered parameter is kept, together with the limit on elements gathered at once. With
    parameters on drives none are kept, since the buffers would be too few."""
    param = chosen.get(ZERO + "offload_param")
    if stage_of(base, chosen) != 3 or (param or {}).get("device") == "nvme":
        return
    for size in (0, 10**9, 4 * 10**9):
        live = {ZERO + "stage3_max_live_parameters": max(size, 10**9)}
        yield AxisChoice(f"reuse {format_choice(size)}", {ZERO + "stage3_max_reuse_distance": size, **live})


def _sub_groups(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    if stage_of(base, chosen) != 3 or chosen.get(ZERO + "offload_optimizer") is None:
        return []
    return key_choices(ZERO + "sub_group_size", "sub-groups", 10**7, 10**8, 10**9)(base, chosen)


def _zero_axis(name: str, bare: str, *values: Any) -> TunedAxis:
    """An axis of one key of `zero_optimization`, at the stages where the key has an effect."""
    choices = key_choices(ZERO + json_key(bare), name, *values)
    return TunedAxis(name, _limit_to_stages(ZERO_KEYS[bare].stages, choices))


def _limit_to_stages(stages: tuple[int, ...], inner: Choices) -> Choices:
    """The choices of `inner` at these stages, and none at other stages."""

    def choices(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
        return inner(base, chosen) if stage_of(base, chosen) in stages else []

    return choices


class DeepSpeedTuning(FrameworkTuning[DeepSpeedTable]):
    """Stages, offloading and sizes of ZeRO."""

    label = ""
    structure = (
        TunedAxis("stage", _stages),
        TunedAxis("offload", _offloads),
        TunedAxis("hpZ", _zero_plus_plus),
        CHECKPOINTINGS,
        LOSSES,
        MICRO_BATCHES,
    )
    numerics = (RECIPES,)
    details = (
        COMPILATIONS,
        _zero_axis("overlap_comm", "overlap_comm", True, False),
        _zero_axis("bucket", "reduce_bucket_size", 50_000_000, 200_000_000, 500_000_000),
        _zero_axis("prefetch", "prefetch_bucket_size", 0, 10**7, 50_000_000, 200_000_000),
        _zero_axis("persistence", "param_persistence_threshold", 10**4, 10**5, 10**6),
        TunedAxis("reuse", _reuse_distances),
        TunedAxis("sub-groups", _sub_groups),
    )
    quantised = (TunedAxis("quantised", _quantised),)
    start = MappingProxyType({"stage": 3})
    is_usual = True

    def open_settings(self, table: DeepSpeedTable, job: Job, data: dict[str, Any]) -> dict[str, Any]:
        """The JSON without batch sizes, in place of a file or of a stage alone."""
        config, name = _open_config(table)
        strategy = {key: value for key, value in data["strategy"].items() if key != "stage"}
        opened = {
            **data,
            "training": {**data["training"], "precision": job.training.precision},
            "strategy": {**strategy, "config": config, "config_name": name},
        }
        if data.get("program") is None and _is_file(table):
            opened["program"] = "deepspeed"
        return opened

    def spellings(self, name: str) -> Sequence[str]:
        for field, info in ZeroBlock.model_fields.items():
            if name in (field, info.alias):
                return [field, *([info.alias] if info.alias else [])]
        return (name,)

    def resolved_value(self, job: Job, key: str) -> Any:
        if not key.startswith(ZERO):
            return super().resolved_value(job, key)
        last = key.removeprefix(ZERO)
        fields = ZeroBlock.model_fields.items()
        name = next((name for name, info in fields if last in (name, info.alias)), last)
        return getattr(job.strategy.zero, name, None)  # type: ignore[attr-defined]

    def comparable(self, key: str, value: Any) -> Any:
        """Offloading is its device, and a whole float the integer that DeepSpeed converts it to."""
        if key.endswith(("offload_optimizer", "offload_param")):
            device = value.get("device") if isinstance(value, Mapping) else getattr(value, "device", None)
            return None if device in (None, "none") else device
        is_whole = isinstance(value, float) and value.is_integer() and key.startswith(ZERO)
        return int(value) if is_whole else value

    def written_key(self, table: DeepSpeedTable, key: str) -> str:
        """In the JSON where there is one, else a stage alone in the table."""
        if table.config is not None:
            return _IN_JSON.get(key, key)
        return "strategy.stage" if key == STAGE else key

    def sizes(self, table: DeepSpeedTable, config: DeepSpeedConfig) -> dict[str, tuple[str, float, bool]]:
        zero = config.zero
        return {
            json_key(name): (ZERO + json_key(name), float(value), True)
            for name, key in ZERO_KEYS.items()
            for value in [getattr(zero, name)]
            if key.is_size and zero.stage in key.stages and value
        }

    def shards_less(self, base: Base, changes: Mapping[str, Any]) -> bool:
        return STAGE in changes and bool(changes[STAGE] < stage_of(base, {}))


def _is_file(table: DeepSpeedTable) -> bool:
    """Whether the strategy is a JSON file, not a stage or a table inside the experiment."""
    name = table.config_name or ""
    return isinstance(table.config, str) or (table.config is not None and name.lower().endswith(".json"))


def _open_config(table: DeepSpeedTable) -> tuple[dict[str, Any], str]:
    """(the JSON without batch sizes, its name). A stage alone becomes a config with this stage."""
    if table.config is None:
        return {"zero_optimization": {"stage": table.stage}}, "DeepSpeed config"
    name, config = load_object(table.config, table.config_name)
    drop_comments(config, name, [])
    for key in _BATCH_KEYS:
        config.pop(key, None)
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):  # missing, or the former boolean that switched stage 1 on
        config["zero_optimization"] = {"stage": 1 if zero is True else 0}
    return config, name


TUNING = DeepSpeedTuning()


class DeepSpeedBounds(FrameworkBounds[DeepSpeedConfig]):
    """The CPU updates states that are offloaded."""

    def checkpoint_share(self, job: Job, config: DeepSpeedConfig) -> float:
        block = config.activation_checkpointing
        if block.cpu_checkpointing:
            return 0.0
        return 1 / job.parallelism.tensor if block.partition_activations else 1.0

    def updates_on_host(self, config: DeepSpeedConfig) -> bool:
        """All but those of MiCS, whose releases leave some on the GPU, and of an update a step late."""
        offload = config.zero.offload_optimizer
        is_whole = offload is not None and offload.ratio == 1
        return is_whole and not config.delayed_parameter_update and not config.zero.is_mics


BOUNDS = DeepSpeedBounds()


class DeepSpeedCheckpoint(FrameworkCheckpoint[DeepSpeedConfig]):
    """The files of `save_checkpoint`."""

    formats = ("deepspeed", "universal")
    saves_16bit_models = True

    def files(
        self, job: Job, config: DeepSpeedConfig, states: ModelStates, table: CheckpointTable
    ) -> SavedFiles:
        if job.parallelism.experts.library.has_expert_groups:
            raise NotSimulatedError(
                "run.checkpoint: the files of experts in DeepSpeed's layers (a file per expert) are not "
                f"known; {STATE_MEASURED}"
            )
        if table.saves_16bit_model:
            _check_16bit_save(job, config)
        return deepspeed_files(
            states,
            config,
            saves_16bit_model=table.saves_16bit_model,
            is_universal=table.format == "universal",
        )

    def check_elastic_load(self, config: DeepSpeedConfig, format: str | None) -> None:
        """DeepSpeed 0.19.8 runtime/engine.py `_load_zero_checkpoint`."""
        if config.stage and format != "universal":
            raise InputError(
                "run.recovery.policy: found 'shrink', but DeepSpeed loads a checkpoint of ZeRO on as many "
                "ranks as saved it; expected run.checkpoint.format 'universal', or policy 'restart'"
            )


def _check_16bit_save(job: Job, config: DeepSpeedConfig) -> None:
    """Raise InputError where `save_16bit_model` fails or saves nothing (DeepSpeed 0.19.8 runtime/engine.py,
    runtime/pipe/engine.py `module_state_dict`)."""
    if job.parallelism.pipeline > 1:
        raise InputError(
            "run.checkpoint.saves_16bit_model: found true with parallelism.pipeline "
            f"{job.parallelism.pipeline}, whose engine saves by `save_checkpoint` alone; expected false"
        )
    if config.stage == 3 and not config.zero.gather_16bit_weights_on_model_save:
        raise InputError(
            "run.checkpoint.saves_16bit_model: found true in stage 3 without "
            "zero_optimization.stage3_gather_16bit_weights_on_model_save, so that DeepSpeed saves nothing; "
            "expected that key true, or false here"
        )


CHECKPOINT = DeepSpeedCheckpoint()


_STATES, _PARAMETERS = "offload_optimizer", "offload_param"
_DEVICES = {"no": None, "host memory": "cpu", "NVMe": "nvme"}


class DeepSpeedFields(FrameworkFields):
    """The stage and the offloading, which the JSON has in blocks of its own."""

    def values(self, job: Job) -> Iterator[tuple[str, Any]]:
        zero = job.strategy.zero  # type: ignore[attr-defined]
        yield FIELD_STAGE, zero.stage
        yield _STATES, zero.offload_optimizer and zero.offload_optimizer.device
        yield _PARAMETERS, zero.offload_param and zero.offload_param.device

    def translate(
        self, data: Mapping[str, Any], changes: Mapping[str, Any], job_with: Callable[[Any], Job]
    ) -> dict[str, Any]:
        translated = dict(changes)
        strategy = data.get("strategy")
        if FIELD_STAGE in translated and isinstance(strategy, Mapping) and strategy.get("config") is not None:
            translated[STAGE] = translated.pop(FIELD_STAGE)
        if _STATES in translated:
            translated[ZERO + _STATES] = state_offload_block(translated.pop(_STATES))
        if _PARAMETERS in translated:
            device, numel = translated.pop(_PARAMETERS), 0
            if device == "nvme":
                numel = _largest_shard_numel(job_with(translated))
            translated[ZERO + _PARAMETERS] = parameter_offload_block(device, numel)
        return translated

    def shown(self, key: str, value: Any) -> tuple[str, Any]:
        if key == STAGE:
            return FIELD_STAGE, value
        name = key.removeprefix(ZERO)
        is_offload = name in (_STATES, _PARAMETERS) and isinstance(value, Mapping)
        return name, value["device"] if is_offload else value

    def shown_keys(self) -> frozenset[str]:
        return frozenset((STAGE, f"{ZERO}{_STATES}.device", f"{ZERO}{_PARAMETERS}.device"))

    def unstated_settings(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """DeepSpeed's own precision, where a stage alone means bf16."""
        precision_keys = [f"strategy.config.{name}.enabled" for name in ("bf16", "fp16")]
        is_json = any(key.startswith(ZERO) for key in values)
        if is_json and not any(key in values for key in precision_keys):
            yield precision_keys[0], False


def _largest_shard_numel(job: Job) -> int:
    """Elements of the largest parameter's shard, which NVMe buffers must hold."""
    return -(-max(parameter.numel for _, parameter in job.model.named_parameters()) // job.world_size)


FIELDS = DeepSpeedFields(
    "DeepSpeed ZeRO",
    position=1,
    fields=(
        ZERO_STAGE,
        Field(_STATES, "Offload", "optimizer states", choices=_DEVICES, is_half=True),
        Field(_PARAMETERS, "Offload", "parameters", choices=_DEVICES, stages=(3,), is_half=True),
    ),
    has_degrees=True,
    reads_bare_files=True,
)
