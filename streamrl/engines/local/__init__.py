"""The `local` engine: transformers models with continuous batching, on a CPU or one GPU."""
