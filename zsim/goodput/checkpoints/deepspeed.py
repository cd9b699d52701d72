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
from zsim.goodput.checkpoints.pickled import PickledFile
from zsim.goodput.checkpoints.saved import Saved, SavedFile
from zsim.goodput.checkpoints.tensors import STEP_BYTES, HeldStates, HeldTensor, own, trained
from zsim.goodput.checkpoints.universal import with_universal
from zsim.plan.parts.host_side import aligned_numel, swap_floor_bytes
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig

_ALIGNMENT = 2  # elements per rank, nccl_start_alignment_factor
GATHERED = "pytorch_model.bin"
OFFLOADED = "offloaded_tensors/"
# Of a parameter that is elsewhere, and of a partition beside its tensors: recorded, as in pickled.py.
_EMPTY_TENSOR_BYTES, _PARTITION_BYTES = 530, 2800


def deepspeed_files(
    held: HeldStates,
    config: DeepSpeedConfig,
    *,
    saves_16bit_model: bool = False,
    is_universal: bool = False,
) -> Saved:
    """The files of `save_checkpoint`, and of `save_16bit_model` if it is called too, which gathers stage 3's
    parameters on rank 0.

    With `is_universal` the save is converted before it is loaded.
    """
    writer = _Writer(held, config)
    files = [file for p in range(len(held.tensors)) for t in range(held.tensor_ranks)
             for file in writer.files(p, t)]  # fmt: skip
    gathered: tuple[int, ...] = ()
    if saves_16bit_model:
        whole = PickledFile(GATHERED, 0)
        sizes = [tensor.numel * writer.param_bytes for stage in held.tensors for tensor in own(stage)]
        for size in sizes:
            whole.add_parameter(size)
        files.append(whole.saved())
        gathered = tuple(sizes) if config.stage == 3 else ()
    staged, copied, on_host = np.zeros((3, held.world_size), dtype=np.int64)
    has_parameters, states = _offloaded_to_host(config)
    for file in files:
        if file.name.startswith(OFFLOADED):
            copied[file.rank] += file.bytes * file.copies
        else:
            staged[file.rank] += file.tensors
            on_host[file.rank] += round(file.optimizer_states * states) + file.parameters * has_parameters
    saved = Saved(
        "deepspeed", tuple(files), staged, writer.read(files), gathered=gathered,
        copied=copied if copied.any() else None, on_host=on_host if on_host.any() else None,
    )  # fmt: skip
    return with_universal(saved, held, config, has_steps=writer.has_steps) if is_universal else saved


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
    def __init__(self, held: HeldStates, config: DeepSpeedConfig) -> None:
        self.held, self.config = held, config
        self.param_bytes = DTYPE_BYTES[config.param_dtype]
        self.state_bytes = DTYPE_BYTES[config.optimizer_states_dtype]
        self.master_bytes = DTYPE_BYTES[config.master_weights_dtype]
        self.is_sharded = config.optimizer_wrapper in ("zero12", "zero3", "bf16_optimizer")
        self.has_layers = len(held.tensors) > 1  # PipelineModule's files
        # torch's Adam has a tensor that counts steps, DeepSpeed's FusedAdam and CPU-Adam a number.
        is_torchs = config.optimizer.name is None or config.optimizer.implementation == "torch"
        self.has_steps = held.has_steps and is_torchs and config.optimizer.implementation != "cpu"
        self.shards = held.data_ranks
        if config.zero.is_mics:
            self.shards = config.zero.mics_shard_size

    def files(self, p: int, t: int) -> Iterator[SavedFile]:
        """The files of the ranks that hold one part of the model."""
        ranks, stage = self.held.ranks[p][t], self.held.tensors[p]
        number = p * self.held.tensor_ranks + t
        if self.has_layers:
            yield from self._layers(p, t, int(ranks[0]))
        if self.config.optimizer_wrapper == "zero3":
            for place in range(self.shards):
                name = f"zero_pp_rank_{place}_mp_rank_{number:02d}_model_states.pt"
                yield self._frozen_shards(name, int(ranks[place]), stage)
        else:
            yield self._model_states(f"mp_rank_{number:02d}_model_states.pt", int(ranks[0]), stage)
        if not self.is_sharded:
            return
        prefix = "bf16_" if self.config.param_dtype == "bf16" else ""
        for place in range(self.shards):
            name = f"{prefix}zero_pp_rank_{place}_mp_rank_{number:02d}_optim_states.pt"
            yield self._optim_states(name, int(ranks[place]), stage)
            yield from self._offloaded(int(ranks[place]), stage)

    def _model_states(self, name: str, rank: int, stage: tuple[HeldTensor, ...]) -> SavedFile:
        """The file of `_common_checkpoint_state`: the module, and the optimizer's states where no partition
        is saved separately.
        """
        file = PickledFile(name, rank)
        if not self.has_layers:
            self._add_parameters(file, stage)
        if self.is_sharded:
            return file.saved()
        has_master = self.config.optimizer_wrapper == "fp16_optimizer"
        for tensor in trained(stage):
            sizes = [tensor.numel * self.state_bytes] * self.held.num_states
            sizes += [tensor.numel * self.master_bytes] * has_master + [STEP_BYTES] * self.has_steps
            file.add_states(sizes)
        return file.saved()

    def _add_parameters(self, file: PickledFile, stage: tuple[HeldTensor, ...]) -> None:
        flat = sum(tensor.numel for tensor in trained(stage))
        alone = [tensor.numel for tensor in own(stage) if not tensor.is_trainable]
        count = sum(1 for _ in stage)
        if self.is_sharded:
            alignment = _ALIGNMENT * self.shards
            flat = -(-flat // alignment) * alignment
        file.add_parameter(flat * self.param_bytes, count)
        for numel in alone:
            file.add_parameter(numel * self.param_bytes)

    def _layers(self, p: int, t: int, rank: int) -> Iterator[SavedFile]:
        """A file per layer that has parameters (embedding, blocks, norm, head), from the first data-parallel
        rank.

        Their numbers are those of zsim's layers.
        """
        layers: dict[str, list[HeldTensor]] = {}
        for tensor in self.held.tensors[p]:
            parts = tensor.name.split(".")
            digits = [place for place, part in enumerate(parts) if part.isdigit()]
            layers.setdefault(".".join(parts[: digits[0] + 1] if digits else parts[:-1]), []).append(tensor)
        before = sum(self._num_layers(stage) for stage in self.held.tensors[:p])
        for number, tensors in enumerate(layers.values(), before):
            place = f"-model_{t:02d}" if self.held.tensor_ranks > 1 else ""
            file = PickledFile(f"layer_{number:02d}{place}-model_states.pt", rank)
            for tensor in tensors:
                file.add_parameter(tensor.numel * self.param_bytes)
            yield file.saved()

    def _num_layers(self, stage: tuple[HeldTensor, ...]) -> int:
        names = {
            ".".join(tensor.name.split(".")[: next(
                (place + 1 for place, part in enumerate(tensor.name.split(".")) if part.isdigit()), -1
            )])
            for tensor in stage
        }  # fmt: skip
        return len(names)

    def _frozen_shards(self, name: str, rank: int, stage: tuple[HeldTensor, ...]) -> SavedFile:
        """The file of stage 3's module, which is empty tensors. Frozen parameters are saved as fragments."""
        file = PickledFile(name, rank, _EMPTY_TENSOR_BYTES * sum(1 for _ in own(stage)))
        for tensor in own(stage):
            if not tensor.is_trainable:
                file.add_parameter(-(-tensor.numel // self.shards) * self.param_bytes)
        return file.saved()

    def _optim_states(self, name: str, rank: int, stage: tuple[HeldTensor, ...]) -> SavedFile:
        """The file of a partition: masters, moments, and a step counter per flat tensor."""
        file = PickledFile(name, rank, _PARTITION_BYTES)
        for numel in self._partitions(stage):
            if self._is_on_drive(numel):
                file.add_states([0] * (1 + self.held.num_states))
                continue
            sizes = [numel * self.master_bytes] + [numel * self.state_bytes] * self.held.num_states
            file.add_states(sizes + [STEP_BYTES] * self.has_steps)
        return file.saved()

    def _is_on_drive(self, numel: int) -> bool:
        """Whether the states of a sub-group of so many elements are swapped, [Note: states on drives]."""
        offload = self.config.zero.offload_optimizer
        is_nvme = self.config.stage == 3 and offload is not None and offload.device == "nvme"
        return is_nvme and self.master_bytes * numel >= swap_floor_bytes(self.config.aio)

    def _offloaded(self, rank: int, stage: tuple[HeldTensor, ...]) -> Iterator[SavedFile]:
        """The rank's swap files, one per state of a sub-group."""
        for number, numel in enumerate(self._partitions(stage)):
            if self._is_on_drive(numel):
                size = aligned_numel(numel, self.master_bytes, self.config.aio) - numel
                states = numel * self.master_bytes, size * self.master_bytes
                for state in range(1 + self.held.num_states):
                    name = f"{OFFLOADED}rank{rank:02d}/{number}_{state}.tensor.swp"
                    yield SavedFile(name, rank, 0, *states)

    def _partitions(self, stage: tuple[HeldTensor, ...]) -> list[int]:
        """Elements of a rank's flat tensors: one, or in stage 3 one per sub-group."""
        if self.config.optimizer_wrapper != "zero3":
            alignment = _ALIGNMENT * self.shards
            return [-(-sum(tensor.numel for tensor in trained(stage)) // alignment) * _ALIGNMENT]
        found, total = [0], 0
        for tensor in trained(stage):
            shard = -(-tensor.numel // self.shards)
            if total >= self.config.zero.sub_group_size:
                found.append(0)
                total = 0
            found[-1] += shard
            total += shard
        return found

    def read(self, files: list[SavedFile]) -> Ints:
        """`load_checkpoint`: every rank reads the module's file of its part of the model, and the file of its
        partition or, where states are on drives, its swap files.
        """
        found = np.zeros(self.held.world_size, dtype=np.int64)
        own_bytes = np.zeros_like(found)
        has_swapped = any(file.name.startswith(OFFLOADED) for file in files)
        for file in files:
            if file.name.startswith(OFFLOADED):
                own_bytes[file.rank] += file.bytes
            elif file.name != GATHERED and not (has_swapped and file.name.endswith("_optim_states.pt")):
                is_shared = not file.name.startswith(("zero_", "bf16_zero_"))
                (own_bytes if not is_shared else found)[file.rank] += file.bytes
        for groups in self.held.ranks:
            for ranks in groups:
                found[ranks] = found[ranks[0]]
                own_bytes[ranks] = np.resize(own_bytes[ranks[: self.shards]], len(ranks))
        return found + own_bytes
