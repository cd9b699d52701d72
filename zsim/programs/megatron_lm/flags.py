"""The flags of Megatron's command line, by how many values they take and by what zsim makes of them.

Taken from Megatron-Core 0.16.1's own parser (`megatron/training/arguments.py` and the configurations that it
makes flags of), and from `arguments.py` of Megatron-LM 1.0 to 2.6 and Core 0.4 to 0.19.

# [Note: effects]
`NOT_SIMULATED` and the tables after it are the flags that change a step in ways that zsim refuses, `LEFT_OUT`
those that it leaves out.
Every other flag that the reader does not look up has no effect on a step in its steady state: data, logging,
checkpoints, schedules of the learning rate, inference, and the like.
"""

from __future__ import annotations

from collections.abc import Mapping

NOT_SIMULATED: Mapping[str, str] = {
    "use-torch-fsdp2": "torch's FSDP2 inside Megatron",
    "overlap-param-gather-with-optimizer-step": "gathers between parts of the optimizer step",
    "optimizer-cuda-graph": "a CUDA graph of the optimizer",
    "cpu-offloading-num-layers": "activations on the CPU under Megatron",
    "fine-grained-activation-offloading": "activations on the CPU under Megatron",
    "ddp-num-buckets": "a number of buckets (--ddp-bucket-size gives their size)",
    "ddp-reduce-scatter-with-fp32-accumulation": "gradients exchanged all-to-all and summed in fp32",
    "perform-rl-step": "steps of reinforcement learning",
    "symmetric-ar-type": "all-reduces of symmetric memory",
    "yaml-cfg": "flags in another file (give that file instead)",
    "kitchen-config-file": "quantisation by Kitchen",
    "kitchen-recipe-number": "quantisation by Kitchen",
    "te-precision-config-file": "a precision that differs by layer",
    "freeze-all-layers": "frozen layers",
    "skip-train": "runs that do not train",
}

NOT_SIMULATED_ARCHITECTURES: Mapping[str, str] = {
    "experimental-attention-variant": "attention that is not softmax attention",
    "heterogeneous-layers-config-path": "layers that differ",
    "heterogeneous-layers-config-encoded-json": "layers that differ",
    "decoder-num-layers": "encoders with decoders",
    "apply-residual-connection-post-layernorm": "a residual stream behind the norm",
    "fp32-residual-connection": "a residual stream in fp32",
    "attention-output-gate": "a gate on attention's output",
    "qk-l2-norm": "L2 norms of queries and keys",
    "qk-clip": "clipped queries and keys",
    "vision-pretraining": "vision models",
    "retro-add-retriever": "retrievers",
}
NOT_SIMULATED_DEGREES: Mapping[str, str] = {
    "hybrid-context-parallel": "context parallelism that differs by sequence",
    "use-ring-exchange-p2p": "ring exchange between stages",
    "defer-embedding-wgrad-compute": "a head's weight gradient that is deferred",
    "mtp-standalone": "multi-token prediction",
    "encoder-pipeline-model-parallel-size": "encoders with decoders",
    "encoder-tensor-model-parallel-size": "encoders with decoders",
    "pipeline-model-parallel-split-rank": "encoders with decoders",
    "standalone-embedding-stage": "a stage of the embedding alone",
}
NOT_SIMULATED_EXPERTS: Mapping[str, str] = {
    "moe-latent-size": "experts of a narrower input",
    "moe-use-upcycling": "upcycled experts",
}
NOT_SIMULATED_PRECISIONS: Mapping[str, str] = {
    "fp4-param-gather": "parameters that are gathered in fp4",
    "no-fp8-wgrad": "weight gradients in bf16 beside fp8",
    "disable-fp8-wgrad": "weight gradients in bf16 beside fp8",
}

