"""Megatron-FSDP: Megatron's own sharding of states, gradients and parameters."""
