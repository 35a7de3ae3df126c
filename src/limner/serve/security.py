"""Checks before a request is answered: keys, host and origin, then size and time of the body.

Without API keys a server is for this machine alone: the `Host` must be a loopback name, since otherwise a web page
could reach it under its own name (DNS rebinding), and a browser's `Origin` must be the server's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections import deque
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from limner.atomic_io import require_file
from limner.errors import UserError, escape_control
from limner.serve.answers import described, error_response

__all__ = ["Guard", "hash_key", "new_key", "read_keys"]

MAX_BODY, MAX_BODIES = 24 << 20, 256 << 20  # bytes of a request, and of all requests that are open
BODY_SECONDS = 60  # for a request to arrive
SEND_SECONDS = 60  # for a client to read what was sent before
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
    """ASGI middleware: keys, host and origin, body, headers of every answer, request ids, errors and a line of log."""

    def __init__(self, app: ASGIApp, keys: dict[str, str] | None = None) -> None:
        self.app, self.keys = app, keys
        self._bytes: dict[str, int] = {}  # of the bodies of open requests, by request id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, begin, status, body = secrets.token_hex(8), time.monotonic(), 0, deque[Message]()
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}

        async def guarded_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answer = MutableHeaders(scope=message)
                answer["x-request-id"] = request_id
                for name, value in HEADERS.items():
                    answer.setdefault(name, value)
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(message)
            except TimeoutError:
                raise ClientDisconnect from None

        async def guarded_receive() -> Message:
            return body.popleft() if body else await receive()

        try:
            refusal = self._refusal(scope, Headers(scope=scope)) or await self._read(request_id, receive, body)
            answer = refusal or self.app
            await answer(scope, guarded_receive, guarded_send)
        except ClientDisconnect:
            status = status or 499
        except Exception as error:
            _log.exception("%s failed", request_id)
            if not status:
                await error_response(*described(error))(scope, receive, guarded_send)
        finally:
            self._bytes.pop(request_id, None)
            client, seconds = scope["state"].get("client", "-"), time.monotonic() - begin
            line = f"{request_id} {client} {scope['method']} {escape_control(scope['path'])[:200]} {status}"
            _log.info("%s %.3f s", line, seconds)

    async def _read(self, request_id: str, receive: Receive, body: deque[Message]) -> Response | None:
        """Append the messages of the body to `body`. Return a refusal, or None."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while (message := await receive())["type"] == "http.request":
                    body.append(message)
                    self._bytes[request_id] = self._bytes.get(request_id, 0) + len(message.get("body", b""))
                    if self._bytes[request_id] > MAX_BODY:
                        return _too_large()
                    if sum(self._bytes.values()) > MAX_BODIES:
                        sentence = "the open requests are too large together: try again in a few seconds"
                        return error_response(429, sentence, code="queue_full", headers={"retry-after": "5"})
                    if not message.get("more_body"):
                        return None
        except TimeoutError:
            sentence = f"the request took more than {BODY_SECONDS} seconds to arrive: send it again"
            return error_response(408, sentence, code="timeout")
        raise ClientDisconnect

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return a refusal, or None. Stores the client's name in the state."""
        length, host, origin = headers.get("content-length", "0"), headers.get("host", ""), headers.get("origin")
        if not length.isdecimal() or len(length) > 9 or int(length) > MAX_BODY:
            return _too_large()
        if origin is not None and origin.partition("://")[2] != host:
            sentence = "the server refuses requests of other sites: open its own page"
            return error_response(403, sentence, code="forbidden_origin")
        if self.keys is None:
            scope["state"]["client"] = (scope.get("client") or ("-",))[0]
            if not _LOOPBACK.fullmatch(host):
                sentence = "this server answers under localhost only: start it with --keys for other names"
                return error_response(403, sentence, code="forbidden_host")
        elif scope["path"] not in _OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = hash_key(key.strip()) if scheme.lower() == "bearer" else ""
            matches = [name for digest, name in self.keys.items() if hmac.compare_digest(digest, given)]
            if not matches:
                sentence = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
                return error_response(401, sentence, code="invalid_api_key")
            scope["state"]["client"] = matches[0]
        return None


def _too_large() -> Response:
    return error_response(413, f"the request is larger than {MAX_BODY >> 20} MiB: send less", code="too_large")
