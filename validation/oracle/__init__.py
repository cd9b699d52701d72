"""The behaviour of PyTorch's own FSDP2 with a real model on any number of ranks, found without any of those
ranks.

The real `fully_shard` runs one training step as rank 0 of a fake process group, on fake tensors that have
shapes but no data. Nothing is computed or sent, but everything is issued: the exact collectives in order, and
every allocation, counted by torch's `FSDPMemTracker`. Llama-3-8B on 1,024 ranks takes seconds on a laptop.

    python -m validation.oracle --model llama-3-8b --world-size 1024 --reshard-after-forward true

Streams are not simulated. On a GPU the caching allocator hands out memory in host order too, so peaks carry
over; times do not exist.
"""
