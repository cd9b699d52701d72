"""Bytes of parameters, and what checkpointed blocks keep."""
