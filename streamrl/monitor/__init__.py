"""Looking at a run: its view folded from ledger, events, metrics and presence; the screen, the status, the summary, the plot."""
