"""What runs inside SGLang's scheduler processes: SGLang finds `register` by the entry point `streamrl` of `sglang.srt.plugins`.

Without the environment variable that our worker sets (`streamrl.engines.live_swap.messages.PLUGIN_ENV`) it does nothing.
"""

from __future__ import annotations

import os

from streamrl.engines.live_swap.messages import PLUGIN_ENV


def register() -> None:
    """Register the hooks, if a streamrl worker started this server."""
    text = os.environ.get(PLUGIN_ENV)
    if text:
        from streamrl.engines.sglang.plugin.hooks import register_hooks

        register_hooks(text)
