"""The run directory `runs/<name>/`: every file of a run has its place here."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from streamrl.config.load import dump, from_json
from streamrl.config.secret_options import SecretOptions, with_secrets
from streamrl.config.tree import Config
from streamrl.errors import ConfigError, LaunchError
from streamrl.schemas.subjects import RUN_ID, check_name
from streamrl.schemas.versions import Version
from streamrl.system import write_private

BRANCH_FILE = "branch.json"
"""In the directory of a branch: what it was trained from."""
_MOST_NAMED = 20
"""The newest of the known runs are named in a hint, at most so many."""


class RunDir:
    """Paths of one run. Making the object touches nothing; `create` makes the directories."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.config_path = self.path / "config.json"
        """The whole configuration as JSON, defaults included; holds no secrets."""
        self.bus_path = self.path / "bus.json"
        """How to reach the bus with the operator's credentials; readable by the owner only."""
        self.credentials = self.path / "credentials"
        """Secrets, one file each, readable by the owner only: the bus for each role, and the token of the engines."""
        self.engine_token_path = self.credentials / "engine-token"
        """What engines ask of those who send them requests."""
        self.gateway_key_path = self.credentials / "gateway-key"
        """What gateways ask of those who start sessions; keys of sessions are made from it."""
        self.options_path = self.credentials / "options.json"
        """Options of user code that look like secrets; see `streamrl.config.secret_options`."""
        self.tls = self.path / "tls"
        """Certificate of the embedded nats-server."""
        self.bus_store = self.path / "bus"
        """Storage of the embedded nats-server."""
        self.lock_path = self.path / "lock"
        """Locked while a supervisor runs; holds its process id."""
        self.checkpoints = self.path / "checkpoints"
        """One directory per checkpoint."""
        self.hf = self.path / "hf"
        """Policies saved as Hugging Face model directories."""
        self.model_dir = self.path / "model"
        """The initial policy, if it is built and not given."""
        self.model_files_path = self.path / "model-files.json"
        """Digests of the models' files; see `streamrl.runtime.model_digests`."""
        self.logs = self.path / "logs"
        """One file per worker."""
        self.events_path = self.logs / "supervisor.log"
        """The supervisor's own log."""
        self.summary_path = self.path / "summary.json"
        """Written when the run stops."""
        self.state_path = self.path / "state.json"
        """How far the run is, and how it ended."""
        self.note_path = self.path / "note.txt"
        """The user's words on the run; see `streamrl.monitor.runs`."""
        self.metrics = self.path / "metrics"
        """Rows of the run's metrics; see `streamrl.monitor.metrics_file`."""
        self.sinks = self.path / "sinks"
        """Positions and files of sinks, one folder each; see `streamrl.monitor.sinks`."""
        self.profile = self.path / "profile"
        """Profiles of single training steps; see `streamrl.trainers.torch.profiling`."""
        self.code = self.path / "code"
        """Copies of the user's modules, which the workers of this start import; see `streamrl.config.code_copies`."""
        self.data = self.path / "data"
        """Indices of the training rows; see `streamrl.data.line_index`. What is removed is built again."""
        self.evaluations = self.path / "evaluations"
        """Answers and results of sets of problems, a folder for each version."""
        self.plot_path = self.path / "plot.png"
        """Reward and lag over the run."""

    @property
    def name(self) -> str:
        """The run id."""
        return self.path.name

    def sink_dir(self, kind: str) -> Path:
        """Folder of one sink."""
        return self.sinks / kind

    def export_path(self, version: Version) -> Path:
        """Where a version's policy is saved: a number of another epoch is another policy."""
        return self.hf / (f"v{version.number:08d}" + (f"-e{version.epoch}" if version.epoch else ""))

    def evaluation_path(self, version: str, name: str) -> Path:
        """Where the answers of a set of problems at a version are, a line each."""
        return self.evaluations / version / f"{name}.jsonl"

    def role_path(self, role: str) -> Path:
        """How to reach the bus with a role's credentials."""
        return self.credentials / f"{role}.json"

    def bus_path_of(self, role: str) -> Path:
        """The credentials that a process of `role` loads: its role's, or `bus_path` where the cluster has no users for roles."""
        return self.role_path(role) if any(self.credentials.glob("*.json")) else self.bus_path

    def engine_token(self) -> str:
        """The run's engine token; raises ConfigError when it is not there, or empty: that would let everybody in."""
        return _secret(self.engine_token_path, "the engines' token", "engines or producers")

    def gateway_key(self) -> str:
        """The key of the run's gateways; raises ConfigError likewise."""
        return _secret(self.gateway_key_path, "the gateways' key", "gateways")

    def policy_dir(self, config: Config) -> Path:
        """Where the initial policy and its tokenizer are: the user's model, or the one that was built for the run."""
        return Path(config.model.path) if config.model.path else self.model_dir

    def gateway_path(self, worker: str) -> Path:
        """Where a gateway says which address it serves."""
        return self.path / "gateways" / f"{worker}.json"

    def log_path(self, worker: str) -> Path:
        """Log file of one worker."""
        return self.logs / f"{worker}.log"

    @property
    def foreign(self) -> str:
        """Whose run this is, if it is another user's: `a run of user 1000`; else an empty string."""
        owner = self.path.stat().st_uid
        return "" if owner == os.getuid() else f"a run of user {owner}"

    @property
    def exists(self) -> bool:
        """Whether a run was prepared here; raises ConfigError where that cannot be looked at."""
        try:
            return self.config_path.is_file()
        except OSError as error:
            raise unreadable(self, error) from error

    def create(self) -> None:
        """Make the directories, closed to other users, and the keys of engines and gateways; raises LaunchError where that cannot be."""
        check_name("run name", self.name)
        try:
            for path in (self.path, self.logs, self.checkpoints, self.hf, self.bus_store, self.credentials):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for secret in (self.engine_token_path, self.gateway_key_path):
                if not secret.exists():
                    write_private(secret, secrets.token_urlsafe(32).encode() + b"\n")
        except OSError as error:
            raise LaunchError(
                f"the run directory {self.path} cannot be made: {error.strerror}",
                hint="choose another place with --set run.dir=DIR",
                path=str(self.path),
            ) from error

    def write_config(self, config: Config) -> None:
        """Store the configuration, which `streamrl.config.secret_options.without_secrets` has been through; readers see no half file."""
        write_private(self.config_path, dump(config).encode())

    def write_tap_config(self, tap: str, config: Config) -> None:
        """Store what a tap of this run trains with, for those who compare."""
        write_private(self._tap_path(tap), dump(config).encode())

    def load_tap_config(self, tap: str) -> Config:
        """What a tap was last started with; the run's own where that is not known. Raises ConfigError."""
        path = self._tap_path(tap)
        return from_json(path.read_text(encoding="utf-8"), where=str(path)) if path.is_file() else self.load_config()

    def _tap_path(self, tap: str) -> Path:
        return self.path / f"tap-{check_name('name of a tap', tap)}.json"

    def write_secret_options(self, secrets: SecretOptions) -> None:
        """Store what `without_secrets` took out; `with_secret_options` puts it in again."""
        if secrets:
            write_private(self.options_path, msgspec.json.encode(secrets))
        else:
            self.options_path.unlink(missing_ok=True)

    def load_config(self) -> Config:
        """The stored configuration; raises ConfigError when there is none or it does not fit this version of streamrl."""
        try:
            text = self.config_path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"no configuration at {self.config_path}: {error.strerror}",
                hint="is this a run directory? `streamrl up` makes one",
                path=str(self.config_path),
            ) from error
        return from_json(text, where=str(self.config_path))

    def with_secret_options(self, config: Config) -> Config:
        """The configuration for a worker that runs user code; raises ConfigError when the options that belong to it cannot be read."""
        if not self.options_path.is_file():
            return config
        try:
            return with_secrets(config, msgspec.json.decode(self.options_path.read_bytes(), type=SecretOptions))
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"expected options in {self.options_path}: {error}", hint="`streamrl up` writes this file") from error

    @classmethod
    def find(cls, text: str, *, base: Path | str = "runs", begun: bool = False) -> RunDir:
        """The run called `text` under `base`, or the run directory at the path `text`; raises ConfigError that lists the known runs.

        `begun`: take one whose preparation has not ended, too; it has no configuration yet.
        """
        candidates = [cls(Path(base) / text)] if RUN_ID.fullmatch(text) else []
        candidates.append(cls(Path(text)))
        for run in candidates:
            if run.exists or (begun and run.lock_path.is_file()):
                return run
        if half := [run for run in candidates if run.lock_path.is_file()]:
            from streamrl.runtime.lock import holder  # which imports this module

            hint = f"wait for its `streamrl up`, or stop that with `streamrl down {text}`"
            if all(holder(run) is None for run in half):
                hint = "its start was interrupted; `streamrl up` begins it again"
            raise ConfigError(
                f"expected a run that has been prepared, got {text!r}, whose start has not come that far",
                hint=hint,
                run=text,
            )
        known = [run.name for run in known_runs(base)]
        more = f" and {len(known) - _MOST_NAMED} more (`streamrl runs`)" if len(known) > _MOST_NAMED else ""
        hint = f"known runs in {base}: {', '.join(known[:_MOST_NAMED])}{more}"
        hint = hint if known else f"there are no runs in {base} yet; `streamrl up` starts one"
        raise ConfigError(f"expected the name or directory of a run, got {text!r}", hint=hint, run=text)


