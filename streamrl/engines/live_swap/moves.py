"""A window's pieces as few and large moves: of a mixture of experts there are tens of thousands of copies, and each call takes its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from streamrl.engines.live_swap.plan import Piece


class Recurrence(NamedTuple):
    """How often something recurs, and how many elements behind itself each time."""

    times: int
    step: int
    """In the source."""
    target_step: int


class Move(msgspec.Struct, frozen=True):
    """Pieces of a window that are copied at once: those that are like the first one, and where they recur."""

    first: Piece
    recurs: tuple[Recurrence, ...] = ()
    """Outermost first: experts, and gate and up of each, say."""


def moves(pieces: Sequence[Piece]) -> list[Move]:
    """The pieces of a window as few moves: what lies side by side in a source is one, and so is what recurs at a distance, as experts do.

    Example: three experts of two elements each, 4 apart in the source and 6 apart in the parameter.

        >>> from streamrl.engines.live_swap.plan import Copy
        >>> experts = [Piece(Copy(e, 0, 2, 1, 2, 0, 6 * e, 2), e, 0, 8 * e, 8 * e + 4, 2) for e in range(3)]
        >>> [(move.first.region, move.recurs) for move in moves(experts)]
        [(0, (Recurrence(times=3, step=4, target_step=6),))]
    """
    found = [Move(piece) for piece in _joined(pieces)]
    while len(fewer := _recurring(found)) < len(found):
        found = fewer
    return found


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces in order, neighbours that are neighbours in one parameter made one."""
    result: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.first_byte):
        last, copy = result[-1] if result else None, piece.copy
        if (
            last is not None
            and last.source == piece.source
            and last.end_byte == piece.first_byte
            and last.copy.rows == copy.rows == 1
            and last.copy.target_step == copy.target_step == 1
            and last.copy.parameter == copy.parameter
            and last.copy.target + last.copy.cols == copy.target
            and last.itemsize == piece.itemsize
        ):
            cols = last.copy.cols + copy.cols
            joined = msgspec.structs.replace(last.copy, cols=cols, stride=cols, target_stride=cols)
            result[-1] = msgspec.structs.replace(last, copy=joined, end_byte=piece.end_byte)
        else:
            result.append(piece)
    return result


def _recurring(found: Sequence[Move]) -> list[Move]:
    """The moves, those that are alike and follow each other at one distance made one."""
    runs: dict[tuple[object, ...], list[tuple[Move, Recurrence]]] = {}
    for move in found:
        copy = move.first.copy
        # Of what has one row the strides mean nothing.
        strides = (copy.stride, copy.target_stride) if copy.rows > 1 else ()
        key = (move.first.source, copy.parameter, copy.rows, copy.cols, copy.target_step, move.first.itemsize, strides, move.recurs)
        alike = runs.setdefault(key, [])
        longer = _longer(*alike[-1], move) if alike else None
        if longer is not None:
            alike[-1] = alike[-1][0], longer
        else:
            alike.append((move, Recurrence(1, 0, 0)))
    return [
        msgspec.structs.replace(move, recurs=(run, *move.recurs)) if run.times > 1 else move
        for alike in runs.values()
        for move, run in alike
    ]


def _longer(first: Move, run: Recurrence, move: Move) -> Recurrence | None:
    """How the first recurs, with one move more; None if that does not lie where the next one would."""
    nbytes, elements = move.first.first_byte - first.first.first_byte, move.first.copy.target - first.first.copy.target
    if nbytes % (run.times * first.first.itemsize) or elements % run.times:
        return None
    longer = Recurrence(run.times + 1, nbytes // (run.times * first.first.itemsize), elements // run.times)
    fits = run.times == 1 or longer[1:] == run[1:]
    return longer if fits and longer.target_step > 0 else None
