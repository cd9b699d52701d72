"""Flags of Megatron's own Muon -> settings of an experiment, and back.

Read in Megatron-Core 0.16.1 to 0.19.0 training/arguments.py. `--muon-use-nesterov` is `--muon-nesterov` from
0.18 on. Coefficients, scales and momentum have no effect on a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.config import is_core_since
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.programs.megatron_lm.arguments import Arguments, refuse
from zsim.specs.formats.config_file import TrainingFile

MUONS = ("muon", "dist_muon")
_MODES = ("blockwise", "duplicated", "distributed")
_WITHOUT_GRAM_SQUARE = "cubic5"  # of Emerging-Optimizers after 0.4


def read_muon(arguments: Arguments, file: TrainingFile) -> None:
    """Read the flags of Muon, where `--optimizer` is one of `MUONS`.

    Raises InputError for what torch refuses, NotSimulatedError for what zsim lacks.
    """
    settings = file.settings
    settings["training.optimizer"] = "muon"
    if arguments.text("optimizer") == "dist_muon":
        settings["strategy.layer_wise_optimizer"] = True
    precision = arguments.text("muon-fp32-matmul-prec", "medium", ("low", "medium", "high"))
    if precision == "low":
        raise InputError(
            f"{arguments.where}: --muon-fp32-matmul-prec: found 'low', which torch does not know; expected "
            "medium or high"
        )
    if precision != "medium":
        settings["strategy.muon_fp32_matmul_prec"] = precision
    mode = arguments.text("muon-tp-mode", "blockwise", _MODES)
    if mode != "blockwise":
        settings["strategy.muon_tp_mode"] = mode
    steps = arguments.integer("muon-num-ns-steps", 5)
    if steps != 5:
        settings["strategy.muon_num_ns_steps"] = steps
    scalar_optimizer = arguments.text("muon-scalar-optimizer", "adam", ("adam", "lion"))
    if scalar_optimizer != "adam":
        settings["strategy.muon_scalar_optimizer"] = scalar_optimizer
    if arguments.has("muon-no-split-qkv"):
        settings["strategy.muon_split_qkv"] = False
    if arguments.has("muon-use-nesterov", "muon-nesterov"):
        settings["strategy.muon_nesterov"] = True
    if arguments.text("muon-coefficient-type", "quintic") == _WITHOUT_GRAM_SQUARE:
        raise NotSimulatedError(
            f"{arguments.where}: --muon-coefficient-type: {_WITHOUT_GRAM_SQUARE} leaves a product out, "
            "which is not simulated; expected quintic"
        )
    refuse(arguments, "muon-use-syrk", "products of which half is computed")
    refuse(arguments, "no-use-layer-wise-param-layout", "owners in turn from 0.18 on")


def muon_flags(table: MegatronTable) -> Iterator[str]:
    """The flags of a table's Muon. With the layer-wise distributed optimizer it is `--optimizer
    dist_muon`.
    """
    is_dist = table.layer_wise_optimizer
    yield f"--optimizer {'dist_muon' if is_dist else 'muon'}"
    for key in ("muon_tp_mode", "muon_num_ns_steps", "muon_fp32_matmul_prec", "muon_scalar_optimizer"):
        value = getattr(table, key)
        if value != MegatronTable.model_fields[key].default:
            yield f"--{key.replace('_', '-')} {value}"
    if not table.muon_split_qkv:
        yield "--muon-no-split-qkv"
    if table.muon_nesterov:
        yield "--muon-nesterov" if is_core_since(table.version, (0, 18)) else "--muon-use-nesterov"
