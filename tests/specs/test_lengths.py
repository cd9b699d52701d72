"""Documents of different lengths: what is drawn, by hand and by order statistics; what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import exp, isclose
from pathlib import Path
from typing import Any

import pytest

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.errors import InputError, NotSimulatedError
from zsim.operations.attention.context import SharedAttention
from zsim.operations.sharding import ContextSharding
from zsim.specs.experiment.data.draw import BatchPlan, draw_lengths
from zsim.specs.experiment.data.lengths import LengthsTable
from zsim.specs.experiment.data.loading import DataTable, waiting_seconds
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import Attention
from zsim.specs.strategy.images import SampledLengths


def drawn(
    ranks: int = 1, micro_batches: int = 1, sequences: int = 1, length: int = 4096, *, often: bool = True,
    multiple: int = 1, token_flops: float = 1.0, pair_flops: float = 0.0, meeting: int = 1, **table: Any,
) -> SampledLengths:  # fmt: skip
    plan = BatchPlan(ranks, micro_batches, sequences, length, sync_group_size=ranks if often else meeting)
    return draw_lengths(LengthsTable(**table), plan, token_flops, pair_flops, multiple)


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_documents_as_long_as_a_sequence_are_the_fixed_length(batching: str) -> None:
    found = drawn(8, 4, 2, documents=(4096,), batching=batching)
    assert (found.length, found.span, found.padding_fraction) == (4096, 4096.0, 0.0)
    assert found.slowest_over_mean == 1.0


def test_packed_documents_of_one_length_leave_each_token_its_own_document() -> None:
    """Four documents of 1,024 in 4,096 tokens: sum(s^2) / sum(s) = 1,024, a quarter of the pairs."""
    found = drawn(8, 4, 2, law="constant", mean=1024)
    assert (found.length, found.span, found.masks_by_document) == (4096, 1024.0, True)
    whole = drawn(8, 4, 2, law="constant", mean=1024, attention_by_document=False)
    assert (whole.span, whole.masks_by_document) == (4096.0, False)


def test_the_documents_are_those_of_the_rank_that_has_the_most_in_each_micro_batch() -> None:
    """One sequence a rank of 1,000 tokens, of documents of 100 or 1,000 tokens alike in number. One rank has
    1,000 / 550 in the mean and one more that is cut, but where a document ends with the sequence (100 / 550
    of them): 2.64. Of 64 ranks that wait for one another one has half of its tokens in short documents or
    more, of 64 that do not a step's sum counts."""
    law: dict[str, Any] = {"documents": (100, 1000), "batching": "packed"}
    alone = drawn(1, 64, length=1000, **law).documents
    together = drawn(64, 64, length=1000, **law).documents
    once_a_step = drawn(64, 64, length=1000, often=False, **law).documents
    assert alone == pytest.approx(2.64, rel=0.05)
    assert alone < once_a_step < 1.3 * alone
    assert 2.2 * alone < together < 10.5


def test_an_exponential_law_between_bounds_has_the_mean_that_is_left_of_it() -> None:
    """Of mean m = 1,000 from a = 99.5 to b = 2,000.5, which round to the bounds: a + m - (b - a) q / (1 - q)
    with q = e^(-(b - a) / m), 765.5. Without bounds it is the law's."""
    between = drawn(8, 64, law="exponential", mean=1000, low=100, high=2000, batching="padded")
    assert between.real_tokens == pytest.approx(765.5, rel=0.01)
    assert between.length <= 2000
    free = drawn(8, 64, length=2**20, law="exponential", mean=1000, batching="padded")
    assert free.real_tokens == pytest.approx(1000, rel=0.02)


def test_a_lognormal_law_takes_one_bound_alone() -> None:
    """Of median 600 and sigma 1 from its median on: 600 e^(1/2) normal(1) / normal(0), 1,664."""
    found = drawn(8, 64, length=2**20, law="lognormal", median=600, sigma=1.0, low=600, batching="padded")
    assert found.real_tokens == pytest.approx(1664, rel=0.03)
    short = drawn(8, 64, law="lognormal", median=600, sigma=1.0, high=600, batching="padded")
    assert short.length <= 600


def test_documents_are_cut_at_the_end_of_a_sequence() -> None:
    """3,000 tokens each in sequences of 4,096. Cut at 4,096 k, 375 sequences hold 512 documents and one of 8
    ends with each: the mean of (sum of s^2) / 4,096 over a period, from the pieces counted one by one."""
    cuts = sorted({*range(0, 4096 * 375 + 1, 4096), *range(0, 3000 * 512 + 1, 3000)})
    squares = sum((b - a) ** 2 for a, b in pairwise(cuts))
    found = drawn(ranks=1, micro_batches=375, law="constant", mean=3000)
    assert isclose(found.span, squares / (4096 * 375), rel_tol=1e-9)


