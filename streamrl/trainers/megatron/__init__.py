"""The `megatron` trainer: parallel models of megatron-core."""
