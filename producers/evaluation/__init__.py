"""Sets of problems asked at one version: the evaluator worker, and what `streamrl eval` shares with it."""
