"""Checks of what a run's rewards need: a library, a server that listens, a key, an isolation."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from streamrl.config.reward_kinds import BOXED, Calls, Instructions, Python, named, options_of
from streamrl.config.tree import Config
from streamrl.doctor.findings import Check
from streamrl.errors import ConfigError, LaunchError
from streamrl.rewards.instructions import check_installed
from streamrl.sandbox import Sandbox

_ANSWER_S = 5.0


def check_rewards(config: Config) -> list[Check]:
    """Of the run's reward, of those whose options rows share, and of those of sets of problems; most need nothing, which is not said.

    A connection is opened to a server, and nothing is sent to it.
    """
    kinds = [(config.reward.kind, config.reward.options), *config.data.reward_options.items()]
    kinds += [(one.reward.kind, one.reward.options) for one in config.evaluation.sets if one.reward.kind]
    found = [check for kind, options in kinds if (check := _check(kind, options)) is not None]
    return list(dict.fromkeys(found))


def _check(kind: str, options: Mapping[str, Any]) -> Check | None:
    if named(kind) is None:
        return None
    name = f"reward {kind}"
    try:
        checked = options_of(kind, options)
    except ConfigError as error:
        return Check(name, "fail", error.message, error.hint)
    if kind.removeprefix(BOXED) in ("math", "deepscaler") and importlib.util.find_spec("math_verify") is None:
        return Check(name, "fail", "the package math-verify is not installed", "pip install math-verify")
    if isinstance(checked, Instructions):
        return _check_instructions(name, kind)
    if isinstance(checked, Calls):
        return _check_server(name, checked)
    if isinstance(checked, Python) and checked.isolation != "any":
        return _check_isolation(name, checked)
    return None


def _check_instructions(name: str, kind: str) -> Check | None:
    try:
        check_installed(kind)
    except ConfigError as error:
        return Check(name, "fail", error.message, error.hint)
    return None


def _check_server(name: str, options: Calls) -> Check:
    if options.token_env and not os.environ.get(options.token_env, "").strip():
        hint = "set it where the run is started, and on other hosts where their producers are"
        return Check(name, "fail", f"the environment variable {options.token_env} holds no key", hint)
    parts = urlsplit(options.url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError as error:
        hint = "start the server before the run, or correct url; rollouts fail while it is away"
        return Check(name, "warn", f"nobody answers at {host}:{port}: {error}", hint)
    return Check(name, "ok", f"{host}:{port} takes connections")


def _check_isolation(name: str, options: Python) -> Check:
    assert options.isolation != "any"
    sandbox = Sandbox(isolation=options.isolation)
    try:
        sandbox.check()
    except LaunchError as error:
        return Check(name, "fail", error.message, error.hint)
    finally:
        sandbox.close()
    return Check(name, "ok", f"programs are kept apart by {options.isolation}")
