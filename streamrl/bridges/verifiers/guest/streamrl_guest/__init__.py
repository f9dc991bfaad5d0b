"""The guest: `python -m streamrl_guest`, told by a line of JSON on its standard input what to do."""
