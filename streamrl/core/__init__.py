"""Pure functions: the fold, the losses, digests. No clock, no bus, no process."""
