"""ZeRO stage 3."""
