"""Reads commands from stdin, one JSON list a line, runs them, and prints exit code, stdout and stderr as one; see `runs.Answering`."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

from streamrl.cli import main

for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(json.loads(line))
    print(json.dumps((code, out.getvalue(), err.getvalue())), flush=True)
