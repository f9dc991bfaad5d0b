"""The `torch` trainer: a Hugging Face causal language model under AdamW."""