def _secret(path: Path, what: str, whose: str) -> str:
    try:
        found = path.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"expected {what} in {path}: {error.strerror}",
            hint=f"`streamrl up` makes it; copy it to hosts that run {whose}",
            path=str(path),
        ) from error
    if not found:
        raise ConfigError(f"expected {what} in {path}, got an empty file", hint="delete it: `streamrl up` makes a new one")
    return found


def unreadable(run: RunDir, error: OSError) -> ConfigError:
    """The error for a run directory that this user cannot look into."""
    return ConfigError(
        f"the run directory {run.path} cannot be read: {error.strerror}", hint="whose is it? look at it as that user", path=str(run.path)
    )


def known_runs(base: Path | str = "runs", *, begun: bool = False) -> list[RunDir]:
    """The runs below `base`, the most recently started first; at the end those directories that cannot be looked into.

    `begun`: those whose preparation has not ended, too.

    Raises:
        ConfigError: `base` itself cannot.
    """
    root = Path(base)
    try:
        paths = sorted(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise unreadable(RunDir(root), error) from error
    found: list[tuple[float, RunDir]] = []
    for run in map(RunDir, paths):
        try:
            if run.exists:
                found.append((run.config_path.stat().st_mtime, run))
            elif begun and run.lock_path.is_file():
                found.append((run.lock_path.stat().st_mtime, run))
        except (ConfigError, OSError):
            found.append((0.0, run))
    return [run for _, run in sorted(found, key=lambda pair: pair[0], reverse=True)]
