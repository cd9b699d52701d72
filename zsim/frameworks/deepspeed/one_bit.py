"""1-bit Adam, 1-bit LAMB and 0/1 Adam: steps that all-reduce signs in place of gradients.

DeepSpeed 0.19.6 `runtime/fp16/onebit/{adam,lamb,zoadam}.py` and `runtime/comm/nccl.py`. Once a step
compresses, the engine reduces no gradients (`enable_backward_allreduce`). The optimizer updates the momentum
with the rank's own gradient and calls `compressed_allreduce` on the fp32 momentum (0/1 Adam before its freeze
on the gradient, after it on the sum of local updates).

# [Note: compressed all-reduce]
`NcclBackend.compressed_allreduce` of M elements, padded to a multiple of n lcm(n, 8) on n ranks: add the
worker's error, take the norm as the scale, keep the new error, pack signs into M/8 bytes, all-to-all them,
all-gather the scales, average the n unpacked parts (M/n elements), the same with the server's error,
all-gather M/8 bytes and the scales, unpack. A rank sends 2 (n-1)/n M/8 bytes, a sixteenth of an all-reduce
in 16 bits.

1-bit Adam and 0/1 Adam under FP16_Optimizer see one flat fp32 tensor, in fp32 one tensor per parameter.
1-bit LAMB, under FP16_UnfusedOptimizer, sees one per parameter and flattens the momenta itself.
"""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.one_bit import OneBit
from zsim.frameworks.deepspeed.stage0 import Zero0Schedule
from zsim.plan.builder import COMPUTE, read_scalar
from zsim.plan.ops import CollectiveKind, Memory
from zsim.plan.shared.optimizer import UPDATE
from zsim.plan.stage import Stage

_FP32 = DTYPE_BYTES["fp32"]

# (passes over fp32 elements, launches) of torch's operations, each of which reads its operands and writes its
# result, of a step that reduces gradients in full and of one that does not.
# 1-bit Adam: mul_ and add_ of the momentum (5), mul_ and addcmul_ of the variance (6), sqrt, add and div (7),
# the scaled update and its add_ (5). Other steps leave the variance alone. 0/1 Adam the same.
# 1-bit LAMB: pow and sum of weights and of the update as well (6). Frozen: clone (2), mul_ and add_ (5), mul_
# and div_ by the scale (4), the gradient rebuilt (7), the fresh variance (6), both roots (8), the quotient
# (3), pow and sum of the update (3), the ratio of the roots and its maximum (4), the scaled update and its
# add_ (5).
_UPDATE = {
    "onebitadam": ((23, 9), (17, 7)),
    "onebitlamb": ((29, 15), (47, 22)),
    "zerooneadam": ((23, 9), (17, 7)),
}
_DECAY = (5, 2)  # weight_decay times the weights, added to the update
_LAMB_DECAY = (8, 4)  # the norm of the update without it as well
_ACCUMULATE = (5, 2)  # 0/1 Adam, frozen: the scaled update, added to the sum of local updates
# 0/1 Adam, frozen, when it reduces: the sum taken off the weights (5), times the root (7), copy_ of what
# comes back (2), the momentum from it (6), its quotient by the root added to the weights (10), zero_ (1).
_SYNCHRONISE = (31, 15)


