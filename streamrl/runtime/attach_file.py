"""One file with all that a producer or a rewarder needs which reaches a run's bus, and not its directory.

It holds the role's login, the configuration and the policy's tokenizer, a producer's the engines' token too: no other role's secret, no
weights, no options that look like secrets. What it names is checked before it is used: the file may come from another user.
"""

from __future__ import annotations

import re
import shutil
import zlib
from pathlib import Path

import msgspec

from streamrl.bus.address import BusAddress
from streamrl.config.code import rollout_code
from streamrl.config.load import dump, from_json, override
from streamrl.data.tokenizer import TEMPLATES_DIR, TOKENIZER_FILES, load_tokenizer
from streamrl.errors import ConfigError
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.subjects import check_name
from streamrl.system import write_private

MAX_BYTES = 256 << 20
"""Of the file, and of what it unpacks to."""
_MARK = b"streamrl-attach-1\n"
_TEMPLATE = re.compile(rf"{TEMPLATES_DIR}/[\w-]+\.jinja", re.ASCII)
"""Name of a further template of a tokenizer in the file."""


class Attachment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds."""

    run: str
    config: str
    """JSON, as in the run directory."""
    bus: BusAddress
    engine_token: str
    """Empty for a role that asks no engine."""
    tokenizer: dict[str, bytes]
    """Files by name."""
    role: str = "producer"


def write_attach_file(run: RunDir, path: Path, *, role: str = "producer") -> None:
    """Write the file of a `role`, `producer` or `rewarder`, with mode 0600.

    Raises:
        ConfigError: the role has no login of its own, or one that is in files of this host; the file cannot be written.
    """
    if not run.role_path(role).is_file():
        raise ConfigError(
            f"expected a login of the run's {role}s in {run.role_path(role)}, got none: all its workers share the operator's",
            hint='give each role a login of its own: docs/security.md, `bus.user = "...-{role}"`',
        )
    address = BusAddress.load(run.role_path(role))
    if address.credentials_file:
        raise ConfigError(
            f"expected a login with a password or a token, got one in the file {address.credentials_file}",
            hint="copy that file to the other host, and a run directory with it",
        )
    try:
        if address.ca_file:
            address = msgspec.structs.replace(address, ca_file="", ca_pem=Path(address.ca_file).read_text())
        config = run.load_config()
        policy = run.policy_dir(config)
        load_tokenizer(policy)  # says what is wrong with it
        templates = [f"{TEMPLATES_DIR}/{file.name}" for file in (policy / TEMPLATES_DIR).glob("*.jinja")]
        files = {name: (policy / name).read_bytes() for name in (*TOKENIZER_FILES, *templates) if (policy / name).is_file()}
        packed = Attachment(run.name, dump(config), address, run.engine_token() if role == "producer" else "", files, role)
        write_private(path.absolute(), _MARK + zlib.compress(msgspec.msgpack.encode(packed)))
    except OSError as error:
        raise ConfigError(
            f"the attach file cannot be written to {path}: {error}", hint="is it a file in a folder that is there?", path=str(path)
        ) from error


def unpack_attach_file(path: Path, base: Path, *, role: str = "producer", bus_url: str = "", reward: str = "") -> RunDir:
    """A run directory that holds what the file does, below `base`; made anew at each call.

    Args:
        path: of the file.
        base: for the directory, `attached/<run>` in it.
        role: that it must be of.
        bus_url: where the bus is from here; empty: as the file says.
        reward: the run's own reward as `file.py:name` on this host; needed where the run's is user code and this role scores.

    Raises:
        ConfigError: it is no such file, of another role or version of streamrl; the run's reward is user code and none is given.
    """
    found = _read(path)
    if found.role != role:
        raise ConfigError(
            f"expected an attach file of a {role} at {path}, got one of a {found.role[:20]}",
            hint=f"`streamrl credentials RUN --role {role} --out FILE` writes one",
            path=str(path),
        )
    run = RunDir(base / "attached" / check_name("run name", found.run))
    config = from_json(found.config, where=str(path))
    if config.run.name != found.run:
        raise ConfigError(
            f"expected the configuration of run {found.run!r} in {path}, got that of {config.run.name!r}", hint="export it again"
        )
    scores = role == "rewarder" or not config.reward.workers
    named = rollout_code(config).get("reward.kind", "") if scores else ""
    if named and not reward:
        raise ConfigError(
            f"the run's reward is user code, {named}, which is not in {path}",
            hint="copy it here and name it with --reward FILE.py:NAME",
            key="reward.kind",
        )
    if reward and not named:
        raise ConfigError(
            f"expected no --reward for a {role} of a run whose reward is {config.reward.kind!r} with reward.workers = "
            f"{config.reward.workers}, got {reward!r}",
            hint="leave it out",
            key="reward.kind",
        )
    config = override(config, ["model.path=", *([f"reward.kind={reward}"] if reward else [])])
    if run.lock_path.exists():
        raise ConfigError(f"expected no run of its own in {run.path}, got one", hint="choose another place with --dir")
    address = msgspec.structs.replace(found.bus, url=bus_url) if bus_url else found.bus
    run.create()
    run.model_dir.mkdir(mode=0o700, exist_ok=True)
    shutil.rmtree(run.model_dir / TEMPLATES_DIR, ignore_errors=True)
    for name in (*TOKENIZER_FILES, *filter(_TEMPLATE.fullmatch, found.tokenizer)):
        if name in found.tokenizer:
            (run.model_dir / name).parent.mkdir(exist_ok=True)
            write_private(run.model_dir / name, found.tokenizer[name])
        else:
            (run.model_dir / name).unlink(missing_ok=True)
    if found.engine_token:
        write_private(run.engine_token_path, found.engine_token.encode() + b"\n")
    address.save(run.role_path(role))
    run.write_config(config)
    return run


def _read(path: Path) -> Attachment:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"expected an attach file at {path}: {error.strerror}", hint="`streamrl credentials RUN --out FILE` writes one", path=str(path)
        ) from error
    problem = "it begins otherwise"
    if data.startswith(_MARK) and len(data) <= MAX_BYTES:
        try:
            unpacking = zlib.decompressobj()
            body = unpacking.decompress(data[len(_MARK) :], MAX_BYTES)
            if unpacking.eof:
                return msgspec.msgpack.decode(body, type=Attachment)
            problem = "it ends too early, or is too large"
        except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
            problem = str(error)
    raise ConfigError(
        f"expected an attach file at {path}: {problem}", hint="copy it again, or export it anew with the same version", path=str(path)
    )
