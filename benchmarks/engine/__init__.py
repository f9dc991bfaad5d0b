"""`streamrl bench engine`: tokens a second of the local engine beside transformers' own ways to generate."""