def test_padding_of_uniform_lengths_follows_order_statistics() -> None:
    """The longest of n uniform on (0, 1) is n / (n + 1) in the mean, the mean a half: with 4 sequences from 1
    to 4,096 tokens 0.8 of 4,096 are computed and 0.375 of that is padding."""
    found = drawn(64, 16, 4, law="uniform", low=1, high=4096, batching="padded")
    assert found.mean_tokens / 4 == pytest.approx(0.8 * 4096, rel=0.01)
    assert found.padding_fraction == pytest.approx(0.375, abs=0.01)


def test_the_slowest_of_many_ranks_follows_order_statistics() -> None:
    """One sequence each: of 31 ranks the longest of 31 uniform lengths, 31/32; of one, the mean."""
    found = drawn(31, 64, law="uniform", low=1, high=4096, batching="padded")
    assert found.length == pytest.approx(31 / 32 * 4096, rel=0.01)
    assert found.slowest_over_mean == pytest.approx(2 * 31 / 32, rel=0.02)
    assert drawn(1, 64, law="uniform", low=1, high=4096, batching="padded").slowest_over_mean == 1.0


def test_ranks_that_meet_once_a_step_average_over_its_micro_batches() -> None:
    """Sums of 64 lengths are nearly normal: the largest of 16 is 1.766 standard deviations above the mean (a
    table of normal order statistics), 1.766 / sqrt(3 x 64) = 0.127 of it for uniform lengths."""
    often = drawn(16, 64, law="uniform", low=1, high=4096, batching="padded")
    once = drawn(16, 64, law="uniform", low=1, high=4096, batching="padded", often=False)
    assert often.slowest_over_mean == pytest.approx(2 * 16 / 17, rel=0.02)
    assert once.slowest_over_mean == pytest.approx(1.127, abs=0.02)


def test_exponential_documents_see_twice_their_mean() -> None:
    """A token is in a document of mean length E(s^2) / E(s) = 2 m where sequences are much longer."""
    found = drawn(1, 32, 1, 2**18, law="exponential", mean=500)
    assert found.span == pytest.approx(1000, rel=0.03)


def test_lognormal_documents_have_their_median_and_sigma() -> None:
    """E(s^2) / E(s) = exp(mu + 3/2 sigma^2)."""
    found = drawn(1, 32, 1, 2**18, law="lognormal", median=400, sigma=0.5)
    assert found.span == pytest.approx(400 * exp(1.5 * 0.25), rel=0.03)


def test_a_seed_gives_the_same_lengths_again() -> None:
    one = drawn(8, 4, law="lognormal", median=400, sigma=1.0)
    assert one == drawn(8, 4, law="lognormal", median=400, sigma=1.0)
    assert one != drawn(8, 4, law="lognormal", median=400, sigma=1.0, seed=1)


def test_padded_sequences_are_whole_multiples() -> None:
    """1,000 tokens padded to 64: 1,024; then to what ranks must share, 96: 1,056."""
    assert drawn(law="constant", mean=1000, batching="padded", pad_to=64).length == 1024
    assert drawn(law="constant", mean=1000, batching="padded", pad_to=64, multiple=96).length == 1056


def test_a_histogram_weighs_lengths_by_their_counts(tmp_path: Path) -> None:
    """512 three times as often as 1,024: (3 x 512 + 1,024) / 4 = 640 in the mean."""
    path = tmp_path / "lengths.csv"
    path.write_text("length,count\n512,3\n1024,1\n")
    found = drawn(64, 64, file=str(path), batching="padded")
    assert found.real_tokens == pytest.approx(640, rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [("512,many\n9,x\n", "line 1: found what is no whole number, expected a length"),
     ("512,0\n", "found no documents"), ("512,1\n0,4\n", "line 2: found a length of 0, expected"),
     ("", "found no documents"), ("512,1,7\n", "line 1: found 3 values, expected"),
     ("9" * 200_000, "line 1: found more than a line of numbers has, expected")],
)  # fmt: skip
def test_a_histogram_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        drawn(file=str(path))


