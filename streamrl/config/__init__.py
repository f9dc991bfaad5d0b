"""The configuration: its tree, how it is read and checked, and the functions that it names."""
