"""zsim's side of a claim: what is computed of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import zsim
from validation.papers.paper import Claim, Paper, experiment_of, merged
from validation.published.predict import predict_row, shipped_tables
from validation.published.table import read_runs
from zsim import api
from zsim.specs.experiment.resolve import resolve
from zsim.study.measured.prediction import RowResult

_STATES = ("parameters", "gradients", "optimizer_states")
Tables = Mapping[str, Any]


def _experiment(tables: Tables) -> zsim.Experiment:
    return zsim.Experiment(**tables)


def _report(tables: Tables) -> dict[str, Any]:
    return api.simulate(_experiment(tables)).report.to_dict()


def model_states(claim: Claim, tables: Tables) -> float:
    """GB of parameters, gradients and optimizer states on a GPU, for the paper's number of parameters."""
    report = _report(tables)
    size = sum(report["peak_bytes"]["gpu"][name] for name in _STATES)
    scale = 1.0 if claim.parameters is None else claim.parameters / report["model"]["parameters"]
    return float(size * scale / 1e9)


def peak(claim: Claim, tables: Tables) -> float:
    """GB of the fullest GPU."""
    return float(_report(tables)["peak_bytes"]["gpu"]["total"]) / 1e9


def allocated(claim: Claim, tables: Tables) -> float:
    """GB that torch's allocator has handed out on the fullest GPU: without the context and NCCL's buffers."""
    sizes = _report(tables)["peak_bytes"]["gpu"]
    return float(sizes["total"] - sizes["framework"]) / 1e9


def fits(claim: Claim, tables: Tables) -> float:
    """1 where the job fits, 0 where it does not."""
    return float(_report(tables)["fits"])


def step_seconds(claim: Claim, tables: Tables) -> float:
    return float(_report(tables)["step_seconds"])


def forward_seconds(claim: Claim, tables: Tables) -> float:
    return _phase_seconds("forward", tables)


def backward_seconds(claim: Claim, tables: Tables) -> float:
    return _phase_seconds("backward", tables)


def _phase_seconds(phase: str, tables: Tables) -> float:
    """Seconds of a phase of the step, as the report divides it."""
    return float(sum(_report(tables)["breakdown_by_phase_seconds"][phase].values()))


def throughput(claim: Claim, tables: Tables) -> float:
    """Tokens per second and GPU."""
    return float(_report(tables)["tokens_per_second_per_gpu"])


def model_tflops(claim: Claim, tables: Tables) -> float:
    """TFLOP/s per GPU of the model's FLOPs, without recomputation."""
    return float(_report(tables)["model_flops_per_second_per_gpu"]) / 1e12


def unmasked_tflops(claim: Claim, tables: Tables) -> float:
    """TFLOP/s per GPU of the model's FLOPs without the pairs of tokens that attention's mask leaves out."""
    report = _report(tables)
    share = report["masked_mfu_fraction"] / report["mfu_fraction"]
    return float(report["model_flops_per_second_per_gpu"] * share) / 1e12


def parameters(claim: Claim, tables: Tables) -> float:
    """Billions of parameters."""
    return float(_report(tables)["model"]["parameters"]) / 1e9


def active_parameters(claim: Claim, tables: Tables) -> float:
    """Billions of parameters that a token meets."""
    return float(_report(tables)["model"]["active_parameters"]) / 1e9


def layer_activations(claim: Claim, tables: Tables) -> float:
    """Bytes that a rank keeps of the third layer from forward to backward, in units of s b h."""
    experiment = _experiment(tables)
    job, program = resolve(experiment), zsim.make_plan(experiment).programs[0]
    first = next(number for number, op in enumerate(program.ops) if op.phase != "forward")
    name = job.model.block_name(2)
    kept = sum(
        change.bytes
        for change in program.memory
        if change.op < first and change.category == "activations" and _belongs(change.owner, name)
    )
    return kept / (job.training.micro_batch_tokens * job.model.hidden_size)


def _belongs(owner: str, block: str) -> bool:
    return owner == block or owner.startswith((f"{block}.", f"{block} "))


def sent(claim: Claim, tables: Tables) -> float:
    """GB that a GPU sends in a step, on all links."""
    rows = zsim.simulate(_experiment(tables)).report.sent
    return sum(row.inter_node_bytes_per_gpu + row.intra_node_bytes_per_gpu for row in rows) / 1e9


QUANTITIES: dict[str, Callable[[Claim, Tables], float]] = {
    "model_states": model_states,
    "peak": peak,
    "allocated": allocated,
    "fits": fits,
    "step_seconds": step_seconds,
    "forward_seconds": forward_seconds,
    "backward_seconds": backward_seconds,
    "throughput": throughput,
    "model_tflops": model_tflops,
    "unmasked_tflops": unmasked_tflops,
    "parameters": parameters,
    "active_parameters": active_parameters,
    "layer_activations": layer_activations,
    "sent": sent,
}


def zsim_value(paper: Paper, claim: Claim) -> float | None:
    """What zsim says for a claim. None where nothing is compared."""
    if not claim.quantity:
        return None
    if claim.row:
        return _row_value(claim)
    tables = experiment_of(paper, claim.job)
    value = QUANTITIES[claim.quantity](claim, tables)
    if claim.against:
        value /= QUANTITIES[claim.quantity](claim, merged(tables, claim.against))
    return value


def _row_value(claim: Claim) -> float:
    """Seconds of a step that zsim predicts for a published run, their ratio to another's, or the rate that
    follows from them.
    """
    result = _predict(claim.row)
    seconds = result.predicted_seconds
    assert seconds is not None, f"{claim.row}: {result.reason}"
    if claim.against_row:
        other = _predict(claim.against_row).predicted_seconds
        assert other is not None
        return seconds / other
    if claim.quantity == "seconds":
        return seconds
    assert result.measured_seconds is not None
    return claim.value * result.measured_seconds / seconds


def _predict(row_id: str) -> RowResult:
    (run,) = [run for run in read_runs(shipped_tables()).runs if run.row_id == row_id]
    return predict_row(run)
