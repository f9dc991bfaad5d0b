"""The `table` trainer: exact gradients of a tabular policy in numpy."""
