"""Inference engines: the bounds of their batches, their Python, and all-reduces between nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from zsim.cost.inference.iteration import HostRates
from zsim.fabric.fabric import idle_fabric
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.topology.topology import Topology


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference engine, as it runs by itself."""

    name: str
    max_num_seqs: int
    """Sequences that run at once."""
    max_num_batched_tokens: int
    """Tokens of one iteration."""
    host: HostRates
    loop_host: HostRates
    """The same under a loop of reinforcement learning that asks for a log-probability with every token."""
    reserves_responses: bool = False
    """See [Note: reserved answers] of `zsim.workflows.rollout.replica`."""
    captures_prompts: bool = True
    """CUDA graphs of the parts between attention serve iterations with prompts too."""
    shares_at_once: bool = True
    """See [Note: shared prompts] of `zsim.workflows.rollout.replica`."""
    largest_graphs: tuple[tuple[int, int, int], ...] = ()
    """GiB of a GPU, and below them the sequences of the largest CUDA graph: with one or two tensor ranks, and
    with four or more. `MAX_GRAPH` above all of them."""


_SERVED = HostRates(1e-3, 8e-6, is_overlapped=True)
_LOOP_SECONDS = 70e-6
"""Python of a sequence that gets a token and its log-probability, each a text and an object of its own:
fitted to six steps of NeMo-RL v0.5 on H100 (8B, 30B-A3B and 32B, colocated and asynchronous, all with
`logprobs=0`, nemo_rl/models/generation/vllm/vllm_worker.py), whose mean error is 5 %. One text alone is a
call of 5 to 20 us (vllm-project/vllm pull request 54050)."""
_LOOP = HostRates(1e-3, _LOOP_SECONDS, is_overlapped=True)
"""TensorRT-LLM's is assumed to take as long as vLLM's."""
_GENERATE = HostRates(3e-3, 0.0, is_overlapped=False)
"""Assumed: transformers' `generate` takes 3 ms for a token."""
_SGLANG_GRAPHS = ((20, 8, 8), (35, 24, 80), (60, 32, 160), (160, 256, 512))
"""Of decoding alone (0.5 srt/server_args.py, `cuda_graph_max_bs`)."""

ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("vllm", 1024, 8192, _SERVED, _LOOP),
        Engine("sglang", 1024, 8192, _SERVED, _SERVED, captures_prompts=False, shares_at_once=False,
               largest_graphs=_SGLANG_GRAPHS),
        Engine("trtllm", 2048, 8192, _SERVED, _LOOP, reserves_responses=True, captures_prompts=False),
        Engine("generate", 1024, 32768, _GENERATE, _GENERATE),
    )
}  # fmt: skip
"""SGLang's scheduler appends a log-probability to a list of its request, and hands texts over to a process of
their own every 50 tokens (0.4.6 `srt/managers/scheduler_output_processor_mixin.py`, without streaming).
TensorRT-LLM's graphs are of pure decoding unless `torch_compile_config` asks for parts (03e27c7d
`llmapi/llm_args.py`)."""
SGLANG_SEQUENCES = 2048
"""Sequences at once in a loop that does not say how many: SGLang's least, up to 4,096 in large caches (0.5
srt/model_executor/model_runner.py, `max_num_reqs`)."""
MAX_GRAPH = 512  # sequences of the largest CUDA graph, vLLM's default
VLLM_OVERLAPS = (0, 14)
"""The release of vLLM from which an iteration is scheduled while the one before it runs, by default
(`config/scheduler.py`, `async_scheduling`). SGLang (0.4) and TensorRT-LLM's PyTorch backend do so as well."""
RAY_OVERLAPS = (0, 25)
"""The same where Ray runs the ranks of an engine. 0.17.1 says that its executor does not support it
(gpustack/gpustack #4979). One that does (vllm-project/vllm pull request 36836) is the default of 0.25.1, and
not of 0.20 (NVIDIA-NeMo/RL 7ea279ab nemo_rl/models/generation/vllm/patches.py)."""


def engine_of(name: str, version: str = "", *, is_ray: bool = False) -> Engine:
    """The engine of a name, as people write it: "vLLM 0.10", "TensorRT-LLM". vLLM if it is none of them."""
    letters = re.sub(r"[^a-z]", "", name.lower()).replace("tensorrt", "trt")
    engine = next((engine for key, engine in ENGINES.items() if letters.startswith(key)), ENGINES["vllm"])
    release = re.search(r"(\d+)\.(\d+)", version)
    first = RAY_OVERLAPS if is_ray else VLLM_OVERLAPS
    is_old = release is not None and (int(release[1]), int(release[2])) < first
    if engine.name == "vllm" and is_old:
        hosts = {name: replace(getattr(engine, name), is_overlapped=False) for name in ("host", "loop_host")}
        return replace(engine, **hosts)
    return engine


def largest_graph(engine: Engine, gpu: Gpu, tensor: int) -> int:
    """Sequences of an engine's largest CUDA graph. Kernels of larger batches are launched one by one."""
    for gib, narrow, wide in engine.largest_graphs:
        if gpu.memory.capacity < gib * 2**30:
            return wide if tensor >= 4 else narrow
    return MAX_GRAPH


def tensor_all_reduce(cluster: Cluster, tensor: int) -> Callable[[float, int], float] | None:
    """Seconds of an all-reduce by its bytes and its ranks, on the otherwise idle links of `tensor` ranks.

    None where NVLink connects them all: engines have kernels of their own there, which the GPU's file has.
    """
    per_domain = cluster.gpus_per_node * cluster.node_link.nodes_per_domain
    if tensor <= per_domain:
        return None
    nodes = -(-tensor // cluster.gpus_per_node)
    topology = Topology(cluster, nodes, cluster.gpus_per_node)
    fabric = idle_fabric(topology, Group.regular("tensor", tensor, tensor))

    def seconds_of(num_bytes: float, ranks: int) -> float:
        bus_bytes = (ranks - 1) / ranks * num_bytes  # half of what a rank sends
        size = round(bus_bytes * tensor / (tensor - 1))
        return fabric.transfer(Collective("all_reduce", size, "bf16", "tensor"), 0).isolated_seconds

    return seconds_of
