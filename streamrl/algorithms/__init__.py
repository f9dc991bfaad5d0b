"""From rewards and log-probs to a loss: estimators of advantages, the objective, policy losses, corrections, KL, reductions, heads."""
