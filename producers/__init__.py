"""Processes that publish: the feeder, rollout producers, the evaluator."""
