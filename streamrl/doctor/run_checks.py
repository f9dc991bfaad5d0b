"""Checks of one run: what its configuration asks of this machine, and, where it is up, whether its bus answers and keeps the time."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from streamrl.bus import BusAddress, connect
from streamrl.bus.permissions import READER
from streamrl.config.code import rollout_code
from streamrl.config.data import has_images
from streamrl.config.loss import estimator_of
from streamrl.config.recording import recording_of
from streamrl.config.registry import Role
from streamrl.config.tree import Config
from streamrl.doctor.backend import check_backend, check_served
from streamrl.doctor.findings import Check
from streamrl.doctor.gpu_memory import check_gpu_memory, read_shape
from streamrl.doctor.limits import GIBIBYTE
from streamrl.doctor.rewards import check_rewards
from streamrl.errors import BusError, ConfigError
from streamrl.models.directories import list_checkpoints
from streamrl.runtime.lock import holder
from streamrl.runtime.rundir import RunDir
from streamrl.weights.factory import weights_directory

MEBIBYTE = 1 << 20
SGLANG_TRIED = ("0.5.17", "0.5.23")
_LEAST_DISK_BYTES = 64 * MEBIBYTE
_LEAST_SHM_BYTES = MEBIBYTE
_MAX_SKEW_S = 1.0
_HUNG_ROLLOUTS = 0.05
_ANSWER_S = 5.0
_START_S = 60.0
_SAY_VERSION = "from importlib.metadata import version; print(version('sglang'))"


def check_config(config: Config, *, num_gpus: int, gpu_bytes: int = 0, up: bool = False) -> list[Check]:
    """What the configuration asks for; `gpu_bytes`: memory of the trainer's GPU, of several the least; `up`: the run holds its ports."""
    checks = [check_budgets(config), check_gpus_wanted(config, num_gpus)]
    checks += [check for check in (check_checkpoints(config), check_backend(config)) if check is not None]
    checks += check_gpu_memory(config, gpu_bytes)
    if not up:
        checks.append(check_ports_wanted(config))
    checks += check_plan(config)
    checks += check_rewards(config)
    if config.engine.traits.server:
        checks.append(check_sglang(config.engine.sglang.python))
    if config.ray.address:
        checks.append(check_ray())
    return checks


def check_plan(config: Config) -> list[Check]:
    """Those checks that need nothing but the configuration, and the model's description where it is here: no device, port or package."""
    checks = [check_logins(config)] if config.bus.url else []
    checks += [check for check in (check_served(config),) if check is not None]
    return [*checks, check_credits(config)] if rollout_code(config) else checks


def check_budgets(config: Config) -> Check:
    """Whether the disk holds what the bus may store; the rest of a run directory is checkpoints, logs and keys."""
    if config.bus.url:
        return Check("budgets", "ok", "the log is on the cluster's disks")
    keys = ["samples_bytes", "blobs_bytes"]
    if config.trainer.routing_replay or recording_of(config).anything or has_images(config.data):
        keys.append("sample_blobs_bytes")
    wanted = sum(getattr(config.bus, key) for key in keys)
    place, free = _room(config)
    found = f"samples and blobs may take {wanted / GIBIBYTE:.1f} GB, {free / GIBIBYTE:.1f} GB are free at {place}"
    if wanted > free:
        hint = f"lower {', '.join(f'bus.{key}' for key in keys)}, or choose another place with run.dir; a full disk stops the bus"
        return Check("budgets", "warn", found, hint)
    return Check("budgets", "ok", found)


def check_checkpoints(config: Config) -> Check | None:
    """Whether the disk holds two checkpoints, the newest and the one that is written, beside the log; None where that is not known.

    An older one is removed when all files of the newer have been read back, so with less room than that there is no second one.
    """
    if config.ray.address or (shape := read_shape(config.model.path)) is None or config.trainer.tabular:
        return None
    itemsize, loss = 2 if (config.trainer.dtype or config.model.dtype) == "bfloat16" else 4, config.loss
    trained = [shape.parameters]
    if Role.VALUE in estimator_of(loss).needs:
        critic = read_shape(loss.critic.path) or shape
        trained.append(critic.parameters)
    each = sum(trained) * (itemsize + 8 + (4 if itemsize < 4 else 0)) + (shape.parameters * itemsize if loss.kl.reference_every else 0)
    place, free = _room(config)
    run = RunDir(Path(config.run.dir) / config.run.name)
    there = sum(_bytes(path) for _, path in list_checkpoints(run.checkpoints, f"{config.trainer.name}-"))
    found = f"{each / GIBIBYTE:.1f} GB each, {free / GIBIBYTE:.1f} GB are free at {place}"
    found += f" and {there / GIBIBYTE:.1f} GB hold those that there are" if there else ""
    kept = config.trainer.keep_checkpoints
    hint = "free some space, or choose another place with run.dir"
    if 2 * each > free + there:
        return Check("checkpoints", "fail", f"{found}: not enough for one that is kept and one that is written", hint)
    if (kept + 1) * each > free + there:
        return Check("checkpoints", "warn", f"{found}: not enough for trainer.keep_checkpoints = {kept} and one more", hint)
    return Check("checkpoints", "ok", found)


