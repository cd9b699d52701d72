"""The core of attention as an operation of a module."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels.kernel import elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.attention import context
from zsim.operations.attention.core import AttentionCore
from zsim.operations.attention.kernels import (
    LOGSUMEXP_BYTES,
    SCORE_BYTES,
    attended_pairs,
    core_backward,
    core_forward,
    is_masked,
    mask_bytes,
    num_buffers,
    unpads,
)
from zsim.operations.attention.rotary import rotary_forward
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.sharding import ContextSharding, FeatureCut
from zsim.operations.tensors import ModuleTensors, Sizes

_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Attention(AttentionCore, Operation):
    """The core of attention. `zsim.plan.workload.context` issues that over shared sequences in parts."""

    @property
    def is_function(self) -> bool:
        return True

    @property
    def role(self) -> Role:
        return Role.MIXER

    def cut_features(self, cut: FeatureCut) -> Attention:
        """The heads of one rank, with at least one key/value head."""
        if cut.is_first_rank:
            groups = -(-self.num_kv_heads // cut.ranks)
            heads = self.num_heads // self.num_kv_heads * groups
        else:
            groups, heads = max(1, self.num_kv_heads // cut.ranks), self.num_heads // cut.ranks
        return replace(self, num_heads=heads, num_kv_heads=groups)

    def cut_sequences(self, sharding: ContextSharding) -> Attention:
        return replace(self, context=sharding)

    def split_fused_projection(self) -> Attention:
        return replace(self, splits_fused_qkv=True)

    # -- work ----------------------------------------------------------------------------------------------

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        assert self.context is None, "zsim.plan.workload.context issues it in parts"
        return core_forward(self, shape, options)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Gradients of keys and values that several layers read are added up, in a kernel for each."""
        assert self.context is None, "zsim.plan.workload.context issues it in parts"
        kernels = core_backward(self, shape, options)
        if not self.reads_keys:
            return kernels
        elements = shape.tokens * self.key_value_elements * options.activation_bytes
        return (*kernels, elementwise(3 * elements, options.kernel_dtype, 2))

    def recomputed_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The rotary embedding."""
        return rotary_forward(self, shape, options)

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        keys = self.sample_keys or sequence_length
        return 2.0 * keys * self.num_heads * (self.qk_head_dim + self.v_head_dim)

    def masked_fraction(self, sequence_length: int) -> float:
        return 0.0 if self.sample_keys else 1 - attended_pairs(self, sequence_length) / sequence_length**2

    # -- memory --------------------------------------------------------------------------------------------

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Flash keeps q, k, v and log-sum-exp. Where it unpads it also keeps its output, which is scattered
        into the next layer's input, and the indices. Math keeps q, k and v of all heads and the softmax's
        output, and with dropout its mask and its output. Eager code with an fp32 softmax also keeps the
        probabilities cast back.
        """
        if self.context is not None:
            return sum(context.saved_tensors(self, shape, options))
        e, keys = options.activation_bytes, self.key_rows(shape)
        if is_masked(self, options):
            return self._masked_bytes(shape, options)
        if options.attention == "flash":
            is_doubled = self.keeps_fused_projection(options)
            rotated = (self.num_heads + self.num_kv_heads) * self.qk_head_dim if is_doubled else 0
            if self.is_latent and self.rotary_width is not None and not options.fuses_kernels:
                rotated += self.num_kv_heads * (self.qk_head_dim - self.rotary_width)  # the keys beside v
            unpadded = self.output_elements * e + _INDEX_BYTES if unpads(self, options) else 0
            bias = self._bias_bytes(shape, options) if self.bias in ("made", "zeros") else 0
            return (
                shape.tokens
                * ((self.query_elements + rotated) * e + self.num_heads * LOGSUMEXP_BYTES + unpadded)
                + keys * self.kept_key_value_elements * e
                + bias
            )
        repeated_elements = keys * self.num_heads * (self.qk_head_dim + self.v_head_dim)
        scores = self._score_bytes(shape, sum(self._bytes_per_score(options)))
        return (shape.tokens * self.query_elements + repeated_elements) * e + scores

    def _masked_bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes that fused attention keeps under a padding mask: q, keys and values of all heads, log-sum-exp
        and the mask that the layer writes out. One that the model makes is kept once, and neglected.
        """
        elements = self.query_elements + self.num_heads * (self.qk_head_dim + self.v_head_dim)
        token_bytes = elements * options.activation_bytes + self.num_heads * LOGSUMEXP_BYTES
        mask = mask_bytes(shape, options) if options.padding_mask == "bool" else 0
        return shape.tokens * token_bytes + mask

    def selective_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The core keeps q, k and v and is run again in backward."""
        keys = self.key_rows(shape) * self.kept_key_value_elements
        return (shape.tokens * self.query_elements + keys) * options.activation_bytes

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The kernel of rows without padding is FlashAttention's first, which sums its output in fp32
        (`o_tmp` of `mha_fwd`, fmha_api.cpp).
        """
        if self.context is not None:
            return sum(context.forward_tensors(self, shape, options))
        e = options.activation_bytes
        rotary = 2 * self.query_elements * e if self.rotary and not options.fuses_kernels else 0
        temporaries = 2 * self._score_bytes(shape, e) if options.attention == "math" else 0
        output = self.output_elements * e
        if unpads(self, options):  # q, k and v before the gather; the sum in fp32 is gone before the scatter
            output = self.input_elements * e + self.output_elements * max(e, 4)
        return shape.tokens * (output + rotary) + temporaries

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """FlashAttention-2 sums the gradient of queries up in fp32, in deterministic mode in several buffers
        (`zsim.cost.rates.deterministic`, also of the scores that cuDNN's writes on Hopper). For gradients of
        grouped keys and values see `_expands_groups`.
        """
        if self.context is not None:
            return sum(context.backward_tensors(self, shape, options))
        e, keys = options.activation_bytes, self.key_rows(shape) * self.key_value_elements
        elements = shape.tokens * (self.query_elements + self.output_elements) + keys
        if options.attention != "flash":
            upcast = 4 if self.upcasts_softmax and not options.compile else e
            return elements * e + 2 * self._score_bytes(shape, upcast)
        score_gradient_bytes = self._score_bytes(shape, e) if self.bias in ("made", "read") else 0
        heads = shape.sequences * self.num_heads
        sums = num_buffers(heads, options.deterministic_sms) if options.deterministic_sms else 1
        expanded = 2 * self.query_elements * e if self._expands_groups(options) else 0
        if options.writes_scores:
            score_gradient_bytes += self._score_bytes(shape, SCORE_BYTES)
        element = sums * self.query_elements * 4 + expanded
        return elements * e + shape.tokens * element + score_gradient_bytes

    def shared_input_bytes(
        self, output_bytes: int, shape: BatchShape, options: WorkOptions, *, is_last: bool
    ) -> int:
        """Bytes of v alone (or of the full fused projection of which it is a slice) where it has rotary
        embeddings, since it keeps the new q and k that these make.
        """
        if not self.rotary or self.keeps_fused_projection(options):
            return output_bytes
        if self.reads_keys or (is_masked(self, options) and self.num_kv_heads < self.num_heads):
            return 0
        values = self.num_kv_heads * self.v_head_dim * options.activation_bytes
        return shape.tokens * values if is_last else 0

    def kept_outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        """The fused kernel's output and log-sum-exp."""
        output = shape.tokens * self.output_elements * options.activation_bytes
        return output, shape.tokens * self.num_heads * LOGSUMEXP_BYTES

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        if self.context is not None:
            return ModuleTensors(
                context.saved_tensors(self, shape, options),
                context.forward_tensors(self, shape, options),
                context.backward_tensors(self, shape, options),
            )
        tokens, e = shape.tokens, options.activation_bytes
        q, k = tokens * self.query_elements * e, self.key_rows(shape) * self.key_value_elements // 2 * e
        out = tokens * self.output_elements * e
        if options.attention == "math":
            keys = self.key_rows(shape) * self.num_heads * e
            repeated_sizes = (q, keys * self.qk_head_dim, keys * self.v_head_dim)
            scores = tuple(self._score_bytes(shape, element) for element in self._bytes_per_score(options))
            gradients = (out, q, k, k)
            half = (module.backward_extra_bytes(shape, options) - sum(gradients)) // 2
            rotated = (q, q) if self.rotary and not options.fuses_kernels else ()
            temporaries = (self._score_bytes(shape, e),) * 2
            return ModuleTensors(
                (*repeated_sizes, *scores), (out, *rotated, *temporaries), (*gradients, half, half)
            )
        if unpads(self, options):
            inputs, summed = tokens * self.input_elements * e, tokens * self.output_elements * max(e, 4)
            return ModuleTensors((inputs, out), (inputs, summed), (out, inputs))
        expanded = (q, q) if self._expands_groups(options) else ()
        kept: Sizes = (q, q) if self.reads_keys else (q, k, k, q, k)
        if is_masked(self, options):
            values = tokens * self.num_heads * self.v_head_dim * e
            kept, expanded = (q, q, values, mask_bytes(shape, options)), (q, values)
        return ModuleTensors(kept, (out, q, q), (out, q, k, k, *expanded))

    def keeps_fused_projection(self, options: WorkOptions) -> bool:
        """Whether the full fused projection stays alive for the sake of v, its slice, next to the new q and k
        that the rotary embedding makes.

        Inductor makes new ones too, as a value that a product or attention reads in backward is not made
        again (torch 2.13 _functorch/partitioners.py, `ban_recompute_materialized_backward`). Liger copies the
        slices before it rotates them (Liger-Kernel ops/rope.py `rope_forward`).
        """
        if not self.rotary or not self.splits_fused_qkv:
            return False
        return not (options.compile and options.layers.replaces_fused_projection)

    def _bias_bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes of a bias that is added to the scores of every sequence. The layers that read it keep nothing
        of their own.
        """
        return self.num_heads * shape.sequence_length**2 * options.activation_bytes

    def _score_bytes(self, shape: BatchShape, bytes_each: int) -> int:
        """Bytes of all scores of written-out attention, at `bytes_each` per score."""
        return shape.sequences * self.num_heads * shape.sequence_length * self.num_keys(shape) * bytes_each

    def _bytes_per_score(self, options: WorkOptions) -> tuple[int, ...]:
        """Bytes per score of each tensor of scores that written-out attention keeps: the softmax's output.
        With dropout it also keeps its mask and its output, and otherwise after an fp32 softmax the output
        cast back. A cap keeps its tanh.
        """
        e = options.activation_bytes
        if self.softcaps:
            return (e, *replace(self, softcaps=False)._bytes_per_score(options))
        upcasts = self.upcasts_softmax and not options.compile and e < 4
        softmax = 4 if upcasts else e
        if self.dropout:
            return softmax, 1, e
        return (softmax, e) if upcasts else (softmax,)

    def _expands_groups(self, options: WorkOptions) -> bool:
        """Whether backward makes dk and dv for every query head, in the activations' type, and sums them up
        over the groups: FlashAttention-2 2.3 to 2.8.3 (csrc/flash_attn/flash_api.cpp `mha_bwd`,
        `mha_varlen_bwd`, `dk_expanded`), as does torch's copy of it
        (ATen/native/transformers/cuda/flash_attn/flash_api.cpp). So does `repeat_kv` before a masked kernel.
        """
        expands = options.expands_groups or is_masked(self, options)
        return expands and self.num_kv_heads < self.num_heads
