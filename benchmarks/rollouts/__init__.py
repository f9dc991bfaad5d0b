"""`bench rollouts`: samples made by the whole stack without a trainer, beside the same servers asked by a plain HTTP client."""