def check_start_room(config: Config) -> Check:
    """Look whether there is room for a start at all, and for what is certain to be written soon: the built model, the store, the logs."""
    place, free = _room(config)
    found = f"{free / MEBIBYTE:.0f} MB are free at {place}"
    if free < _LEAST_DISK_BYTES:
        return Check("disk", "fail", f"{found}, less than {_LEAST_DISK_BYTES // MEBIBYTE} MB", "free some space, or choose another run.dir")
    return Check("disk", "ok", found)


def check_weights_room(config: Config, model_dir: Path) -> Check | None:
    """Look whether shared memory holds the versions that are kept and the next one; None where weights take another way.

    Args:
        config: of the run.
        model_dir: the policy, built where the run builds it.
    """
    weights, run = config.weights, RunDir(Path(config.run.dir) / config.run.name)
    if not weights.in_shared_memory or config.ray.address:
        return None
    directory = weights_directory(weights, run.name, run.path)
    shape = read_shape(str(model_dir))
    itemsize = 2 if (config.trainer.dtype or config.model.dtype) == "bfloat16" else 4
    each = shape.parameters * itemsize if shape is not None else 0
    wanted = max((weights.keep + 1) * each, _LEAST_SHM_BYTES)
    free = shutil.disk_usage(directory.parent).free + _bytes(directory)
    found = f"{free / MEBIBYTE:.1f} MB are free at {directory.parent}, "
    found += (
        f"{weights.keep + 1} versions of {each / MEBIBYTE:.1f} MB are there at a time" if each else "which holds the versions of weights"
    )
    if wanted > free:
        hint = "mount a larger /dev/shm (docker run --shm-size=8g), lower weights.keep, or set weights.transport = 'bus'"
        return Check("weights", "fail", found, hint)
    return Check("weights", "ok", found)


def check_logins(config: Config) -> Check:
    """Whether the roles are kept apart on an existing cluster."""
    if config.bus.by_role:
        return Check("roles", "ok", "one login of the cluster each")
    hint = "put {role} into bus.user and bus.password_file; `streamrl doctor TOML --nats-accounts` prints what the cluster needs for it"
    return Check("roles", "warn", "not separated: all workers share one login of the cluster", hint)


def check_credits(config: Config) -> Check:
    """How many tasks a second the credits allow while some of the user's rollouts hang until their limit.

    Credits are enough where they are twice the rate times the mean time that a task holds one: the rest of the tasks then never waits.
    Engines that lag on purpose take some of them. A task that expires after E versions has held its credit for at most E * B tasks,
    whatever the rate is.
    """
    tasks = config.tasks
    credits = (tasks.max_staleness - config.debug.delay_versions + 1) * tasks.batch_tasks
    hold_s, expire = config.producer.idle_timeout_s, tasks.expire_versions
    hung = 1 - (1 - _HUNG_ROLLOUTS) ** config.group_size
    limit = f"{hold_s:g} s (producer.idle_timeout_s)" + (f" or {expire} versions (tasks.expire_versions)" if expire else "")
    always = expire and credits >= 2 * hung * expire * tasks.batch_tasks
    enough = "at any rate" if always else f"for {credits / (2 * hung * hold_s):.1f} tasks/s"
    found = f"{credits} credits; where {_HUNG_ROLLOUTS:.0%} of rollouts hang, {hung:.0%} of tasks hold one for {limit}: enough {enough}"
    return Check("credits", "ok", found)


def check_gpus_wanted(config: Config, num_gpus: int) -> Check:
    """Whether the GPUs that the configuration names are there. With Ray they may be on other nodes."""
    if config.ray.address:
        return Check("gpus wanted", "ok", "placed by Ray, which says whether they fit")
    trainer, sglang, wanted = config.trainer, config.engine.sglang, 0
    if not trainer.tabular and (trainer.device == "cuda" or (trainer.device == "auto" and num_gpus)):
        wanted = trainer.gpu + trainer.ranks
    if config.engine.traits.gpus == "own" and sglang.flags.get("device") != "cpu":
        wanted = max(wanted, 1 + max(sglang.gpus, default=sglang.tensor_parallel - 1))
    found = f"{wanted or 'none'}, of {num_gpus} that torch sees"
    if wanted > num_gpus:
        found += f" (trainer.gpu = {trainer.gpu}, trainer.ranks = {trainer.ranks})"
        hint = "choose others with trainer.gpu and engine.sglang.gpus, lower trainer.ranks, or run on a machine that has them"
        return Check("gpus wanted", "fail", found, hint)
    return Check("gpus wanted", "ok", found)


