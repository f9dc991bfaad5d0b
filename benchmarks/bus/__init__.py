"""`bench bus`: samples through publish, read and decode, ours beside what others use."""
