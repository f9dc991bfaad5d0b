"""The trainer's side of the stream: the loop, its steps, reader, ledger and checkpoints."""