def check_ports_wanted(config: Config) -> Check:
    """Whether the ports that the configuration names are free; most runs name none."""
    wanted = [(config.bus.host, config.bus.port)] if config.bus.port and not config.bus.url else []
    if config.engine.port and not config.ray.address:
        wanted += [(config.engine.host, config.engine.port + index) for index in range(config.engine.workers + config.evaluation.engines)]
    taken = [str(port) for host, port in wanted if not _free(host, port)]
    if taken:
        hint = "set bus.port and engine.port to 0 for any free ones, or end what listens there (ss -ltnp shows it)"
        return Check("ports wanted", "fail", f"cannot listen on port {', '.join(taken)}", hint)
    return Check("ports wanted", "ok", ", ".join(str(port) for _, port in wanted) or "any free ones")


def check_sglang(python: str) -> Check:
    """Whether SGLang is in the environment whose interpreter starts the servers."""
    interpreter = python or sys.executable
    try:
        done = subprocess.run([interpreter, "-c", _SAY_VERSION], capture_output=True, text=True, timeout=_START_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        hint = "name the interpreter of SGLang's environment in engine.sglang.python"
        return Check("sglang", "fail", f"{interpreter} does not run: {error}", hint)
    if done.returncode:
        hint = "install sglang there, name another environment in engine.sglang.python, or make one for this CPU with make sglang-cpu"
        return Check("sglang", "fail", f"not installed in the environment of {interpreter}", hint)
    version, (oldest, newest) = done.stdout.strip(), SGLANG_TRIED
    found = f"{version} ({interpreter})"
    if not _numbers(oldest) <= _numbers(version) <= _numbers(newest):
        hint = f'tried with {oldest} to {newest}: see whether weights change without a pause, or set engine.sglang.swap = "pause"'
        return Check("sglang", "warn", found, hint)
    return Check("sglang", "ok", found)


def check_ray() -> Check:
    """Whether Ray can place the workers."""
    try:
        return Check("ray", "ok", metadata.version("ray"))
    except metadata.PackageNotFoundError:
        return Check("ray", "fail", "not installed", "pip install 'streamrl[ray]', or leave ray.address empty")


async def check_bus(run: RunDir) -> list[Check]:
    """Whether the bus of a run answers, and how far its clock is from this machine's.

    A run that is not up is no fault: its bus is started with it.
    """
    config = run.load_config()
    if not config.bus.url and holder(run) is None and not _elsewhere(config):
        return [Check("bus", "ok", f"run {run.name} is not up; its bus starts with it")]
    try:
        address = BusAddress.load(run.bus_path_of(READER))
        bus = await connect(address, run.name, config.bus, create=False, name="doctor", patience_s=_ANSWER_S)
    except (BusError, ConfigError) as error:
        return [Check("bus", "fail", error.message, error.hint or "is the run up? `streamrl status` lists all runs")]
    try:
        asked_s = time.time()
        theirs_s = await bus.clock_s()
        now_s = time.time()
    except BusError as error:
        return [Check("bus", "fail", error.message, error.hint or "see bus/nats-server.log in the run directory")]
    finally:
        await bus.close()
    answers = Check("bus", "ok", f"{address.url} answers in {(now_s - asked_s) * 1e3:.1f} ms")
    return [answers, *([] if theirs_s is None else [check_skew(theirs_s, asked_s, now_s)])]


def check_skew(theirs_s: float, asked_s: float, now_s: float) -> Check:
    """The server's clock against this machine's, which showed `asked_s` before the question and `now_s` after the answer.

    Nothing is decided by a clock of one machine against another's, but certificates are checked by it, and people read the times.
    """
    ahead_s = max(0.0, theirs_s - now_s) or min(0.0, theirs_s - asked_s)
    found = f"the bus's clock is within {max(abs(ahead_s), now_s - asked_s):.3f} s of this one"
    if abs(ahead_s) > _MAX_SKEW_S:
        found = f"the bus's clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this one"
        hint = "set both by NTP: certificates may be refused, and times in logs and plots do not fit together"
        return Check("clock skew", "warn", found, hint)
    return Check("clock skew", "ok", found)


def _bytes(directory: Path) -> int:
    """Of all files in it; a run that is up may be removing them."""
    total = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def _room(config: Config) -> tuple[Path, int]:
    """The part of the path to the runs that there is, and how many bytes are free there."""
    place = Path(config.run.dir).absolute()
    while not place.exists():
        place = place.parent
    return place, shutil.disk_usage(place).free


def _elsewhere(config: Config) -> bool:
    """Whether the embedded server of the run may be up on another host."""
    return bool(config.bus.advertise) or config.bus.host not in ("127.0.0.1", "localhost", "::1")


def _free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except OSError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing."""
    parts = version.replace("+", ".").split(".")
    return tuple(int(part) for part in parts[:3] if part.isdigit())
