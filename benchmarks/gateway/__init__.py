"""`bench gateway`: what a gateway adds to an engine's call, with many sessions open."""
