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

__all__ = ["Busy", "NoModel", "add_error_handlers", "described", "error_body", "error_response"]

_NOT_JSON = "the body is not a JSON object: send one, with `content-type: application/json`"
_TYPES = {429: "rate_limit_error", 500: "server_error", 504: "server_error"}  # else invalid_request_error


class Busy(Exception):
    """Too many requests wait.

    Attributes:
        seconds: after which it is worth trying again.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"too many requests wait: try again in {seconds:.0f} seconds")
        self.seconds = seconds


class NoModel(Exception):
    """A model that the server does not have."""


def add_error_handlers(app: FastAPI) -> None:
    """Answer exceptions that requests cause with `ErrorBody`; `security.Guard` answers all others."""

    async def handle(http: HttpRequest, error: Exception) -> Response:
        headers = {"retry-after": str(round(error.seconds))} if isinstance(error, Busy) else None
        if isinstance(error, HTTPException):
            headers = error.headers
        return error_response(*described(error), headers)

    for kind in (RequestValidationError, ValidationError, UserError, Busy, NoModel, TimeoutError, HTTPException):
        app.add_exception_handler(kind, handle)


def described(error: Exception) -> tuple[int, str, str | None, str | None]:
    """Return status, message, parameter and code of an exception."""
    match error:
        case RequestValidationError() | ValidationError():
            first = error.errors()[0]
            param = ".".join(part for part in first["loc"] if isinstance(part, str) and part != "body")
            message = str(first["msg"]).removeprefix("Value error, ")
            return 400, f"{param}: {message}" if param else _NOT_JSON, param or None, "invalid_value"
        case Busy():
            return 429, str(error), None, "queue_full"
        case NoModel():
            return 404, str(error), "model", "model_not_found"
        case UserError():
            return 400, str(error), None, "invalid_value"
        case TimeoutError():
            return 504, "drawing took too long: ask for fewer candidates", None, "timeout"
        case HTTPException(status_code=400):  # from FastAPI, which could not decode the body
            return 400, _NOT_JSON, None, "invalid_value"
        case HTTPException():
            return error.status_code, f"{error.detail}: see the addresses and methods in /openapi.json", None, None
        case _:
            return 500, f"the server failed ({type(error).__name__}): try again", None, "server_error"


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    """Return the body of an error."""
    kind = _TYPES.get(status, "invalid_request_error")
    return ErrorBody(error=ApiError(message=message, type=kind, param=param, code=code))


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:  # fmt: skip
    """Return the answer to a request that failed."""
    return JSONResponse(error_body(status, message, param, code).model_dump(), status, headers)