_FUSED = "simulated as fused kernels all the same"
_HOST = "a small cost that is left out"
LEFT_OUT: Mapping[str, str] = {
    "no-masked-softmax-fusion": _FUSED,
    "no-bias-gelu-fusion": _FUSED,
    "no-bias-swiglu-fusion": _FUSED,
    "no-bias-dropout-fusion": _FUSED,
    "no-persist-layer-norm": _FUSED,
    "disable-jit-fuser": _FUSED,
    "log-params-norm": _HOST,
    "log-num-zeros-in-grad": _HOST,
    "log-max-attention-logit": _HOST,
    "check-for-large-grads": _HOST,
    "check-for-spiky-loss": _HOST,
    "calculate-per-token-loss": _HOST,
    "check-weight-hash-across-dp-replicas-interval": _HOST,
    "empty-unused-memory-level": "the allocator is simulated as without it",
    "deterministic-mode": "kernels but attention's before Hopper are simulated as without it",
    "batch-invariant-mode": "kernels are simulated as without it",
    "use-nccl-ub": "collectives are simulated as without it",
    "use-sharp": "collectives are simulated as without it",
    "ddp-pad-buckets-for-high-nccl-busbw": "buckets are simulated without its padding",
    "high-priority-stream-groups": "streams are simulated with one priority",
    "fp16-lm-cross-entropy": "the loss is simulated in fp32",
    "apply-query-key-layer-scaling": _FUSED,
    "no-scatter-gather-tensors-in-pipeline": "Megatron-Core sends whole activations in any case",
    "hierarchical-context-parallel-sizes": "the sizes of its two levels are zsim's own",
}

IDLE_WITHOUT_EXPERTS = ("moe-", "expert-", "num-experts")


