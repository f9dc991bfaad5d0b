"""The engine's side of the weights: the engine worker and the watcher that stages and commits versions."""
