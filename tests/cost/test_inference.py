"""The price of an engine's iterations: bytes of weights and caches, and measured engines."""

from __future__ import annotations

import pytest

from zsim.cost.inference.iteration import HostRates, IterationPricer, PromptChunk, decode_rates, padded_batch
from zsim.cost.inference.layers import EngineLayout, served_model
from zsim.errors import NotSimulatedError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.library import Library
from zsim.workflows.rollout.engine import tensor_all_reduce

NO_HOST = HostRates(0.0, 0.0, is_overlapped=True)


def pricer(model: str, cluster: str, layout: EngineLayout | None = None) -> IterationPricer:
    served = served_model(Library().model(model), layout or EngineLayout())
    return IterationPricer(served, load_cluster(cluster).gpu, NO_HOST)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "llama-3-70b"])
def test_all_weights_but_the_norms_are_on_the_gpu(model: str) -> None:
    spec = Library().model(model)
    served = served_model(spec, EngineLayout())
    assert served.weight_bytes == pytest.approx(2 * spec.numel, rel=4e-4)


def test_the_cache_of_llama_8b_is_128_kib_a_token() -> None:
    """32 layers x 8 heads x 128 features x keys and values x 2 B."""
    assert served_model(Library().model("llama-3.1-8b"), EngineLayout()).cache_bytes_per_token == 131_072


def test_a_latent_cache_is_of_576_elements_on_every_rank() -> None:
    """DeepSeek-V3: 512 of the latent and 64 with positions, 61 layers, whatever the tensor parallelism."""
    for tensor in (1, 8):
        served = served_model(Library().model("deepseek-v3"), EngineLayout(tensor))
        assert served.cache_bytes_per_token == 61 * 576 * 2


def test_ranks_share_weights_and_heads() -> None:
    one, four = (served_model(Library().model("llama-3-70b"), EngineLayout(ranks)) for ranks in (1, 4))
    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4, rel=0.01)
    assert four.cache_bytes_per_token == one.cache_bytes_per_token / 4


def test_few_tokens_touch_few_experts() -> None:
    """E (1 - (1 - k/E)^n) of 128 experts, 8 of which a token chooses: 8, 64 % of them, 98 %."""
    (layer,) = served_model(Library().model("qwen3-30b-a3b"), EngineLayout()).experts
    assert layer.touched_experts(1) == pytest.approx(8.0)
    assert layer.touched_experts(16) == pytest.approx(0.644 * 128, rel=1e-3)
    assert layer.touched_experts(64) == pytest.approx(0.984 * 128, rel=1e-3)


@pytest.mark.parametrize(
    ("sequences", "rows"), [(1, 1), (3, 4), (5, 8), (9, 16), (250, 256), (257, 272), (512, 512), (600, 600)]
)
def test_a_graph_computes_the_next_captured_size(sequences: int, rows: int) -> None:
    assert padded_batch(sequences, 512) == rows


@pytest.mark.parametrize(
    ("cluster", "sequences", "measured"),
    [
        ("rtx-4090-x8", 8, 18.0e-3), ("rtx-4090-x8", 16, 20.0e-3), ("rtx-4090-x8", 27, 22.8e-3),
        ("rtx-pro-6000-x8", 11, 12.0e-3), ("rtx-pro-6000-x8", 46, 19.9e-3),
        ("rtx-pro-6000-x8", 110, 27.0e-3),
    ],
)  # fmt: skip
def test_measured_iterations_of_llama_8b_are_met(cluster: str, sequences: int, measured: float) -> None:
    """vLLM 0.19 in pure decode, running sequences over tokens a second (LLMServingSim 5daddb21, bench). Their
    contexts are not in the log: a prompt of 857 tokens and about half of an answer.
    """
    price = pricer("llama-3.1-8b", cluster)
    price.host = HostRates(1.5e-3, 15e-6, is_overlapped=False)
    seconds = price.seconds(sequences, sequences * 1200)
    assert seconds == pytest.approx(measured, rel=0.25)


def test_one_more_token_in_the_caches_costs_what_its_bytes_take() -> None:
    price = pricer("llama-3.1-8b", "dgx-h100")
    difference = price.seconds(16, 16 * 1000 + 1) - price.seconds(16, 16 * 1000)
    assert difference == pytest.approx(131_072 / (0.867 * 3.35e12), rel=0.01)


def test_prompts_take_longer_than_tokens() -> None:
    price = pricer("llama-3.1-8b", "dgx-h100")
    assert price.seconds(8, 8000, [PromptChunk(2048)]) > 3 * price.seconds(8, 8000)


