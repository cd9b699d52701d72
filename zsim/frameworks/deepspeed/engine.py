"""The hooks that DeepSpeed's engine has under every optimizer.

# [Note: gradients that ranks of a model share]
PipelineEngine sums the gradient of a tied weight over its stages before it reduces any gradient
(`_exec_reduce_tied_grads`, DeepSpeed 0.19.8 `runtime/pipe/engine.py`). AutoTP sums the gradient of a
parameter that every rank has whole but applies to its own heads (Qwen 3's norms of queries and keys) when
autograd computes it, in every micro-batch (`register_replicated_grad_hooks`, `module_inject/auto_tp.py`).
Megatron-DeepSpeed's sequence parallelism does not sum the gradients of its norms under DeepSpeed:
`allreduce_layernorm_grads` belongs to Megatron's own optimizer (`megatron/training.py` of f4157bea).
"""

from __future__ import annotations

from zsim.cost.optimizers import UpdatedTensor
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.activation_checkpoints import make_checkpoints
from zsim.frameworks.deepspeed.muon import step_matrices
from zsim.frameworks.deepspeed.parallelism import AUTOTP
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.builder import COMPUTE
from zsim.plan.hooks import Hooks
from zsim.plan.shared.optimizer import UPDATE, update
from zsim.plan.shared.shared_gradients import TiedGradient, sum_tied_gradient
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall
from zsim.specs.strategy.parallelism import TENSOR


class DeepSpeedEngine(Hooks):
    """Base class of the hooks of all stages of ZeRO."""

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        super().__init__(stage)
        self.config, self.zero = config, config.zero
        self.workload, self.training = stage.workload, stage.training
        self.param_bytes = DTYPE_BYTES[config.param_dtype]
        self.checkpoints = make_checkpoints(stage, config)
        self._lent = TiedGradient(self.builder, config.param_dtype)

    def gradient_ready(self, call: ModuleCall) -> None:
        """Sum over layers that share a block and, by [Note: gradients that ranks of a model share], over the
        ranks of AutoTP.
        """
        if call.module.lender and call.borrowed_gradient_numel:
            self._lent.add(call, call.borrowed_gradient_numel)
        for parameter in call.trainable_parameters:
            self._lent.finish(call, parameter.numel)
        if self.stage.parallelism.style != AUTOTP:
            return
        for parameter in call.parameters:
            if parameter.summed_over == TENSOR:
                size, name = parameter.numel * self.param_bytes, f"all_reduce gradient of {call.name}"
                dtype = self.config.param_dtype
                self.builder.collective(
                    "all_reduce", size, dtype, TENSOR, stream=COMPUTE, name=name, module=call.name
                )

    def sum_tied_gradient(self, dtype: str) -> None:
        """`_exec_reduce_tied_grads`, of gradients in `dtype`."""
        sum_tied_gradient(self.stage, dtype)

    def step_partition(self, numel: int, name: str = UPDATE, *, has_matrices: bool) -> None:
        """Issue the optimizer's step of a flat partition of masters. Muon's matrices have their own step."""
        config = self.config
        if has_matrices:
            step_matrices(self.builder, config, numel, name)
            return
        update(
            self.builder,
            self.training,
            [UpdatedTensor((numel,))],
            gradient_dtype=config.master_weights_dtype,
            state_dtype=config.optimizer_states_dtype,
            low_precision_copy=config.precision != "fp32",
            name=name,
        )
