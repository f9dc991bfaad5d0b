"""Is the machine fit, and what does a configuration ask of it?"""
