"""Continuous batching in this process: a decode loop over any `DecodeModel`."""
