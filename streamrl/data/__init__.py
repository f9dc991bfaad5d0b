"""Datasets: rows, their order, tokenizers and the model directories that a run starts from."""
