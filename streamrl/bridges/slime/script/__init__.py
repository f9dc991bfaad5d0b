"""From the arguments of a training script of slime to a configuration of streamrl."""
