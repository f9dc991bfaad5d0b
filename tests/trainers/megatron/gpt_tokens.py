"""What `gpt_rank.py` and the tests that start it agree on."""

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]
PADDED_TO = 56
"""Rows of the embedding in Megatron, of a vocabulary of 50."""
