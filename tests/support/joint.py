"""Two ranks that write one directory, one of them killed at a call: `python -m tests.support.joint FOLDER SCENARIO`, told as JSON."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from streamrl.errors import TrainingError
from streamrl.models import directories, writers
from streamrl.models.directories import check_files, recover, write_directory
from streamrl.models.writers import Writers

NAME = "main-v00000001-e0"
ENOUGH = 40
"""More calls than either makes."""


def fill(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "a").write_text(content)
        (folder / "b").write_text(content * 1000)

    return write


def save(group: Writers, path: Path, content: str) -> None:
    """A checkpoint, as `TorchTrainer.save` writes it."""
    begun, seen = group.meet(path)
    if group.rank:
        group.write(begun, "part-2-of-2", fill(content), seen=seen)
        return

    def own(directory: Path) -> None:
        (directory / "part-1-of-2").mkdir()
        fill(content)(directory / "part-1-of-2")
        fill(content)(directory)

    write_directory(path, own, seal=True, begun=begun, others=group.hear)


def found(path: Path) -> str | None:
    """Describe all files of a whole checkpoint."""
    if not path.exists():
        return None
    check_files(path)
    texts = {file.read_text()[:3] for file in path.rglob("[ab]")}
    assert len(texts) == 1 and len(list(path.rglob("[ab]"))) == 6, sorted(path.rglob("*"))
    return texts.pop()


def ranks(folder: Path, body: Callable[[Writers], None]) -> list[int]:
    """Exit codes of two processes that call `body`: 7 for a TrainingError, -9 for one that was killed."""
    store = folder / "store"
    pids: list[int] = []
    for rank in range(2):
        if not (pid := os.fork()):
            dist.init_process_group("gloo", store=FileStore(str(store), 2), rank=rank, world_size=2)
            try:
                body(Writers(2))
            except TrainingError as error:
                print(rank, error.message, file=sys.stderr, flush=True)
                os._exit(7)
            os._exit(0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    store.unlink(missing_ok=True)
    return codes


def killed(victim: int, calls: int) -> Callable[[Path], Callable[[Writers], None]]:
    """Writes "new", and rank `victim` is killed at that of its calls."""

    def scenario(path: Path) -> Callable[[Writers], None]:
        def body(group: Writers) -> None:
            left = calls if group.rank == victim else ENOUGH * 10

            def counted(function: Callable[..., Any]) -> Callable[..., Any]:
                def call(*args: Any, **options: Any) -> Any:
                    nonlocal left
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left -= 1
                    return function(*args, **options)

                return call

            os.fsync, os.rename, os.chmod, shutil.rmtree, os.mkdir = map(counted, (os.fsync, os.rename, os.chmod, shutil.rmtree, os.mkdir))
            writers.dist.send, directories.file_digest = counted(dist.send), counted(directories.file_digest)
            save(group, path, "new")

        return body

    return scenario


def sweep(folder: Path, former: str) -> list[dict[str, Any]]:
    """For each rank and each of its calls: what there is after the kill, before and after the next start's `recover`."""
    told: list[dict[str, Any]] = []
    for victim in range(2):
        for calls in range(ENOUGH):
            place = folder / f"{victim}-{calls}"
            place.mkdir(parents=True)
            path = place / NAME
            if former and any(ranks(place, lambda group, path=path: save(group, path, former))):
                raise AssertionError("the former one could not be written")
            codes = ranks(place, killed(victim, calls)(path))
            before = found(path)
            recover(path)
            left = sorted(file.name for file in place.iterdir())
            told.append({"victim": victim, "codes": codes, "before": before, "after": found(path), "left": left})
            if codes[victim] != -signal.SIGKILL:
                break
    return told


def unseen(folder: Path) -> dict[str, Any]:
    """Rank 1 does not see where rank 0 writes."""
    (folder / "here").mkdir()
    (folder / "there").mkdir()

    def body(group: Writers) -> None:
        os.chdir(folder / ("there" if group.rank else "here"))
        save(group, Path("deep") / NAME, "new")

    return {
        "codes": ranks(folder, body),
        "after": found(folder / "here" / "deep" / NAME),
        "left": [f.name for f in (folder / "there").iterdir()],
    }


def full(folder: Path, victim: int) -> dict[str, Any]:
    """The disk of one rank is full, and the same ranks save again when it is not."""
    path = folder / NAME

    def body(group: Writers) -> None:
        sync = os.fsync

        def fails(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        save(group, path, "old")
        if group.rank == victim:
            os.fsync = fails
        try:
            save(group, path, "new")
        except TrainingError as error:
            (folder / f"said-{group.rank}").write_text(error.message)
        os.fsync = sync
        if not group.rank:
            assert found(path) == "old"
        save(group, path, "two")

    codes = ranks(folder, body)
    said = {file.name: file.read_text() for file in folder.glob("said-*")}
    return {"codes": codes, "after": found(path), "said": said}


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder, scenario, *options = sys.argv[1:]
    place = Path(folder)
    match scenario:
        case "sweep":
            told: Any = sweep(place, options[0] if options else "")
        case "unseen":
            told = unseen(place)
        case _:
            told = full(place, int(options[0]))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
