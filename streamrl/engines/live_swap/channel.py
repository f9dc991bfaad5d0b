"""The channel: a thread that answers our worker's requests on a unix socket of this rank. Every error is a reply."""

from __future__ import annotations

import logging
import os
import socket
import threading
import traceback
from collections.abc import Callable

from streamrl.engines.live_swap.messages import Failed, Reply, Request, decode_request, frame, frame_length, socket_path
from streamrl.errors import StreamRLError

logger = logging.getLogger(__name__)

_HEADER = 4


class Channel:
    """Listens for connections; each has a thread, and their requests are answered one at a time.

    Args:
        directory: of the sockets; only this user may enter it.
        rank: whose channel it is.
        answer: does what a request asks.
    """

    def __init__(self, directory: str, rank: int, answer: Callable[[Request], Reply]) -> None:
        self._answer = answer
        self._turn = threading.Lock()
        path = socket_path(directory, rank)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        if os.path.exists(path):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen()
        threading.Thread(target=self._accept, name=f"streamrl-channel-{rank}", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), name="streamrl-client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while (header := _read(connection, _HEADER)) is not None:
                    body = _read(connection, frame_length(header))
                    if body is None:
                        return
                    connection.sendall(frame(self._reply(body)))
            except OSError as error:
                logger.info("event=streamrl_client_gone reason=%s", error)
            except StreamRLError as error:
                # A frame that is none: what follows it cannot be read either.
                logger.warning("event=streamrl_client_refused reason=%s", error.message)

    def _reply(self, body: bytes) -> Reply:
        try:
            request = decode_request(body)
            with self._turn:
                return self._answer(request)
        except StreamRLError as error:
            return Failed(message=error.message, hint=error.hint)
        except Exception as error:
            # SGLang would log a thread's death and go on; the client must hear of it.
            logger.exception("event=streamrl_request_failed")
            return Failed(message=f"{type(error).__name__}: {error}", trace=traceback.format_exc())


def _read(connection: socket.socket, count: int) -> bytes | None:
    """Exactly `count` bytes; None when the other end has closed."""
    parts = bytearray()
    while len(parts) < count:
        piece = connection.recv(min(count - len(parts), 1 << 20))
        if not piece:
            return None
        parts += piece
    return bytes(parts)
