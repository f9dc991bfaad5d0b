"""Versions of a policy on their way from the trainer to the engines: manifests, transports, the publisher."""
