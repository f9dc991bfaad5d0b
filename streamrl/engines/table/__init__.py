"""The `table` engine: a tabular policy without any framework."""
