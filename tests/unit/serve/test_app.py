"""Answers of the application in this process: errors, limits of the guard, warnings, counters."""

import asyncio
import base64
import io
import logging

import pytest
from fastapi.testclient import TestClient
from PIL import Image
from starlette.requests import ClientDisconnect

from limner.serve import app as app_module, security
from limner.serve.app import create_app
from limner.serve.security import Guard
from limner.serve.service import Service
from tiny import tiny_pipe

GENERATIONS, JSON = "/v1/images/generations", {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client():
    with TestClient(create_app({"tiny": tiny_pipe()}), base_url="http://localhost") as client:
        yield client


def chunks(count: int):
    for _ in range(count):
        yield b"x" * (1 << 20)


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "sentence"),
    [
        ("POST", GENERATIONS, "{", JSON, 400, "not a JSON object: send one"),
        ("POST", GENERATIONS, "[]", JSON, 400, "not a JSON object: send one"),
        ("POST", GENERATIONS, b"\xff{", JSON, 400, "not a JSON object: send one"),
        ("POST", GENERATIONS, '{"prompt": "a"}', {"content-type": "text/plain"}, 400, "content-type: application/json"),
        ("POST", GENERATIONS, '{"prompt": "a", "n": "x"}', JSON, 400, "n: Input should be a valid integer"),
        ("POST", "/v1/images/edits", "image=1", JSON, 400, "send multipart/form-data"),
        ("GET", "/nothing", None, {}, 404, "Not Found: see the addresses"),
        ("GET", GENERATIONS, None, {}, 405, "Method Not Allowed: see the addresses"),
    ],
)
def test_an_error_says_what_is_wrong_and_what_to_do(client, method, path, content, headers, status, sentence):
    answer = client.request(method, path, content=content, headers=headers)
    assert answer.status_code == status and sentence in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("names", [("image", "image"), ("image[]", "image[]"), ("image", "image[]"), ()])
def test_an_edit_has_one_picture(client, names):
    files = [(name, ("a.png", b"", "image/png")) for name in names] or [("mask", ("a.png", b"", "image/png"))]
    answer = client.post("/v1/images/edits", data={"prompt": "a"}, files=files)
    assert answer.status_code == 400 and "with one `image`" in answer.json()["error"]["message"]


def test_an_edit_without_a_mask_follows_the_picture_if_the_model_can():
    pipe, picture = tiny_pipe(condition_blocks=1), Image.effect_noise((24, 24), 99).convert("RGB")
    file = io.BytesIO()
    picture.save(file, "PNG")
    with TestClient(create_app({"tiny": pipe}), base_url="http://localhost") as client:
        fields = {"prompt": "a red circle", "seed": "5", "candidates": "4"}
        answer = client.post("/v1/images/edits", data=fields, files={"image": ("a.png", file.getvalue(), "image/png")})
        assert client.get("/v1/models/tiny").json()["follows"]
    sent = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
    expected = pipe("a red circle", seed=5, candidates=4, prompt_tokens=pipe.like(picture))[0]
    assert sent.tobytes() == Image.open(io.BytesIO(expected.png())).tobytes()


@pytest.mark.parametrize("path", [GENERATIONS, "/v1/images/edits"])
def test_a_body_without_a_length_is_bounded(client, path):
    answer = client.post(path, content=chunks(25), headers=JSON)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "too_large"


