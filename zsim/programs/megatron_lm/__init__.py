"""Reader and writer of Megatron's command lines and of the recipes of Megatron-Bridge and NeMo."""
