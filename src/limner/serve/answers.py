"""Errors as OpenAI's API answers them: a status, and one sentence with the parameter and a code."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from limner.errors import UserError
from limner.serve.protocol import ApiError, ErrorBody
from limner.serve.worker import Busy

__all__ = ["NoModel", "add_error_handlers", "described", "error_body", "error_response"]


class NoModel(Exception):
    """A model that the server does not have."""


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception with `ErrorBody`."""

    async def handle(http: HttpRequest, error: Exception) -> Response:
        status, message, param, code = described(error)
        headers = {"retry-after": str(round(error.seconds))} if isinstance(error, Busy) else None
        if isinstance(error, HTTPException):
            headers = error.headers
        return error_response(status, message, param, code, headers)

    for kind in (
        RequestValidationError, ValidationError, UserError, Busy, NoModel, TimeoutError, HTTPException, Exception,
    ):  # fmt: skip
        app.add_exception_handler(kind, handle)


def described(error: Exception) -> tuple[int, str, str | None, str | None]:
    """Return status, message, parameter and code of an exception."""
    match error:
        case RequestValidationError() | ValidationError():
            first = error.errors()[0]
            where = [str(part) for part in first["loc"] if part != "body"]
            message = str(first["msg"]).removeprefix("Value error, ")
            return 400, f"{'.'.join(where)}: {message}" if where else message, ".".join(where) or None, "invalid_value"
        case Busy():
            return 429, str(error), None, "queue_full"
        case NoModel():
            return 404, str(error), "model", "model_not_found"
        case UserError():
            return 400, str(error), None, "invalid_value"
        case TimeoutError():
            return 504, "drawing took too long: ask for fewer candidates", None, "timeout"
        case HTTPException():
            return error.status_code, str(error.detail), None, None
        case _:
            return 500, f"the server failed ({type(error).__name__}): try again", None, "server_error"


def error_body(message: str, param: str | None, code: str | None, kind: str = "invalid_request_error") -> ErrorBody:
    """Return the body of an error."""
    return ErrorBody(error=ApiError(message=message, type=kind, param=param, code=code))


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:  # fmt: skip
    """Return the answer to a request that failed."""
    kind = {429: "rate_limit_error", 500: "server_error", 504: "server_error"}.get(status, "invalid_request_error")
    return JSONResponse(error_body(message, param, code, kind).model_dump(), status, headers)
