"""Functions written for slime, by slime's names and signatures, on the seams that are here anyway (docs/slime-hooks.md)."""
