"""SGLang servers as engines: started and watched by us, their weights changed while they decode."""
