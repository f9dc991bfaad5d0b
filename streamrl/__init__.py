"""Reinforcement-learning post-training of LLMs as a stream over NATS JetStream."""

__version__ = "0.1.0"
