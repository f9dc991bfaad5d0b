"""Bash scripts read as text: what their variables and words are, without running anything."""
