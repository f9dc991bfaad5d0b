"""slime: its hooks, and its training scripts."""
