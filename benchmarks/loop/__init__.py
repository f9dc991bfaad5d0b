"""`streamrl bench loop`: what the stream costs a loop that fits into one process, and what it gives one with a heavy tail of lengths.

With `--screens`: what looking at a run costs it.
"""
