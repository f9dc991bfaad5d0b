"""What every worker process has: the run directory, a connected bus, signals, exit codes."""
