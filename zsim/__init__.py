"""Simulate a training step of a real model on a real cluster, ZeRO 0-3, DDP, FSDP2 and HSDP."""

__version__ = "0.1.0"
