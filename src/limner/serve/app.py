"""The HTTP application: OpenAI's Images API, models, health, metrics, and the page.

app = create_app({"scenes": limner.load("scenes")})
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from limner import export
from limner.data.image_decode import decode_image
from limner.data.sample import Rejected
from limner.errors import UserError, did_you_mean
from limner.pipeline import TextToImage
from limner.serve.answers import NoModel, add_error_handlers, described, error_body, error_response
from limner.serve.protocol import ErrorBody, Generate, Images, Model, Models
from limner.serve.security import Guard
from limner.serve.service import Service, Sign
from limner.version import __version__

__all__ = ["SHARED", "Routes", "create_app", "static"]

_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody} for code in (400, 401, 403, 404, 405, 408, 413, 429, 500, 504)
}
KEEPALIVE_SECONDS = 15
_FOLDER, SHARED = Path(__file__).parent / "page", Path(export.__file__).parent  # files of pages
_PAGE = {
    "/": ([SHARED / "head.html", _FOLDER / "page.html"], "text/html"),
    "/page.js": ([_FOLDER / "page.js"], "text/javascript"),
    "/page.css": ([SHARED / "page.css", _FOLDER / "page.css"], "text/css"),
}
_NOT_MULTIPART = "send multipart/form-data with one `image` and `prompt`"
Policy = Callable[[str], str | None]
Edit = tuple[bytes, bytes | None, int | None]  # picture, mask and rows of tokens to keep


def create_app(
    pipes: Mapping[str, TextToImage],
    *,
    keys: dict[str, str] | None = None,
    policy: Policy = lambda prompt: None,
    max_requests: int = 64,
    timeout: float = 600,
    sign: Sign | None = None,
) -> FastAPI:
    """Return the application.

    Args:
        pipes: models by the name that requests give; the first one is the default.
        keys: names of clients by the SHA-256 of their keys; None serves this machine without keys.
        policy: returns a reason to refuse a prompt, or None.
        max_requests: of a model, waiting and running; more get an answer with status 429.
        timeout: seconds after which a request ends with status 504.
        sign: signs the files of finished pictures.
    """
    services = {name: Service(name, pipe, max_requests, sign) for name, pipe in pipes.items()}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for service in services.values():
            service.worker.close()

    app = FastAPI(
        title="limner", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, responses=_ERRORS,
        description="OpenAI's Images API for models of limner.",
    )  # fmt: skip
    app.add_middleware(Guard, keys=keys)
    add_error_handlers(app)
    Routes(app, services, policy, timeout)
    return app


class Routes:
    """The endpoints."""

    def __init__(self, app: FastAPI, services: Mapping[str, Service], policy: Policy, timeout: float) -> None:
        self.services, self.policy, self.timeout = services, policy, timeout
        self.metrics = CollectorRegistry()
        self._requests = Counter("limner_requests", "Drawing requests", ["model", "status"], registry=self.metrics)
        self._pictures = Counter("limner_pictures", "Pictures sent", ["model"], registry=self.metrics)
        self._seconds = Histogram("limner_request_seconds", "Time of a request", ["model"], registry=self.metrics)
        waiting = Gauge("limner_open_requests", "Requests that wait or run", ["model"], registry=self.metrics)
        for name, service in services.items():
            waiting.labels(name).set_function(lambda worker=service.worker: len(worker.open))
        event = {"type": "object", "properties": {name: {"type": "string"} for name in ("event", "data")}}
        stream = {"content": {"text/event-stream": {"schema": event}}}  # of each event
        ok: dict[int | str, dict[str, Any]] = {200: {"model": Images, **stream}}
        edit_body = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _edit_schema()}}}}
        app.post("/v1/images/generations", responses=ok)(self.generations)
        app.post("/v1/images/edits", responses=ok, openapi_extra=edit_body)(self.edits)
        app.get("/v1/models", response_model=Models)(self.models)
        app.get("/v1/models/{model}", response_model=Model)(self.model)
        app.get("/health")(self.health)
        app.get("/ready")(self.health)
        app.get("/metrics", response_class=Response)(self.prometheus)
        for path, (files, kind) in _PAGE.items():
            app.get(path, include_in_schema=False)(static(b"".join(file.read_bytes() for file in files), kind))

    async def generations(self, body: Generate, http: HttpRequest) -> Response:
        """Draw a caption."""
        return await self._draw(body, http, "image_generation", None)

    async def edits(self, http: HttpRequest) -> Response:
        """Redraw a part of a picture: the transparent or light part of `mask`, or all below `keep_rows`. Without both,
        draw another picture like it if the model can, otherwise the lower half."""
        try:
            async with http.form(max_files=3, max_fields=50) as form:
                values = {key: value for key, value in form.multi_items() if isinstance(value, str)}
                images, mask = [*form.getlist("image"), *form.getlist("image[]")], form.get("mask")
                if len(images) != 1 or not isinstance(images[0], UploadFile):
                    raise UserError(_NOT_MULTIPART)
                picture, mask = await images[0].read(), await mask.read() if isinstance(mask, UploadFile) else None
        except (HTTPException, AssertionError):
            raise UserError(_NOT_MULTIPART) from None
        keep_rows = values.pop("keep_rows", None)
        body = Generate.model_validate_strings(values, strict=False)
        if keep_rows is not None and not keep_rows.isdecimal():
            raise UserError(f"keep_rows is a number of rows of tokens, not {keep_rows[:40]!r}")
        return await self._draw(body, http, "image_edit", (picture, mask, int(keep_rows[:9]) if keep_rows else None))

    async def _draw(self, body: Generate, http: HttpRequest, prefix: str, edit: Edit | None) -> Response:
        service = self._service(body.model)
        if reason := self.policy(body.prompt):
            return error_response(400, reason, param="prompt", code="content_policy_violation")
        service.worker.require_room()  # before the work of an edit, and before a stream's status is sent
        tokens = await asyncio.to_thread(_prime, service.pipe, *edit) if edit else None
        request = await asyncio.to_thread(service.request, body, http.state.client, tokens)  # a long prompt takes 50 ms
        if body.stream:
            events = self._stream(service, service.events(body, request, prefix))
            return StreamingResponse(events, media_type="text/event-stream")
        with self._measured(service):
            images = await _until_disconnect(http, service.images(body, request), self.timeout)
        self._pictures.labels(service.name).inc(len(images.data))
        return JSONResponse(images.model_dump())

    async def _stream(self, service: Service, events: AsyncGenerator[Any]) -> AsyncIterator[str]:
        """Yield server-sent events. An error in the middle is an event, since the status is sent already."""
        try:
            with self._measured(service):
                before, seconds = len(service.worker.open), service.worker.expected_seconds()
                yield f": {before} before this one, about {seconds:.0f} s\n\n"
                async with aclosing(_with_keepalives(events, self.timeout)) as timed:
                    async for event in timed:
                        yield self._event(service, event)
            yield "data: [DONE]\n\n"
        except Exception as error:
            answer = described(error)
            if answer[0] == 500:
                logging.getLogger("limner.serve").exception("a stream failed")
            yield f"event: error\ndata: {error_body(*answer).model_dump_json()}\n\n"

    def _event(self, service: Service, event: Any) -> str:
        """Return a server-sent event, or a comment for None. Counts finished pictures."""
        if event is None:
            return ": waiting\n\n"
        self._pictures.labels(service.name).inc(event.type.endswith(".completed"))
        return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"

    @contextmanager
    def _measured(self, service: Service) -> Iterator[None]:
        """Count a request by its end, and its seconds."""
        begin, status = time.monotonic(), "error"
        try:
            yield
            status = "ok"
        except (ClientDisconnect, asyncio.CancelledError, GeneratorExit):
            status = "cancelled"
            raise
        finally:
            self._requests.labels(service.name, status).inc()
            self._seconds.labels(service.name).observe(time.monotonic() - begin)

    def _service(self, name: str | None) -> Service:
        if name is None:
            return next(iter(self.services.values()))
        if name not in self.services:
            raise NoModel(f"the model {name[:80]!r} does not exist: {did_you_mean(name[:80], list(self.services))}")
        return self.services[name]

    async def models(self) -> Models:
        """List the models."""
        return Models(data=[_model(service) for service in self.services.values()])

    async def model(self, model: str) -> Model:
        """Describe a model."""
        return _model(self._service(model))

    async def health(self) -> dict[str, str]:
        """Answer while the server runs."""
        return {"status": "ok"}

    async def prometheus(self) -> Response:
        """Counters for Prometheus."""
        return Response(generate_latest(self.metrics), media_type=CONTENT_TYPE_LATEST)


def static(content: bytes, kind: str) -> Callable[[], Response]:
    """Return an endpoint that answers with a file of the package."""
    return lambda: Response(content, media_type=kind)


def _model(service: Service) -> Model:
    pipe, follows = service.pipe, service.pipe.prior.config.condition_blocks > 0
    about = str(pipe.info.get("about") or "")
    return Model(id=service.name, created=service.created, about=about, size=pipe.size, follows=follows)


def _prime(pipe: TextToImage, picture: bytes, mask: bytes | None, keep_rows: int | None) -> Any:
    """Return the prompt tokens of an edit, [S], or [2 S] to follow the picture."""
    images = []
    for name, data in (("image", picture), ("mask", mask)):
        try:
            images.append(None if data is None else Image.fromarray(decode_image(data)))
        except Rejected as rejected:
            raise UserError(f"{name} is not a usable picture: {rejected.reason}") from None
    if mask is not None and (alpha := _alpha(mask)):
        images[1] = alpha.point(lambda value: 255 if value == 0 else 0)
    if mask is None and keep_rows is None:
        if pipe.prior.config.condition_blocks:
            return pipe.like(images[0])[0].cpu()
        keep_rows = pipe.prior.config.grid[0] // 2
    return pipe.prime(images[0], keep_rows, images[1])[0].cpu()


def _alpha(data: bytes) -> Image.Image | None:
    """Return the transparency of a picture that `decode_image` accepted; None if all of it is opaque."""
    image = Image.open(io.BytesIO(data))
    alpha = image.convert("RGBA").getchannel("A") if image.mode in ("RGBA", "LA", "PA", "P") else None
    return alpha if alpha and alpha.getextrema()[0] == 0 else None


async def _until_disconnect(http: HttpRequest, drawing: Coroutine[Any, Any, Images], timeout: float) -> Images:
    """Return what a coroutine returns. Cancels it and raises `ClientDisconnect` if the client leaves before."""

    async def disconnected() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(drawing), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait([task, watcher], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect if watcher.done() else TimeoutError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _with_keepalives(events: AsyncGenerator[Any], timeout: float) -> AsyncGenerator[Any]:
    """Yield the events, and None after seconds without one. Raises `TimeoutError` after `timeout` seconds."""
    end, pending = time.monotonic() + timeout, None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(events))
            seconds = min(KEEPALIVE_SECONDS, end - time.monotonic())
            if (await asyncio.wait([pending], timeout=max(0, seconds)))[0]:
                done, pending = pending, None
                yield done.result()
            elif time.monotonic() >= end:
                raise TimeoutError
            else:
                yield None
    except StopAsyncIteration:
        pass
    finally:
        if pending:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await events.aclose()


def _edit_schema() -> dict[str, Any]:
    """Return the schema of a form: the fields of `Generate` without null, which a form cannot express, and files."""
    properties = Generate.model_json_schema()["properties"]
    for field in properties.values():
        if "anyOf" in field:
            field["anyOf"] = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
            field.pop("default", None)
    binary = {"type": "string", "format": "binary"}
    properties |= {"image": binary, "mask": binary, "keep_rows": {"type": "integer", "minimum": 1}}
    return {"type": "object", "required": ["image", "prompt"], "properties": properties}