_SWITCHES = """
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
    accumulate-allreduce-grads-in-fp32 add-qkv-bias adlr-autoresume allow-ambiguous-pad-tokens
    apply-layernorm-1p apply-query-key-layer-scaling apply-residual-connection-post-layernorm
    apply-wd-to-qk-layernorm async-save attention-output-gate attention-softmax-in-fp32
    auto-detect-ckpt-format batch-invariant-mode bert-no-binary-head bf16
    biencoder-shared-query-context-model cache-mla-latents calc-ft-timeouts calculate-per-token-loss
    check-for-large-grads check-for-spiky-loss checkpoint-activations ckpt-assume-constant-structure
    ckpt-convert-update-legacy-dist-opt-format ckpt-fully-parallel-load ckpt-fully-parallel-save
    create-all-gather-group cross-entropy-loss-fusion data-parallel-random-init
    dataloader-defer-npy-index-mmap dataloader-fast-cache-load dataloader-inter-document-masking
    ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw
    ddp-reduce-scatter-with-fp32-accumulation decode-only-cuda-graphs decrease-batch-size-if-needed
    defer-embedding-wgrad-compute delay-param-gather delay-wgrad-compute deterministic-mode
    dino-norm-last-layer disable-async-tensor-model-parallel-allreduce
    disable-bf16-reduced-precision-matmul disable-bias-linear disable-chunked-prefill
    disable-ckpt-fully-parallel-save disable-clone-scatter-output-in-embedding disable-fp8-wgrad
    disable-gloo-process-groups disable-jit-fuser disable-log-loss-scale-to-tensorboard
    disable-mamba-mem-eff-path disable-manual-gc-eval disable-msc disable-straggler-on-startup
    disable-strict-fsdp-dtensor-load disable-symmetric-registration disable-tp-comm-bulk-dgrad
    disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
    disable-tp-comm-split-ag disable-tp-comm-split-rs disable-use-tokenizer-model-from-checkpoint-args
    dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014
    distrib-optim-fully-reshardable-mem-efficient distribute-checkpointed-activations
    distribute-saved-activations dsa-indexer-use-sparse-loss enable-chunked-prefill enable-cuda-graph
    enable-experimental enable-ft-package enable-full-sharding-in-hsdp enable-msc enable-one-logger
    eod-mask-loss ep-overlap-early-attn-memory-release exit-on-missing-checkpoint exit-signal-handler
    exit-signal-handler-for-dataloader external-cuda-graph faiss-use-gpu fake-process-group fim-data
    fine-grained-activation-offloading finetune first-last-layers-bf16 flash-decode fp16
    fp16-lm-cross-entropy fp32-allreduce fp32-residual-connection fp4-param-gather fp8-param-gather
    freeze-all-layers fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer fsdp-manual-registration
    full-validation grad-reduce-in-bf16 group-query-attention grpo-filter-groups-with-same-reward
    hybrid-context-parallel inference-cuda-graph-all-prefills inference-disable-ep-consensus
    inference-dynamic-batching inference-dynamic-batching-prefix-caching
    inference-dynamic-batching-track-generated-token-events
    inference-dynamic-batching-track-paused-request-events inference-fuse-tp-communication
    inference-rng-tracker inference-text-gen-server-logging inference-use-synchronous-zmq-collectives
    inference-wandb-logging init-method-xavier-uniform init-model-with-meta-device
    inprocess-empty-cuda-cache inprocess-restart is-hybrid-model keep-fp8-transpose-cache
    keep-fp8-transpose-cache-when-using-custom-fsdp langrl-external-server legacy-tokenizer
    load-main-params-from-ckpt load-model-opt-format log-batch-size-to-tensorboard log-device-memory-used
    log-energy log-max-attention-logit log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm
    log-progress log-straggler log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard
    log-world-size-to-tensorboard logits-load-ignore-errors manual-gc megatron-fsdp-max-pool-double-buffer
    mla-down-proj-fusion mmap-warmup mock-data moe-apply-probs-on-input moe-enable-deepep
    moe-enable-routing-replay moe-extended-tp moe-grouped-gemm moe-layer-recompute
    moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference moe-per-layer-logging
    moe-permute-fusion moe-router-enable-expert-bias moe-router-force-load-balancing moe-router-fusion
    moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-router-pre-softmax
    moe-shared-expert-gate moe-shared-expert-overlap moe-token-dropping moe-use-legacy-grouped-gemm
    moe-use-upcycling mtp-standalone multi-latent-attention multiple-validation-sets muon-nesterov
    muon-no-split-qkv muon-use-nesterov muon-use-syrk nccl-all-reduce-for-prefill no-align-grad-reduce
    no-align-param-gather no-async-tensor-model-parallel-allreduce no-barrier-with-level-1-timing
    no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-check-for-nan-in-loss-and-grad
    no-ckpt-fully-parallel-save no-clone-scatter-output-in-embedding no-contiguous-buffers-in-local-ddp
    no-create-attention-mask-in-dataloader no-data-sharding no-delay-grad-reduce no-fp8-wgrad
    no-gradient-accumulation-fusion no-gradient-reduce-div-fusion no-inference-wandb-logging
    no-initialization no-langrl-external-server no-load-optim no-load-rng
    no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard no-manual-gc-eval
    no-masked-softmax-fusion no-mmap-bin-files no-one-logger no-overlap-p2p-communication
    no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params no-position-embedding
    no-query-key-layer-scaling no-rl-inference-logprobs-is-correction
    no-rl-offload-inference-model-weights-when-idle no-rl-offload-kv-cache-during-training
    no-rl-partial-rollouts no-rl-remove-kv-cache-during-training no-rl-reset-cuda-graphs
    no-rl-skip-bos-token no-rl-training-cuda-graphs no-rl-use-sequence-packing
    no-rl-verify-model-weights-swap no-rope-fusion no-save-optim no-save-rng
    no-scaled-masked-softmax-fusion no-scatter-gather-tensors-in-pipeline no-strict-fsdp-dtensor-load
    no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs
    no-tp-comm-split-ag no-tp-comm-split-rs no-use-layer-wise-param-layout
    no-use-tokenizer-model-from-checkpoint-args no-yarn-correction-range-round-to-int one-logger-async
    openai-gelu optimizer-cpu-offload optimizer-cuda-graph output-bert-embeddings
    overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce overlap-moe-expert-parallel-comm
    overlap-p2p-communication-warmup-flush overlap-param-gather overlap-param-gather-with-optimizer-step
    override-opt-param-scheduler override-opt_param-scheduler perform-rl-step profile qk-clip qk-l2-norm
    qk-layernorm quick-geglu recompute-activations record-memory-history renormalize-blend-weights
    replication reset-attention-mask reset-position-ids retriever-score-scaling retro-add-retriever
    retro-no-verify-neighbor-count retro-return-doc-ids reuse-grad-buf-for-mxfp8-param-ag
    rl-inference-logprobs-is-correction rl-offload-inference-model-weights-when-idle
    rl-offload-kv-cache-during-training rl-offload-optimizer-during-inference rl-partial-rollouts
    rl-persist-cuda-graphs rl-profile rl-remove-kv-cache-during-training rl-reset-cuda-graphs
    rl-skip-bos-token rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap
    rotary-interleaved run-workload-inspector-server sequence-parallel sft skip-train squared-relu
    standalone-embedding-stage swiglu te-rng-tracker test-mode tokenizer-hf-include-special-tokens
    tokenizer-hf-use-fast tokenizer-sentencepiece-legacy torch-fsdp2-no-reshard-after-forward
    tp-comm-overlap tp-comm-overlap-rs-dgrad tp-only-amax-red trust-remote-code
    untie-embeddings-and-output-weights
    use-checkpoint-args use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler
    use-contiguous-buffers-in-ddp use-cpu-initialization use-custom-fsdp use-dist-ckpt
    use-distributed-optimizer use-flash-attn use-fused-weighted-squared-relu use-kitchen-attention
    use-legacy-models use-legacy-static-engine use-mcore-models use-megatron-fsdp
    use-mp-args-from-checkpoint-args use-nccl-ub use-one-sent-docs use-persistent-ckpt-worker
    use-precision-aware-optimizer use-pytorch-profiler use-ring-exchange-p2p use-rope-scaling
    use-rotary-position-embeddings use-same-sampling-seed-across-dp-ranks use-sharp use-te-activation-func
    use-torch-fsdp2 use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping vision-pretraining
    yarn-correction-range-round-to-int
"""