@pytest.mark.parametrize("text", ["root:x:0\n", "length,secret\n5,secret\n", "5\nsecret", "secret,1,2\n7,s"])
def test_no_error_quotes_a_line_of_the_file(tmp_path: Path, text: str) -> None:
    """Who names a file in an experiment need not be who may read it."""
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        drawn(file=str(path))
    said = str(refused.value).partition("lengths.csv")[2].partition("expected")[0]
    assert not any(word in said for word in ("secret", "root", "7,s", "5,s"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "found none of them; expected one of `documents`"),
        ({"documents": [5], "law": "constant", "mean": 3}, "found documents and law"),
        ({"law": "lognormal", "median": 600}, r"lengths.sigma: missing, which law 'lognormal' needs"),
        (
            {"law": "exponential", "median": 6, "mean": 3},
            "lengths.median: law 'exponential' has no such.*mean",
        ),
        ({"law": "uniform", "low": 9, "high": 3}, "lengths.high: found 3, expected at least the low of 9"),
        ({"law": "exponential", "mean": 9, "low": 9, "high": 3}, "lengths.high: found 3, expected at least"),
        ({"law": "exponential", "mean": 9, "low": 900}, "next to no lengths from 900 to no bound"),
        ({"law": "constant", "mean": 9, "high": 30}, "law 'constant' has no such parameter"),
        ({"documents": [5], "pad_to": 8}, "pads nothing; expected batching 'padded'"),
        ({"file": "nowhere.csv"}, "nowhere.csv: no such file"),
        ({"law": "lognormale", "median": 6}, "did you mean 'lognormal'"),
        (2048, "lengths: found 2048, expected a table of documents, file, law, mean, median, "),
    ],
)
def test_lengths_that_say_too_little_or_too_much_are_refused(table: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(lengths=table)


def job(parallelism: Any = None, strategy: Any = None, **training: Any) -> Any:
    return resolve(
        Experiment(
            model="llama-2-7b", cluster="dgx-h100", nodes=1, parallelism=parallelism or {},
            strategy=strategy or {"kind": "fsdp2"}, training={"sequence_length": 4096, **training},
        )
    )  # fmt: skip


def test_attention_by_document_is_of_the_fused_kernel_on_one_rank() -> None:
    table = {"law": "constant", "mean": 512}
    with pytest.raises(NotSimulatedError, match="attention 'math' computes all pairs"):
        job(lengths=table, attention="math")
    with pytest.raises(NotSimulatedError, match=r"parallelism.context = 2 but by Transformer Engine"):
        job({"context": 2}, lengths=table)
    assert (
        job({"context": 2}, lengths={**table, "attention_by_document": False}).training.lengths.span == 4096
    )
    packed = job({"context": 2}, {"kind": "megatron"}, lengths=table)
    assert packed.training.lengths.documents == 8
    modules = [module.op_spec for module in packed.model.blocks[0].modules]
    core = replace(
        next(one for one in modules if isinstance(one, Attention)), context=ContextSharding(2, "p2p", "te")
    )
    options, shape = WorkOptions.of(packed.training), BatchShape.of(packed.training)
    shared = SharedAttention.of(core, shape, options)
    assert (shared.sequences, shared.length, shared.tokens) == (8, 512, 2048)
    assert SharedAttention.of(core, replace(shape, span=None), options).tokens == 2048


def test_ranks_of_fsdp2_meet_in_every_micro_batch_and_megatrons_do_not() -> None:
    table = {"law": "uniform", "low": 1, "high": 4096, "batching": "padded"}
    often = job(lengths=table, gradient_accumulation_steps=16).training
    once = job(strategy={"kind": "megatron"}, lengths=table, gradient_accumulation_steps=16).training
    assert often.sequence_length > 1.3 * once.sequence_length


@pytest.mark.parametrize(
    ("strategy", "meets"),
    [
        ({"kind": "ddp"}, False),
        ({"kind": "ddp", "no_sync": False}, True),
        ({"stage": 1}, False),
        ({"stage": 2}, True),
        ({"config": 3}, True),
        ({"kind": "reference", "stage": 1}, False),
        ({"kind": "reference", "stage": 2}, True),
    ],
)
def test_ranks_meet_where_gradients_are_reduced_in_every_micro_batch(
    tmp_path: Path, strategy: dict[str, Any], meets: bool
) -> None:
    """From ZeRO-2 on, whether the stage is in the experiment or in a file that it names. Of 16 lengths
    the longest is 1.88 times the mean (uniform ones); of sums of four it is less."""
    if "config" in strategy:
        path = tmp_path / "ds.json"
        path.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}')
        strategy = {"kind": "deepspeed", "config": str(path)}
    training = {
        "sequence_length": 512,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "lengths": {"law": "uniform", "low": 1, "high": 512, "batching": "padded"},
    }
    job = resolve(Experiment(model="gpt2", cluster="dgx-h100", nodes=2, training=training, strategy=strategy))
    assert job.training.lengths is not None
    assert (job.training.lengths.slowest_over_mean > 1.8) == meets