class OneBitSchedule(Zero0Schedule):
    """Hooks of DeepSpeed's engine with an optimizer that reduces gradients itself."""

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        assert config.one_bit is not None
        _refuse_model_ranks(stage, config.one_bit)
        super().__init__(stage, config)
        self.one_bit = config.one_bit
        self.reduces_in_full = config.one_bit.phase == "full"
        numels = [
            parameter.numel for _, parameter in self.workload.model.named_parameters() if parameter.trainable
        ]
        self._num_tensors = len(numels)
        is_flat = config.optimizer_wrapper == "fp16_optimizer" or config.one_bit.name == "onebitlamb"
        self._tensors = [sum(numels)] if is_flat else numels
        self.decay = (
            (_LAMB_DECAY if self._is_frozen_lamb else _DECAY) if self.one_bit.decays_weights else (0, 0)
        )

    @property
    def _is_frozen_lamb(self) -> bool:
        return self.one_bit.name == "onebitlamb" and self.one_bit.is_frozen

    def _padded(self, numel: int) -> int:
        """`corrected_tensor_size`: a multiple of the ranks times the least common multiple of them and 8."""
        ranks = self.group.size
        unit = ranks * _least_multiple(ranks)
        return -(-numel // unit) * unit

    def resident(self) -> list[Memory]:
        """Also the errors of worker and server, in fp32."""
        if not self.one_bit.has_errors:
            return super().resident()
        errors = sum(
            _FP32 * (padded + padded // self.group.size) for padded in map(self._padded, self._tensors)
        )
        return [*super().resident(), Memory("optimizer_states", errors)]

    def reduce_gradients(self) -> None:
        if self.reduces_in_full:
            super().reduce_gradients()
        else:
            self.sum_tied_gradient(self.config.grad_accum_dtype)

    def check_overflow(self) -> None:
        """Also over the ranks, where each has its own gradients (`CheckOverflow.has_overflow`)."""
        super().check_overflow()
        if self.config.check_grad_overflow and not self.reduces_in_full and self.group.size > 1:
            read_scalar(self.builder, "overflow", "uint8", [self.group.name])

    def update_shards(self) -> None:
        """The optimizer's `step`, and the copy of its masters into 16-bit weights."""
        builder, one_bit = self.builder, self.one_bit
        full, frozen = _UPDATE[one_bit.name]
        passes, launches = full if self.reduces_in_full else frozen
        is_summing = one_bit.name == "zerooneadam" and one_bit.is_frozen
        if is_summing:
            passes, launches = passes + _ACCUMULATE[0], launches + _ACCUMULATE[1]
        is_reducing = one_bit.phase == "compressed" and self.group.size > 1
        last_momenta = sum(self._tensors) * _FP32 if self._is_frozen_lamb else 0
        builder.allocate("buffers", last_momenta)
        if is_reducing:
            for numel in self._tensors:
                self._all_reduce_signs(numel)
        if is_summing and one_bit.phase == "compressed":
            passes, launches = passes + _SYNCHRONISE[0], launches + _SYNCHRONISE[1]
        self._step_tensors(passes + self.decay[0], launches + self.decay[1])
        builder.free("buffers", last_momenta)
        if self.config.precision != "fp32":
            numel = self.trained_numel
            builder.move("copy weights", numel * _FP32, numel * self.param_bytes, self._num_tensors)

    def _step_tensors(self, passes: int, launches: int) -> None:
        """The update. LAMB's host waits for every tensor's ratio (`.item()`), twice if frozen weights
        decay."""
        builder = self.builder
        moved_bytes = float(_FP32 * passes)
        if self.one_bit.name != "onebitlamb":
            tensors = 1 if len(self._tensors) == 1 else self._num_tensors
            work = Kernel("optimizer", 0.0, moved_bytes * self.trained_numel, "fp32", (), launches * tensors)
            builder.kernels(UPDATE, [work], overhead="optimizer_step")
            return
        reads = 2 if self._is_frozen_lamb and self.one_bit.decays_weights else 1
        parameters = (parameter for _, parameter in self.workload.model.named_parameters())
        for numel in (parameter.numel for parameter in parameters if parameter.trainable):
            work = Kernel("optimizer", 0.0, moved_bytes * numel / reads, "fp32", (), -(-launches // reads))
            for _ in range(reads):
                builder.host_wait(builder.kernels(UPDATE, [work]))

    def _all_reduce_signs(self, numel: int) -> None:
        """See [Note: compressed all-reduce]. The largest temporaries are two fp32 tensors and a padded
        copy."""
        builder, ranks = self.builder, self.group.size
        padded = self._padded(numel)
        copy = _FP32 * padded if padded > numel and self.one_bit.name != "onebitlamb" else 0
        temporaries = copy + 2 * _FP32 * padded
        builder.allocate("buffers", temporaries)
        self._elementwise("compress", padded * (100.375 + (2 * _FP32 if copy else 0)), 17 + bool(copy))
        self._exchange("all_to_all", "signs", padded // 8)
        self._exchange("all_gather", "scales", ranks * _FP32)
        self._elementwise("average signs", padded * (34.125 + 104.125 / ranks), 24)
        self._exchange("all_gather", "signs", padded // 8)
        self._exchange("all_gather", "scales", ranks * _FP32)
        self._elementwise("expand", padded * 38.375, 7)
        builder.free("buffers", temporaries)

    def _elementwise(self, name: str, moved_bytes: float, launches: int) -> None:
        self.builder.kernels(name, [Kernel("elementwise", 0.0, moved_bytes, "fp32", (), launches)])

    def _exchange(self, kind: CollectiveKind, what: str, size: int) -> None:
        dtype = "uint8" if what == "signs" else "fp32"
        self.builder.collective(kind, size, dtype, self.group.name, stream=COMPUTE, name=f"{kind} {what}")


def _least_multiple(ranks: int) -> int:
    """The optimizers' `divider`, the least common multiple of the ranks and 8."""
    multiple = ranks
    while multiple % 8:
        multiple += ranks
    return multiple


def _refuse_model_ranks(stage: Stage, one_bit: OneBit) -> None:
    """Raises NotSimulatedError where ranks share a model otherwise than by a pipeline."""
    parallelism = stage.parallelism
    for key, degree in (
        ("tensor", parallelism.tensor),
        ("context", parallelism.context),
        ("expert", parallelism.experts.ranks),
    ):
        if degree > 1:
            raise NotSimulatedError(
                f"optimizer.type '{one_bit.name}' is not simulated with parallelism.{key} = {degree}; "
                "expected 1, or AdamW"
            )
