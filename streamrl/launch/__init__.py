"""Starting a run, keeping it alive, showing it, ending it."""
