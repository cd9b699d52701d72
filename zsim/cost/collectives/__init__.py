"""Bytes and rounds of collectives, and NCCL's tuning model."""
