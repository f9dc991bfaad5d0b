"""Models on disk: directories that are whole or absent, tensors in files, checkpoints, and conversions between formats."""
