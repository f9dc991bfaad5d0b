"""Benchmarks of the product, run through the product's own code: `streamrl bench`."""