ALL, HALVES, ALONE = 482, 465, 348  # tokens: see below


@pytest.mark.parametrize(
    ("strategy", "tokens"),
    [
        ({"kind": "fsdp2"}, ALL),
        ({"kind": "fsdp2", "no_sync": True}, ALL),  # gathers in every micro-batch
        ({"kind": "fsdp2", "replicate": 2}, ALL),  # reduces in every one
        ({"kind": "fsdp2", "replicate": 2, "no_sync": True}, HALVES),
        ({"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "no_sync": True}, HALVES),  # the nodes
        ({"kind": "fsdp2", "replicate": 16, "no_sync": True}, ALONE),
        ({"kind": "fsdp1", "no_sync": True}, ALL),
        ({"kind": "fsdp1", "sharding_strategy": "SHARD_GRAD_OP", "no_sync": True}, ALONE),  # stays gathered
        ({"kind": "megatron", "distributed_optimizer": True, "fsdp_sharding": "optim_grads_params"}, ALL),
        ({"kind": "megatron", "distributed_optimizer": True, "fsdp_sharding": "optim"}, ALONE),
    ],
)
def test_replicas_meet_once_a_step_unless_they_reduce_or_gather(
    strategy: dict[str, Any], tokens: int
) -> None:
    """Sequences of 1 to 512 tokens, 8 micro-batches of 16 replicas. The longest of 16 has 512 x 16/17 tokens.
    Of 8 it has 512 x 8/9, with a deviation of 51; the larger of two means of 8 is 0.56 x 51 / sqrt(8) above.
    Means of 8 lengths deviate by 52, and the largest of 16 is 1.77 of that above 256. 32 steps are drawn."""
    training = {
        "sequence_length": 512,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "lengths": {"law": "uniform", "low": 1, "high": 512, "batching": "padded"},
    }
    job = resolve(Experiment(model="gpt2", cluster="dgx-h100", nodes=2, training=training, strategy=strategy))
    assert job.training.sequence_length == pytest.approx(tokens, rel=0.02)


def test_a_step_waits_for_samples_that_load_more_slowly() -> None:
    """8 GPUs load 8 x 2 x 4 = 64 sequences a step: at 16 a second 4 s, of which a step of 1 s hides 1."""
    training = job(micro_batch_size=2, gradient_accumulation_steps=4).training
    slow = DataTable(samples_per_second_per_host=16.0)
    assert waiting_seconds(slow, training, 8, 1, 1.0) == 3.0
    assert waiting_seconds(slow, training, 8, 1, 5.0) == 0.0
    assert waiting_seconds(slow.model_copy(update={"prefetch": False}), training, 8, 1, 5.0) == 4.0
    assert waiting_seconds(slow, training, 8, 8, 0.25) == 0.25  # ranks of one model read the same 8
    assert waiting_seconds(DataTable(), training, 8, 1, 1.0) == 0.0


def test_ranks_that_share_experts_meet_in_every_micro_batch_by_groups() -> None:
    """Of 4 uniform lengths the longest is 2 x 4/5 of the mean, of variance 4 / (25 x 6) = 0.0267: sums of 64
    of them are 0.0408 of a mean apart, and the largest of 4 sums 1.03 of that above (normal laws)."""
    groups = drawn(16, 64, law="uniform", low=1, high=4096, batching="padded", often=False, meeting=4)
    assert groups.slowest_over_mean == pytest.approx(1.6 + 1.03 * 2 * 0.0267**0.5 / 8, abs=0.02)


def test_megatrons_experts_make_their_ranks_meet() -> None:
    lengths = {"law": "uniform", "low": 1, "high": 512, "batching": "padded"}
    training = {"sequence_length": 512, "gradient_accumulation_steps": 16, "lengths": lengths}
    slowest = []
    for degrees in (
        {"expert": 1},
        {"expert": 8},
        {"expert": 8, "tensor": 8, "expert_tensor": 1, "sequence_parallel": True},
    ):
        given: Any = {"cluster": "dgx-h100", "nodes": 8, "parallelism": degrees, "training": training}
        found = resolve(Experiment(model="olmoe-1b-7b", strategy={"kind": "megatron"}, **given))
        assert found.training.lengths is not None
        slowest.append(found.training.lengths.slowest_over_mean)
    assert slowest[1] > 1.2 * slowest[0]
    assert slowest[2] < 1.5  # one replica's own ranks exchange: replicas meet once a step
