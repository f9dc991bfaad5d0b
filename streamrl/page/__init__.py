"""The page of a run: a server on loopback that shows it in a browser. Reads, and changes nothing of the run."""