_VALUES = """
    DDP-impl activation-func-clamp-value activations-checkpoint-method activations-checkpoint-num-layers
    adam-beta1 adam-beta2 adam-eps adlr-autoresume-interval app-tag-run-name app-tag-run-version
    attention-backend attention-dropout batch-size bert-embedder-type bert-load biencoder-projection-dim
    block-data-path check-weight-hash-across-dp-replicas-interval checkpoint-num-layers
    ckpt-convert-format ckpt-convert-save ckpt-format ckpt-step classes-fraction clip-grad
    config-logger-dir context-parallel-size cpu-offloading-num-layers cross-entropy-fusion-impl
    cuda-graph-impl cuda-graph-warmup-steps data-args-path data-cache-path data-impl
    data-parallel-sharding-strategy data-per-class-fraction dataloader-type ddp-bucket-size
    ddp-num-buckets decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers decoder-num-layers
    decoder-seq-length decoupled-lr decoupled-min-lr dino-bottleneck-size dino-freeze-last-layer
    dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-teacher-temp
    dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs dist-ckpt-format dist-ckpt-strictness
    dist-ckpt-workers distributed-backend distributed-timeout-minutes
    distributed-timeout-seconds-after-init dsa-indexer-head-dim dsa-indexer-loss-coeff dsa-indexer-n-heads
    dsa-indexer-topk dump-param-to-param-group-map embedding-init-method-std embedding-path
    empty-unused-memory-level encoder-num-layers encoder-pipeline-model-parallel-size encoder-seq-length
    encoder-tensor-model-parallel-size end-weight-decay error-injection-rate error-injection-type
    eval-interval eval-iters evidence-data-path exit-duration-in-mins exit-interval exit-signal
    exp-avg-dtype exp-avg-sq-dtype experimental-attention-variant expert-model-parallel-size
    expert-tensor-parallel-size ffn-hidden-size fim-eod-token fim-fragment-rate fim-middle-token
    fim-no-prefix fim-pad-token fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token
    fp4-format fp4-quantizer-factory fp4-recipe fp8-amax-compute-algo fp8-amax-history-len fp8-format
    fp8-interval fp8-margin fp8-quantizer-factory fp8-recipe ft-num-warmup-iters global-batch-size
    glu-linear-offset grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight grpo-group-size
    grpo-iterations grpo-kl-beta grpo-prompts-per-step head-lr-mult
    heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path hidden-dropout hidden-size
    hybrid-attention-ratio hybrid-layer-pattern hybrid-mlp-ratio hybrid-override-pattern hysteresis
    ict-head-size ict-load img-dim img-h img-w indexer-batch-size indexer-log-interval
    inference-batch-times-seqlen-threshold inference-coordinator-port inference-cuda-graph-max-tokens
    inference-dynamic-batching-async-sched-mode inference-dynamic-batching-block-size
    inference-dynamic-batching-buffer-guaranteed-fraction
    inference-dynamic-batching-buffer-overflow-factor inference-dynamic-batching-buffer-size-gb
    inference-dynamic-batching-chunk-size inference-dynamic-batching-cuda-graph-max-tokens
    inference-dynamic-batching-cuda-graph-mixed-prefill-count
    inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-logprobs-mode
    inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
    inference-dynamic-batching-max-requests-override inference-dynamic-batching-max-tokens
    inference-dynamic-batching-max-tokens-override inference-dynamic-batching-num-cuda-graphs
    inference-dynamic-batching-paused-buffer-size-gb
    inference-dynamic-batching-prefix-caching-coordinator-policy
    inference-dynamic-batching-prefix-caching-eviction-policy
    inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-sampling-backend
    inference-dynamic-batching-unified-memory-level inference-logging-step-interval
    inference-max-batch-size inference-max-requests inference-max-seq-length inference-shards
    init-method-std initial-loss-scale inprocess-active-world-size inprocess-barrier-timeout
    inprocess-completion-timeout inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval
    inprocess-heartbeat-timeout inprocess-last-call-wait inprocess-max-iterations
    inprocess-monitor-process-interval inprocess-monitor-thread-interval
    inprocess-progress-watchdog-interval inprocess-soft-timeout inprocess-termination-grace-time
    iter-per-epoch kitchen-attention-backend kitchen-config-file kitchen-recipe-number kv-channels
    kv-lora-rank langrl-env-config langrl-inference-server-conversation-template
    langrl-inference-server-type layernorm-epsilon lazy-mpu-init linear-attention-freq
    linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads linear-num-value-heads
    linear-value-head-dim lion-beta1 lion-beta2 load local-rank local_rank log-interval
    log-memory-interval logging-level logits-load-decode-threads logits-load-dir logits-load-kd-loss-alpha
    logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir logits-save-dtype
    logits-save-top-k logits-save-top-p-min-k loss-scale loss-scale-window lr lr-decay-iters
    lr-decay-samples lr-decay-style lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples
    lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style main-grads-dtype main-params-dtype
    make-vocab-size-divisible-by mamba-head-dim mamba-inference-conv-states-dtype
    mamba-inference-ssm-states-dtype mamba-num-groups mamba-num-heads mamba-state-dim
    mamba-training-ssm-states-dtype manual-gc-interval mask-factor mask-prob mask-type
    max-position-embeddings max-seqlen-per-dp-cp-rank max-tokens-to-oom megatron-fsdp-grad-comm-dtype
    megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype memory-snapshot-path merge-file
    micro-batch-size microbatch-group-size-per-virtual-pipeline-stage mid-level-dataset-surplus
    min-loss-scale min-lr min-offloaded-tensor-size min-scale mlp-chunks-for-prefill model-parallel-size
    moe-deepep-num-sms moe-expert-capacity-factor moe-ffn-hidden-size moe-flex-dispatcher-backend
    moe-hybridep-num-sms moe-input-jitter-eps moe-latent-size moe-layer-freq moe-router-bias-update-rate
    moe-router-dtype moe-router-group-topk moe-router-num-groups moe-router-score-function moe-router-topk
    moe-router-topk-scaling-factor moe-shared-expert-intermediate-size moe-token-dispatcher-type
    moe-token-drop-policy moe-upcycling-granularity moe-z-loss-coeff mscale mscale-all-dim
    mtp-loss-scaling-factor mtp-num-layers muon-coefficient-type muon-extra-scale-factor
    muon-fp32-matmul-prec muon-momentum muon-num-ns-steps muon-scalar-optimizer muon-scale-mode
    muon-tp-mode nccl-communicator-config-path no-rope-freq no-weight-decay-cond-type
    non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo
    non-persistent-local-ckpt-dir non-persistent-save-interval norm-epsilon normalization
    num-attention-heads num-channels num-classes num-dataset-builder-threads
    num-distributed-optimizer-instances num-experts num-layers num-layers-at-end-in-bf16
    num-layers-at-start-in-bf16 num-layers-per-virtual-pipeline-stage num-query-groups
    num-speculative-tokens num-virtual-stages-per-pipeline-rank num-workers object-storage-cache-path
    one-logger-entity one-logger-project one-logger-run-name onnx-safe optimizer
    optimizer-offload-fraction outer-dp-sharding-strategy override-ckpt-iteration padded-vocab-size
    patch-dim per-dataset-sequences-path per-split-data-args-path persistent-save-interval
    phase-transition-iterations pipeline-model-parallel-comm-backend pipeline-model-parallel-layout
    pipeline-model-parallel-size pipeline-model-parallel-split-rank position-embedding-type
    pretrained-checkpoint profile-step-end profile-step-start q-lora-rank qk-clip-alpha qk-clip-threshold
    qk-head-dim qk-pos-emb-head-dim query-in-block-prob recompute-granularity recompute-method
    recompute-num-layers refit-method relative-attention-max-distance relative-attention-num-buckets
    replication-factor replication-jump rerun-mode result-rejected-tracker-filename retriever-seq-length
    retro-attention-gate retro-cyclic-train-iters retro-encoder-attention-dropout
    retro-encoder-hidden-dropout retro-encoder-layers retro-num-neighbors retro-num-retrieved-chunks
    retro-project-dir retro-workdir rl-consumption-granularity rl-default-temperature rl-default-top-k
    rl-default-top-p rl-generation-lag rl-importance-sampling-truncation-coef
    rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size
    rl-inference-model-unified-memory-level rl-inference-pipeline-model-parallel-size
    rl-inference-tensor-model-parallel-size rl-kv-cache-management-mode rl-parallel-generation-tasks
    rl-profile-dir rl-prompts-per-eval rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin
    rl-submission-granularity rope-scaling-factor rope-type rotary-base rotary-percent
    rotary-scaling-factor rotary-seq-len-interpolation-factor s3-cache-path sample-rate save
    save-dgrads-interval save-interval save-retain-interval save-wgrads-interval
    scaled-upper-triang-masked-softmax-fusion seed seq-length sft-tokenizer-prompt-format sgd-momentum
    sharp-enabled-group short-seq-prob softmax-type split start-weight-decay step-batch-size-schedule
    straggler-ctrlr-port straggler-minmax-count suggested-communication-unit-size swin-backbone-type
    symmetric-ar-type
    te-precision-config-file tensor-model-parallel-size tensorboard-dir tensorboard-log-interval
    tensorboard-queue-size tiktoken-num-special-tokens tiktoken-pattern timing-log-level timing-log-option
    titles-data-path tokenizer-metadata tokenizer-model tokenizer-type tp-comm-bootstrap-backend
    tp-comm-overlap-cfg train-iters train-samples train-sync-interval transformer-impl v-head-dim
    vision-backbone-type vision-pretraining-type vocab-extra-ids vocab-file vocab-size wandb-entity
    wandb-exp-name wandb-project wandb-save-dir warmup weight-decay weight-decay-incr-style
    wgrad-deferral-limit window-attn-skip-freq window-size yaml-cfg yarn-beta-fast yarn-beta-slow
    yarn-original-max-position-embeddings
"""

_LISTS = """
    cp-comm-type cuda-graph-modules cuda-graph-scope data-path
    ddp-param-name-patterns-for-fp32-local-accumulation hierarchical-context-parallel-sizes
    high-priority-stream-groups iterations-to-skip moe-aux-loss-coeff moe-router-load-balancing-type
    mrope-section offload-modules profile-ranks rampup-batch-size recompute-modules report-topk-accuracies
    retriever-report-topk-accuracies rl-inference-parsers spec test-data-path tiktoken-special-tokens
    tokenizer-special-tokens train-data-path valid-data-path
"""

SWITCHES = frozenset(_SWITCHES.split())
VALUES = frozenset(_VALUES.split())
LISTS = frozenset(_LISTS.split())
FLAGS = SWITCHES | VALUES | LISTS
