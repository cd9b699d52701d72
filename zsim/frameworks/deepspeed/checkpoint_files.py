"""DeepSpeed's checkpoints: which rank writes which file, stage by stage.

Transcribed from DeepSpeed 0.19.8 runtime/engine.py (`save_checkpoint`, `_save_checkpoint`,
`_save_zero_checkpoint`, `save_16bit_model`), runtime/zero/stage_1_and_2.py and stage3.py (`state_dict`),
runtime/pipe/module.py (`save_state_dict`). Parameters of stages 1 and 2 are views of one padded buffer, which
is what torch.save writes. Partitions are saved with their padding, since their slices share its storage.

# [Note: states on drives]
With `offload_optimizer` on NVMe the tensors of a sub-group that is on a drive are empty in the partition's
file. After the other files every rank copies its swap folder, without gradients, into `offloaded_tensors`
(runtime/engine.py `save_checkpoint`, shutil's `copytree`), and copies it back to load, instead of reading
partitions. A sub-group is a file for its masters and one per state, of the swapper's padded length.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zsim.arrays import Ints
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.drive_files import aligned_numel, swap_floor_bytes
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.universal_checkpoint import add_universal_files
from zsim.goodput.checkpoints.saved import (
    STEP_BYTES,
    ModelStates,
    PickledFile,
    SavedFile,
    SavedFiles,
    StateTensor,
    trainable_tensors,
    untied_tensors,
)

_ALIGNMENT = 2  # elements per rank, nccl_start_alignment_factor
GATHERED = "pytorch_model.bin"
OFFLOADED = "offloaded_tensors/"
# Of a parameter that is elsewhere, and of a partition beside its tensors: recorded, as for torch's archives.
_EMPTY_TENSOR_BYTES, _PARTITION_BYTES = 530, 2800


def deepspeed_files(
    model_states: ModelStates,
    config: DeepSpeedConfig,
    *,
    saves_16bit_model: bool = False,
    is_universal: bool = False,
) -> SavedFiles:
    """The files of `save_checkpoint`, and of `save_16bit_model` if it is called too, which gathers stage 3's
    parameters on rank 0.

    With `is_universal` the save is converted before it is loaded.
    """
    writer = _Writer(model_states, config)
    files = [
        file
        for pipeline_rank in range(len(model_states.tensors))
        for tensor_rank in range(model_states.tensor_ranks)
        for file in writer.files(pipeline_rank, tensor_rank)
    ]
    gathered: tuple[int, ...] = ()
    if saves_16bit_model:
        gathered_file = PickledFile(GATHERED, 0)
        sizes = [
            tensor.numel * writer.param_bytes
            for stage in model_states.tensors
            for tensor in untied_tensors(stage)
        ]
        for size in sizes:
            gathered_file.add_parameter(size)
        files.append(gathered_file.build())
        gathered = tuple(sizes) if config.stage == 3 else ()
    staged, copied, on_host = np.zeros((3, model_states.world_size), dtype=np.int64)
    has_parameters, states = _offloaded_to_host(config)
    for file in files:
        if file.name.startswith(OFFLOADED):
            copied[file.rank] += file.bytes * file.copies
        else:
            staged[file.rank] += file.tensors
            on_host[file.rank] += round(file.optimizer_states * states) + file.parameters * has_parameters
    saved = SavedFiles(
        "deepspeed", tuple(files), staged, writer.read(files), gathered=gathered,
        is_committed_before_update=True, copied=copied if copied.any() else None,
        on_host=on_host if on_host.any() else None,
    )  # fmt: skip
    return (
        add_universal_files(saved, model_states, config, has_steps=writer.has_steps)
        if is_universal
        else saved
    )


def _offloaded_to_host(config: DeepSpeedConfig) -> tuple[bool, float]:
    """Whether parameters, and what fraction of masters and moments, live in host memory.

    Below stage 3 every device but the GPU is the CPU. In stage 3 the CPU steps `ratio` of the sub-groups.
    """
    zero = config.zero
    parameters, states = zero.offload_param, zero.offload_optimizer
    has_parameters = parameters is not None and parameters.device == "cpu"
    if states is None or (config.stage == 3 and states.device != "cpu"):
        return has_parameters, 0.0
    return has_parameters, states.ratio if config.stage == 3 else 1.0


class _Writer:
    def __init__(self, model_states: ModelStates, config: DeepSpeedConfig) -> None:
        self.model_states, self.config = model_states, config
        self.param_bytes = DTYPE_BYTES[config.param_dtype]
        self.state_bytes = DTYPE_BYTES[config.optimizer_states_dtype]
        self.master_bytes = DTYPE_BYTES[config.master_weights_dtype]
        self.is_sharded = config.optimizer_wrapper in ("zero12", "zero3", "bf16_optimizer")
        self.has_layers = len(model_states.tensors) > 1  # PipelineModule's files
        # torch's Adam has a tensor that counts steps, DeepSpeed's FusedAdam and CPU-Adam a number.
        is_torchs = config.optimizer.name is None or config.optimizer.implementation == "torch"
        self.has_steps = model_states.has_steps and is_torchs and config.optimizer.implementation != "cpu"
        self.shards = model_states.data_ranks
        if config.zero.is_mics:
            self.shards = config.zero.mics_shard_size

    def files(self, p: int, t: int) -> Iterator[SavedFile]:
        """The files of the ranks that hold one part of the model."""
        ranks, stage = self.model_states.ranks[p][t], self.model_states.tensors[p]
        number = p * self.model_states.tensor_ranks + t
        if self.has_layers:
            yield from self._layers(p, t, int(ranks[0]))
        if self.config.optimizer_wrapper == "zero3":
            for shard in range(self.shards):
                name = f"zero_pp_rank_{shard}_mp_rank_{number:02d}_model_states.pt"
                yield self._frozen_shards(name, int(ranks[shard]), stage)
        else:
            yield self._model_states(f"mp_rank_{number:02d}_model_states.pt", int(ranks[0]), stage)
        if not self.is_sharded:
            return
        prefix = "bf16_" if self.config.param_dtype == "bf16" else ""
        for shard in range(self.shards):
            name = f"{prefix}zero_pp_rank_{shard}_mp_rank_{number:02d}_optim_states.pt"
            yield self._optim_states(name, int(ranks[shard]), stage)
            yield from self._swap_files(int(ranks[shard]), stage)

    def _model_states(self, name: str, rank: int, stage: tuple[StateTensor, ...]) -> SavedFile:
        """The file of `_common_checkpoint_state`: the module, and the optimizer's states where no partition
        is saved separately.
        """
        file = PickledFile(name, rank)
        if not self.has_layers:
            self._add_parameters(file, stage)
        if self.is_sharded:
            return file.build()
        has_master = self.config.optimizer_wrapper == "fp16_optimizer"
        for tensor in trainable_tensors(stage):
            sizes = [tensor.numel * self.state_bytes] * self.model_states.num_states
            sizes += [tensor.numel * self.master_bytes] * has_master + [STEP_BYTES] * self.has_steps
            file.add_states(sizes)
        return file.build()

    def _add_parameters(self, file: PickledFile, stage: tuple[StateTensor, ...]) -> None:
        flat = sum(tensor.numel for tensor in trainable_tensors(stage))
        frozen_numels = [tensor.numel for tensor in untied_tensors(stage) if not tensor.is_trainable]
        count = sum(1 for _ in stage)
        if self.is_sharded:
            alignment = _ALIGNMENT * self.shards
            flat = -(-flat // alignment) * alignment
        file.add_parameter(flat * self.param_bytes, count)
        for numel in frozen_numels:
            file.add_parameter(numel * self.param_bytes)

    def _layers(self, p: int, t: int, rank: int) -> Iterator[SavedFile]:
        """A file per layer that has parameters (embedding, blocks, norm, head), from the first data-parallel
        rank.

        Their numbers are those of zsim's layers.
        """
        layers: dict[str, list[StateTensor]] = {}
        for tensor in self.model_states.tensors[p]:
            name_parts = tensor.name.split(".")
            digits = [index for index, part in enumerate(name_parts) if part.isdigit()]
            layers.setdefault(
                ".".join(name_parts[: digits[0] + 1] if digits else name_parts[:-1]), []
            ).append(tensor)
        num_earlier = sum(self._num_layers(stage) for stage in self.model_states.tensors[:p])
        for number, tensors in enumerate(layers.values(), num_earlier):
            suffix = f"-model_{t:02d}" if self.model_states.tensor_ranks > 1 else ""
            file = PickledFile(f"layer_{number:02d}{suffix}-model_states.pt", rank)
            for tensor in tensors:
                file.add_parameter(tensor.numel * self.param_bytes)
            yield file.build()

    def _num_layers(self, stage: tuple[StateTensor, ...]) -> int:
        names = {
            ".".join(tensor.name.split(".")[: next(
                (index + 1 for index, part in enumerate(tensor.name.split(".")) if part.isdigit()), -1
            )])
            for tensor in stage
        }  # fmt: skip
        return len(names)

    def _frozen_shards(self, name: str, rank: int, stage: tuple[StateTensor, ...]) -> SavedFile:
        """The file of stage 3's module, which is empty tensors. Frozen parameters are saved as fragments."""
        file = PickledFile(name, rank, _EMPTY_TENSOR_BYTES * sum(1 for _ in untied_tensors(stage)))
        for tensor in untied_tensors(stage):
            if not tensor.is_trainable:
                file.add_parameter(-(-tensor.numel // self.shards) * self.param_bytes)
        return file.build()

    def _optim_states(self, name: str, rank: int, stage: tuple[StateTensor, ...]) -> SavedFile:
        """The file of a partition: masters, moments, and a step counter per flat tensor."""
        file = PickledFile(name, rank, _PARTITION_BYTES)
        for numel in self._partitions(stage):
            if self._is_on_drive(numel):
                file.add_states([0] * (1 + self.model_states.num_states))
                continue
            sizes = [numel * self.master_bytes] + [numel * self.state_bytes] * self.model_states.num_states
            file.add_states(sizes + [STEP_BYTES] * self.has_steps)
        return file.build()

    def _is_on_drive(self, numel: int) -> bool:
        """Whether the states of a sub-group of so many elements are swapped, [Note: states on drives]."""
        offload = self.config.zero.offload_optimizer
        is_nvme = self.config.stage == 3 and offload is not None and offload.device == "nvme"
        return is_nvme and self.master_bytes * numel >= swap_floor_bytes(self.config.aio)

    def _swap_files(self, rank: int, stage: tuple[StateTensor, ...]) -> Iterator[SavedFile]:
        """The rank's swap files, one per state of a sub-group."""
        for number, numel in enumerate(self._partitions(stage)):
            if self._is_on_drive(numel):
                size = aligned_numel(numel, self.master_bytes, self.config.aio) - numel
                states = numel * self.master_bytes, size * self.master_bytes
                for state in range(1 + self.model_states.num_states):
                    name = f"{OFFLOADED}rank{rank:02d}/{number}_{state}.tensor.swp"
                    yield SavedFile(name, rank, 0, *states)

    def _partitions(self, stage: tuple[StateTensor, ...]) -> list[int]:
        """Elements of a rank's flat tensors: one, or in stage 3 one per sub-group."""
        if self.config.optimizer_wrapper != "zero3":
            alignment = _ALIGNMENT * self.shards
            return [-(-sum(tensor.numel for tensor in trainable_tensors(stage)) // alignment) * _ALIGNMENT]
        numels, total = [0], 0
        for tensor in trainable_tensors(stage):
            shard = -(-tensor.numel // self.shards)
            if total >= self.config.zero.sub_group_size:
                numels.append(0)
                total = 0
            numels[-1] += shard
            total += shard
        return numels

    def read(self, files: list[SavedFile]) -> Ints:
        """`load_checkpoint`: every rank reads the module's file of its part of the model, and the file of its
        partition or, where states are on drives, its swap files.
        """
        bytes_per_rank = np.zeros(self.model_states.world_size, dtype=np.int64)
        partition_bytes = np.zeros_like(bytes_per_rank)
        has_swapped = any(file.name.startswith(OFFLOADED) for file in files)
        for file in files:
            if file.name.startswith(OFFLOADED):
                partition_bytes[file.rank] += file.bytes
            elif file.name != GATHERED and not (has_swapped and file.name.endswith("_optim_states.pt")):
                is_shared = not file.name.startswith(("zero_", "bf16_zero_"))
                (partition_bytes if not is_shared else bytes_per_rank)[file.rank] += file.bytes
        for groups in self.model_states.ranks:
            for ranks in groups:
                bytes_per_rank[ranks] = bytes_per_rank[ranks[0]]
                partition_bytes[ranks] = np.resize(partition_bytes[ranks[: self.shards]], len(ranks))
        return bytes_per_rank + partition_bytes
