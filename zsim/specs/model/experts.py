"""The operations of mixture-of-experts layers, as a model's file states them and as a framework runs them."""

from zsim.operations.experts import ExpertAdapterKind, ExpertAdapters, Experts
from zsim.operations.grouped_linear import GroupedKernel, GroupedLinear
from zsim.operations.merged_weights import MergedWeights
from zsim.operations.rearrange import ExpertsLibrary, MoveKind, Rearrange, SharedOutput
from zsim.operations.router import Router, ScoreFunction

__all__ = [
    "ExpertAdapterKind",
    "ExpertAdapters",
    "Experts",
    "ExpertsLibrary",
    "GroupedKernel",
    "GroupedLinear",
    "MergedWeights",
    "MoveKind",
    "Rearrange",
    "Router",
    "ScoreFunction",
    "SharedOutput",
]
