"""What is done with the log of a run: replay, branch, tap, record, back-test, compare, dead letters."""
