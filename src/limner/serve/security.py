"""Checks before a request is read: keys, host and origin, size of the body.

Without API keys a server is for this machine alone: the `Host` must be a loopback name, since otherwise a web page
could reach it under its own name (DNS rebinding), and a browser's `Origin` must be the server's own.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from limner.atomic_io import require_file
from limner.errors import UserError, escape_control
from limner.serve.protocol import ApiError, ErrorBody

__all__ = ["Guard", "hash_key", "new_key", "read_keys"]

MAX_BODY = 24 << 20  # bytes of a request
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?")
_LARGE = (413, f"the request is larger than {MAX_BODY >> 20} MiB", "too_large")
_OPEN_PATHS = ("/health", "/ready", "/", "/page.js", "/page.css")  # open without a key; the page asks for one
_log = logging.getLogger("limner.serve")


def new_key() -> str:
    """Return a random API key."""
    return "limner-" + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key, as a file of keys holds it. Random keys do not need a salt."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> dict[str, str]:
    """Read a file with a line `NAME SHA-256` for each key. Returns names by hash. Raises `UserError`."""
    require_file(path)
    names: dict[str, str] = {}
    for i, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            name, _, digest = line.strip().rpartition(" ")
            if not name or not re.fullmatch("[0-9a-f]{64}", digest):
                raise UserError(
                    f"{path}, line {i} is not `NAME SHA-256`: `limner serve --new-key NAME` prints such a line"
                )
            names[digest] = name.strip()
    if not names:
        raise UserError(f"{path} does not contain a key: `limner serve --new-key NAME` prints a line for it")
    return names


class Guard:
    """ASGI middleware: keys, host and origin, body size, headers of every answer, request ids and a line of log."""

    def __init__(self, app: ASGIApp, keys: dict[str, str] | None = None) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, begin, headers, received = secrets.token_hex(8), time.monotonic(), Headers(scope=scope), 0
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        started, status = False, 500

        async def guarded_send(message: Message) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                answer = MutableHeaders(scope=message)
                answer["x-request-id"] = request_id
                for name, value in HEADERS.items():
                    answer.setdefault(name, value)
            await send(message)

        async def guarded_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY:
                raise _TooLarge
            return message

        refusal = self._refusal(scope, headers)
        try:
            if refusal:
                await _response(*refusal)(scope, receive, guarded_send)
            else:
                await self.app(scope, guarded_receive, guarded_send)
        except _TooLarge:
            if not started:
                await _response(*_LARGE)(scope, receive, guarded_send)
        finally:
            client, seconds = scope["state"].get("client", "-"), time.monotonic() - begin
            line = f"{request_id} {client} {scope['method']} {escape_control(scope['path'])[:200]} {status}"
            _log.info("%s %.3f s", line, seconds)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str, str] | None:
        """Return status, message and code of a refusal, or None. Stores the client's name in the state."""
        length, host, origin = headers.get("content-length", "0"), headers.get("host", ""), headers.get("origin")
        if not length.isdecimal() or int(length) > MAX_BODY:
            return _LARGE
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "the server refuses requests of other sites", "forbidden_origin"
        if self.keys is None:
            scope["state"]["client"] = (scope.get("client") or ("-",))[0]
            if not _LOOPBACK.fullmatch(host):
                return (
                    403,
                    "this server answers under localhost only: start it with --keys for other names",
                    "forbidden_host",
                )
        elif scope["path"] not in _OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = hash_key(key.strip()) if scheme.lower() == "bearer" else ""
            matches = [name for digest, name in self.keys.items() if hmac.compare_digest(digest, given)]
            if not matches:
                return 401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`", "invalid_api_key"
            scope["state"]["client"] = matches[0]
        return None


class _TooLarge(Exception):
    """The body is larger than `MAX_BODY`."""


def _response(status: int, message: str, code: str) -> JSONResponse:
    error = ApiError(message=message, type="invalid_request_error", code=code)
    return JSONResponse(ErrorBody(error=error).model_dump(), status)
