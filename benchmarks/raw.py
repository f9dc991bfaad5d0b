"""The raw file of a benchmark, `raw.jsonl`: a header, and one record a line of what was seen, before anything is computed from it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from benchmarks.machine import Machine, machine
from streamrl.errors import ConfigError, DataError

FILE = "raw.jsonl"
T = TypeVar("T")


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """What was asked for, and where."""

    benchmark: str
    """`bus`, `engine`, `eval`, `gateway`, `hung`, `loop`, `loop --screens`, `rollouts`, `trainer` or `weights`."""
    command: str
    machine: Machine
    spec: dict[str, Any]
    """What the benchmark was told, defaults put in."""


class Round(msgspec.Struct, frozen=True, kw_only=True, tag="round"):
    """One contender in one round."""

    cell: str
    """What all of its contenders did, such as a shape of message or a batch size."""
    contender: str
    round: int
    values: dict[str, float]
    """By name: seconds, counts."""


class Fact(msgspec.Struct, frozen=True, tag="fact"):
    """Something that does not change from round to round."""

    name: str
    about: str
    value: Any


Record = Round | Fact


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a benchmark in rounds."""

    header: Header
    rounds: list[Round]
    facts: list[Fact] = []

    def named(self, name: str) -> dict[str, Any]:
        """Values of the facts of a name, by what they are about."""
        return {fact.about: fact.value for fact in self.facts if fact.name == name}


def header(benchmark: str, command: str, spec: msgspec.Struct, packages: tuple[str, ...]) -> Header:
    """The header of a run that begins now; `packages` are those whose versions matter."""
    return Header(benchmark=benchmark, command=command, machine=machine(packages), spec=msgspec.to_builtins(spec))


def new_directory(out: Path) -> Path:
    """Make the directory; raises ConfigError when the files of another run are in it, or nothing can be."""
    if (out / FILE).exists():
        raise ConfigError(f"--out: expected a new directory, got {out} with the files of another run", hint="choose another one")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out: expected a directory that can be written, got {out}: {error.strerror}", hint="choose another one"
        ) from error
    return out


def write(out: Path, header: Header, records: Iterable[msgspec.Struct]) -> None:
    """Write records as they come, the header before the first: what was measured until an error is there."""
    before: list[msgspec.Struct] = [header]
    for record in records:
        append(out, [*before, record])
        before = []


def write_measured(out: Path, header: Header, measured: Callable[[Path], Iterable[msgspec.Struct]]) -> None:
    """Write what `measured` gives, in a directory that is removed afterwards, into the new directory `out`; see `new_directory`."""
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as scratch:
        write(new_directory(out), header, measured(Path(scratch)))


def append(out: Path, records: Iterable[msgspec.Struct]) -> None:
    """Write records at the end of the file; arrays are written as lists."""
    encoder = msgspec.json.Encoder(enc_hook=np.ndarray.tolist)
    with (out / FILE).open("ab") as file:
        file.writelines(encoder.encode(record) + b"\n" for record in records)


def read(out: Path, benchmark: str) -> Raw:
    """The file of a benchmark in rounds; see `read_records`."""
    header, records = read_records(out, benchmark, Record)
    return Raw(
        header=header,
        rounds=[record for record in records if isinstance(record, Round)],
        facts=[record for record in records if isinstance(record, Fact)],
    )


def read_records(out: Path, benchmark: str, kinds: Any) -> tuple[Header, list[Any]]:
    """The header and the other records of a file, in the order in which they were written.

    Args:
        out: the benchmark's directory.
        benchmark: whose file it must be.
        kinds: union of the records' types.

    Raises:
        DataError: there is no such file, it is another benchmark's, or one of its lines is broken.
    """
    decoder = msgspec.json.Decoder(Header | kinds, dec_hook=_array)
    found: list[Any] = []
    try:
        with (out / FILE).open("rb") as file:
            for number, line in enumerate(file, 1):
                found.append(_decoded(decoder, line, number))
    except (OSError, ValueError) as error:
        raise _no_file(out, benchmark, str(error)) from error
    headers = [record for record in found if isinstance(record, Header)]
    if [header.benchmark for header in headers] != [benchmark]:
        raise _no_file(out, benchmark, f"headers of {[header.benchmark for header in headers]}")
    return headers[0], [record for record in found if not isinstance(record, Header)]


def _decoded(decoder: msgspec.json.Decoder[Any], line: bytes, number: int) -> Any:
    try:
        return decoder.decode(line)
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise ValueError(f"line {number}: {error}") from error


def _array(kind: Any, values: Any) -> Any:
    """A list as the array that an annotation such as `NDArray[np.float64]` asks for."""
    return np.asarray(values, get_args(get_args(kind)[1])[0])


def _no_file(out: Path, benchmark: str, got: str) -> DataError:
    return DataError(
        f"expected the {FILE} of bench {benchmark} in {out}, got {got}",
        hint=f"name a directory that bench {benchmark} --out wrote",
        directory=str(out),
        benchmark=benchmark,
    )
