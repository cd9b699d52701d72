"""The pipeline schedules of Megatron-Core, DeepSpeed and nanotron, run without a GPU: their own code on each
rank, with a model, tensors and messages that only write down their names.

    python -m validation.pipeline_calls megatron DIR --out FILE.json.gz

DIR holds `megatron/` (a wheel's or a checkout's), `deepspeed/` (an unpacked sdist's), or is a checkout named
`nanotron-COMMIT`. `tests/plan/pipeline/recorded` has what they wrote: the version, and a text per
configuration and rank. "0F1" and "0B1" are computations of stage 0 on micro-batch 1; Megatron's
"isend 0SEND_F1" and "irecv 0RECV_B1" are lone messages, "/world" behind those on the world's communicator,
"batch ..." is one `batch_isend_irecv`, "wait ..." the wait for it, "synchronize" the host's wait for the
device, "0UNSHARD" and "0REDUCE_GRAD" are calls of `param_sync_func` and `grad_sync_func`; "send" and "recv"
are DeepSpeed's and nanotron's blocking messages."""
