"""The pieces that the families' models are made of, named and shaped as in transformers 5.23.

Weights are in torch's layout: `[out, in]` for `nn.Linear`, `[in, out]` for GPT-2's `Conv1D`.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.specs.model.spec import (
    Activation,
    Attention,
    Block,
    Embedding,
    Linear,
    Loss,
    Module,
    Norm,
    Parameter,
    Residual,
)


def linear(
    name: str, in_features: int, out_features: int, *, bias: bool = False, shares_input: bool = False
) -> Module:
    """`nn.Linear`."""
    parameters = [Parameter("weight", (out_features, in_features))]
    if bias:
        parameters.append(Parameter("bias", (out_features,)))
    return Module(name, Linear(in_features, out_features), tuple(parameters), shares_input)


def conv1d(name: str, in_features: int, out_features: int) -> Module:
    """GPT-2's `Conv1D`: a Linear with bias and a transposed weight."""
    parameters = (Parameter("weight", (in_features, out_features)), Parameter("bias", (out_features,)))
    return Module(name, Linear(in_features, out_features), parameters)


def embedding(name: str, rows: int, width: int) -> Module:
    """`nn.Embedding`."""
    return Module(name, Embedding(rows, width), (Parameter("weight", (rows, width)),))


def layer_norm(
    name: str, width: int, *, bias: bool = True, affine: bool = True, shares_input: bool = False
) -> Module:
    """`nn.LayerNorm`."""
    parameters = (Parameter("weight", (width,)),) if affine else ()
    if affine and bias:
        parameters = (*parameters, Parameter("bias", (width,)))
    return Module(name, Norm(width, "layer"), parameters, shares_input)


def rms_norm(name: str, width: int, *, rows_per_token: int = 1, kind: str = "rms") -> Module:
    """The families' own RMSNorm; `rows_per_token` > 1 normalises each head."""
    return Module(name, Norm(width * rows_per_token, kind), (Parameter("weight", (width,)),))


def residual(name: str, width: int, dropout: float = 0.0) -> Module:
    """Adding to the residual stream, with the dropout before it."""
    return Module(name, Residual(width, dropout))


def activation(name: str, width: int, function: str, *, gated: bool = False) -> Module:
    """The MLP's non-linearity over `width` features."""
    return Module(name, Activation(width, gated, function))


def attention(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    rotary: bool = True,
    dropout: float = 0.0,
    window: int | None = None,
    upcasts_softmax: bool = True,
    splits_fused_qkv: bool = False,
) -> Module:
    """Scores, softmax and values."""
    work = Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        qk_head_dim=head_dim,
        v_head_dim=head_dim,
        rotary=rotary,
        dropout=dropout,
        window=window,
        upcasts_softmax=upcasts_softmax,
        splits_fused_qkv=splits_fused_qkv,
    )
    return Module(name, work)


@dataclass(frozen=True, slots=True)
class Head:
    """What every causal language model ends with: final norm, output projection, loss.

    `softcaps` squeezes the logits through tanh (Gemma 2).
    """

    norm: Module | None
    hidden_size: int
    vocab_size: int
    is_tied: bool
    bias: bool = False
    softcaps: bool = False

    def modules(self) -> tuple[Module, ...]:
        """A tied head computes with the embedding's weight and owns at most a bias."""
        head = linear("lm_head", self.hidden_size, self.vocab_size, bias=self.bias)
        if self.is_tied:
            own = tuple(parameter for parameter in head.parameters if parameter.name != "weight")
            head = Module(head.name, head.work, own)
        before = () if self.norm is None else (self.norm,)
        cap = (activation("logit_softcap", self.vocab_size, "softcap"),) if self.softcaps else ()
        return (*before, head, *cap, Module("loss", Loss(self.vocab_size)))


def register(block: Block, *order: str) -> Block:
    """The same block, with the order in which its modules stand in `named_parameters()`."""
    owners = {module.name for module in block.modules if module.parameters}
    assert set(order) >= owners, (block.kind, owners - set(order))
    return Block(block.kind, block.modules, tuple(name for name in dict.fromkeys(order) if name in owners))
