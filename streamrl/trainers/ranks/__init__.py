"""Several ranks of one trainer: how they meet, how rank 0 leads them, and ranks of this machine alone."""
