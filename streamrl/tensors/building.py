"""One model at a time: while transformers builds or loads a model it changes its own classes (tying, initialisation), for every thread."""

from __future__ import annotations

import threading

BUILDING = threading.Lock()
"""Held by whoever makes a transformers model: without it a model built in another thread may come out with untied embeddings."""
