"""Rewards: from the episodes of a task to numbers."""
