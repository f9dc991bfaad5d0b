"""OpenEnv's own probe of an endpoint: `python probe.py URL MODEL KEY` says what it found, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from openenv.core.harness.capture.validate_llm import validate_llm

if __name__ == "__main__":
    url, model, key = sys.argv[1:4]
    # The policy of the test has no room for the definition of a tool.
    print(json.dumps(asdict(validate_llm(url, model, api_key=key, timeout=60.0, check_tools=False))))
