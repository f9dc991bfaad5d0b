"""Megatron-core's names of parameters and its distributed checkpoint, read and written without megatron-core."""
