"""The operations of modules, a module each: fields, kernels in every pass, and what autograd keeps."""

from zsim.operations.activation import Activation
from zsim.operations.adapter_parts import AdapterInput, AdapterSum
from zsim.operations.attention.attention import Attention
from zsim.operations.embedding import Embedding
from zsim.operations.exchange import Exchange
from zsim.operations.experts import ExpertAdapters, Experts
from zsim.operations.grouped_linear import GroupedLinear
from zsim.operations.linear import Linear
from zsim.operations.loss import Loss
from zsim.operations.merged_weights import MergedWeights
from zsim.operations.norm import Norm
from zsim.operations.operation import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECOMPUTE,
    Module,
    Operation,
    Parameter,
    Pass,
)
from zsim.operations.rearrange import Rearrange
from zsim.operations.residual import Residual
from zsim.operations.router import Router
from zsim.operations.traced import TracedModule

__all__ = [
    "BACKWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "RECOMPUTE",
    "Activation",
    "AdapterInput",
    "AdapterSum",
    "Attention",
    "Embedding",
    "Exchange",
    "ExpertAdapters",
    "Experts",
    "GroupedLinear",
    "Linear",
    "Loss",
    "MergedWeights",
    "Module",
    "Norm",
    "Operation",
    "Parameter",
    "Pass",
    "Rearrange",
    "Residual",
    "Router",
    "TracedModule",
]
