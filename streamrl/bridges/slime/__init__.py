"""slime: its hooks (docs/slime-hooks.md), and its training scripts (docs/import-slime.md)."""