def test_a_failure_has_the_headers_of_other_answers_and_its_id_is_in_the_log(client, monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("broken")

    monkeypatch.setattr(Service, "_images", fail)
    with caplog.at_level(logging.INFO, "limner.serve"):
        answer = client.post(GENERATIONS, json={"prompt": "a", "candidates": 1})
        stream = client.post(GENERATIONS, json={"prompt": "a", "candidates": 1, "stream": True})
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["type"] == "server_error" and "RuntimeError" in error["message"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert f"{answer.headers['x-request-id']} failed" in caplog.messages
    assert '"type":"server_error"' in stream.text.split("event: error")[1]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["broken"] * 2


def test_requests_are_counted_by_their_end(client, monkeypatch):
    def count(status: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        values = [line.split()[1] for line in lines if line.startswith("limner_requests_total") and status in line]
        return float(values[0]) if values else 0.0

    for streams in (True, False):
        before = count("ok"), count("error")
        assert client.post(GENERATIONS, json={"prompt": "a", "candidates": 1, "stream": streams}).status_code == 200
        with monkeypatch.context() as patched:
            patched.setattr(Service, "_images", lambda *arguments: 1 / 0)
            client.post(GENERATIONS, json={"prompt": "a", "candidates": 1, "stream": streams})
        assert (count("ok"), count("error")) == (before[0] + 1, before[1] + 1)


def test_a_prompt_that_fills_the_model_has_a_warning(client):
    for prompt, warned in (("a red circle", False), ("circle " * 40, True)):
        answer = client.post(GENERATIONS, json={"prompt": prompt, "candidates": 1})
        assert any("as many as the model reads" in warning for warning in answer.json()["warnings"]) == warned


def test_the_description_lists_the_statuses_of_errors(client):
    for operations in client.get("/openapi.json").json()["paths"].values():
        for operation in operations.values():
            assert {"200", "400", "408", "413", "429", "500", "504"} <= set(operation["responses"])


def test_a_stream_ends_in_time_and_says_that_it_waits(monkeypatch):
    monkeypatch.setattr(app_module, "KEEPALIVE_SECONDS", 0.05)
    closed = []

    async def events():
        try:
            yield "first"
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def read() -> None:
        async for event in app_module._with_keepalives(events(), 0.3):
            received.append(event)

    received = []
    with pytest.raises(TimeoutError):
        asyncio.run(read())
    assert received[0] == "first" and set(received[1:]) == {None} and len(received) > 2 and closed


# ------------------------------------------------------------------------ the guard


SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")], "client": ("x", 1)}


async def echo(scope, receive, send) -> None:
    """An application that answers with the size of the body."""
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})


class Connection:
    """A client's side: what it sends, and the messages that it got."""

    def __init__(self, *sent: tuple[bytes, bool]) -> None:
        self.sent = [{"type": "http.request", "body": body, "more_body": more} for body, more in sent]
        self.answers: list = []
        self.continues = asyncio.Event()

    async def receive(self):
        if not self.sent:
            await self.continues.wait()
            return {"type": "http.disconnect"}
        return self.sent.pop(0)

    async def send(self, message) -> None:
        self.answers.append(message)


def test_a_body_that_does_not_arrive_ends_the_request(monkeypatch):
    monkeypatch.setattr(security, "BODY_SECONDS", 0.05)

    async def request() -> Connection:
        connection = Connection((b"x", True))
        await Guard(echo)(dict(SCOPE), connection.receive, connection.send)
        return connection

    start, body = asyncio.run(request()).answers
    assert start["status"] == 408 and b"took more than" in body["body"]


def test_a_client_that_leaves_before_its_body_has_arrived_gets_no_answer():
    async def request() -> tuple[Connection, Guard]:
        guard, connection = Guard(echo), Connection((b"x", True))
        connection.continues.set()
        await guard(dict(SCOPE), connection.receive, connection.send)
        return connection, guard

    connection, guard = asyncio.run(request())
    assert not connection.answers and not guard._bytes


def test_the_bodies_of_all_open_requests_are_bounded(monkeypatch):
    monkeypatch.setattr(security, "MAX_BODIES", 10)

    async def requests() -> list[int]:
        guard, slow, statuses = Guard(echo), Connection((b"x" * 6, True)), []
        waiting = asyncio.ensure_future(guard(dict(SCOPE), slow.receive, slow.send))
        await asyncio.sleep(0.01)
        for size in (6, 4):
            connection = Connection((b"x" * size, False))
            await guard(dict(SCOPE), connection.receive, connection.send)
            statuses.append(connection.answers[0]["status"])
        slow.continues.set()
        await waiting
        connection = Connection((b"x" * 6, False))
        await guard(dict(SCOPE), connection.receive, connection.send)
        return [*statuses, connection.answers[0]["status"]]

    assert asyncio.run(requests()) == [429, 200, 200]


def test_a_client_that_does_not_read_loses_its_answer(monkeypatch):
    monkeypatch.setattr(security, "SEND_SECONDS", 0.05)
    ended = []

    async def application(scope, receive, send) -> None:
        try:
            await echo(scope, receive, send)
        except ClientDisconnect:
            ended.append(True)
            raise

    async def send(message) -> None:
        await asyncio.sleep(60)

    asyncio.run(Guard(application)(dict(SCOPE), Connection((b"x", False)).receive, send))
    assert ended
