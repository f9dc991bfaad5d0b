"""Who may see the page: requests to loopback by name that bring the token, by GET. Everybody else gets 403 and a sentence."""

from __future__ import annotations

import hashlib
import secrets
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from streamrl.errors import LaunchError
from streamrl.runtime.rundir import RunDir
from streamrl.system import write_private

_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def page_token(run: RunDir) -> str:
    """The token of a run's page, made at first and the same for ever; delete the file to have a new one. Raises LaunchError."""
    path = run.credentials / "page-token"
    try:
        run.credentials.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            write_private(path, secrets.token_urlsafe(32).encode() + b"\n")
        token = path.read_text().strip()
    except OSError as error:
        raise LaunchError(f"the page's token cannot be kept in {path}: {error.strerror}", hint="is the disk full?") from error
    if not token:
        raise LaunchError(f"expected the page's token in {path}, got an empty file", hint="delete it: a new one is made")
    return token


def place_of(token: str) -> str:
    """The folder that a page has its addresses in, and the name of its cookie.

    Cookies know no ports: a browser would bring one for all paths to whatever else listens on this machine, which could then look at the
    page itself. It brings this one to addresses within the folder only.
    """
    return f"streamrl-{hashlib.sha256(token.encode()).hexdigest()[:24]}"


def guard(token: str) -> Middleware:
    """The middleware that lets requests through to their handlers."""
    place = place_of(token)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _name(request.headers.get("Host", "")) not in _NAMES:  # another name for this machine is how a foreign site would get in
            return web.Response(status=403, text="this page is asked for as 127.0.0.1 or localhost only\n")
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="the page only reads\n", headers={"Allow": "GET, HEAD"})
        given = request.query.get("token")
        if given is not None and _same(given, token):
            # The token leaves the address, so that it is in no history and no picture of the screen.
            answer = web.Response(status=303, headers={"Location": f"/{place}/"})
            answer.set_cookie(place, token, httponly=True, samesite="Lax", path=f"/{place}/")
            return answer
        if given is not None or not _same(request.cookies.get(place, ""), token):
            return web.Response(status=403, text="expected the token of this run's page: open the address that `streamrl` has printed\n")
        return await handler(request)

    return check


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """What every answer tells the browser, before it is sent."""
    response.headers.update(_HEADERS)


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(errors="replace"), token.encode())
