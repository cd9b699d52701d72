"""Bytes and rounds of collectives, and what NCCL chooses."""
