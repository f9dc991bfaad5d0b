"""Engines: prompts in, sampled tokens with log-probs and versions out. The seam is `protocol`; `factory` makes the configured one."""