def test_many_sequences_are_bound_by_arithmetic() -> None:
    """8 billion parameters, 2 FLOPs each: 512 rows take longer than the weights take to read, and rates fall
    as peak over bandwidth says.
    """
    price = pricer("llama-3.1-8b", "dgx-h100")
    assert price.seconds(512, 512) > 1.5 * price.seconds(8, 8)


def test_a_gpu_without_measured_kernels_has_assumed_ones() -> None:
    rates = decode_rates(load_cluster("hgx-h20").gpu.model_copy(update={"decode": None}))
    assert rates.evidence == "assumed"
    assert 0.5 < rates.product.fraction < 1.0


def test_encoders_are_refused() -> None:
    with pytest.raises(NotSimulatedError, match="decoders with a language model's head"):
        served_model(Library().model("bert-large"), EngineLayout())


def test_the_head_of_a_quantized_model_has_16_bits() -> None:
    """Llama 3.1 8B: 128,256 x 4,096 of the head and as many of the embedding stay at 2 B, all else is 1 B."""
    spec = Library().model("llama-3.1-8b")
    whole = served_model(spec, EngineLayout()).weight_bytes
    quantized = served_model(spec, EngineLayout(weight_dtype="fp8")).weight_bytes
    ends = 2 * 128_256 * 4096 * 2
    assert quantized - ends == pytest.approx((whole - ends) / 2, rel=1e-3)


def test_experts_alone_may_have_fewer_bits() -> None:
    """gpt-oss: attention and router in bf16 beside experts of 4 bits with a scale of a byte for 16."""
    spec = Library().model("gpt-oss-20b")
    layouts = (EngineLayout(), EngineLayout(weight_dtype="fp4"))
    whole, all_fewer = (served_model(spec, layout).weight_bytes for layout in layouts)
    mixed = served_model(spec, EngineLayout(weight_dtype="fp4", dense_dtype="bf16"))
    dense = sum(product.numel * count for product, count in mixed.products.items())
    assert mixed.weight_bytes - all_fewer == pytest.approx(dense * (2 - 0.5625), abs=2)
    assert mixed.weight_bytes < whole / 2


def test_experts_that_are_unpacked_in_the_kernel_compute_slower() -> None:
    """8,192 rows on gpt-oss's experts of 4 bits take an H200 2.9 to 5.8 ms (AIConfigurator's tables)."""
    price = pricer("gpt-oss-20b", "hgx-h200", EngineLayout(weight_dtype="fp4"))
    (layer,) = price.model.experts
    assert 2.9e-3 < price._experts(layer, 8192) < 5.8e-3


def test_experts_of_a_single_block_of_scales_take_longer() -> None:
    """DeepSeek-V3's in fp8 over 16 and 8 ranks: 32 rows take vLLM's kernel 287 and 273 us on H100."""
    seconds = []
    for tensor in (16, 8):
        price = pricer("deepseek-v3", "dgx-h100", EngineLayout(tensor, weight_dtype="fp8"))
        (layer,) = price.model.experts
        seconds.append(price._experts(layer, 32))
    assert seconds == pytest.approx([287e-6, 273e-6], rel=0.25)


def test_a_graph_is_of_one_of_the_captured_sizes() -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048)
    assert padded_batch(385, 2048, sizes) == 512
    assert padded_batch(1025, 1536, sizes) == 1536
    assert padded_batch(1537, 1536, sizes) == 1537


def test_all_reduces_between_nodes_are_those_of_the_links_at_every_size() -> None:
    """2 nodes with EFA take 124 us for 512 KiB (aws-samples/awsome-distributed-training 7217859f nccl-tests
    README), no step above the protocols' own. Those of one node are kernels of the engine's own.
    """
    assert tensor_all_reduce(Library().cluster("dgx-h100"), 8) is None
    nodes = tensor_all_reduce(Library().cluster("aws-p5"), 16)
    assert nodes is not None
    assert nodes(2**19, 16) == pytest.approx(123.7e-6, rel=0.05)
    assert nodes(2**12, 16) < 0.7 * nodes(2**17, 16) < 0.7 * nodes(2**19, 16)


def test_experts_exchange_rows_by_the_links_between_nodes() -> None:
    """The gather and the scatter of 32 KiB over both groups are two all-reduces of 16 KiB."""
    layout = EngineLayout(tensor=16, expert=32)
    cluster = Library().cluster("aws-p5")
    model = served_model(Library().model("qwen3-30b-a3b"), layout)
    seconds_of = tensor_all_reduce(cluster, 16)
    assert seconds_of is not None
    price = IterationPricer(model, cluster.gpu, NO_HOST, all_reduce_seconds=seconds_of)
    assert price._exchange_seconds(2**15) == 2 * seconds_of(2**14, 2)
