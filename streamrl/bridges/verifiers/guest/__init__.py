"""What runs in the environment with verifiers; it imports nothing of streamrl."""
