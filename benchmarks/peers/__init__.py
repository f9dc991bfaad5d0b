"""Other projects on the same model, rows and number of steps."""
