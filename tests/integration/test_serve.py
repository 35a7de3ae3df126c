"""The server as its clients see it: OpenAI's SDK, plain HTTP, signals, and hostile requests."""

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

openai = pytest.importorskip("openai")

import limner  # noqa: E402
from limner.serve.protocol import Generate  # noqa: E402
from limner.serve.security import MAX_BODY, hash_key  # noqa: E402
from servers import Server, serve  # noqa: E402
from tiny import tiny_pipe  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return tiny_pipe().save_pretrained(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(folder) as running:
        yield running


def pixels(data: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def drawn(folder: Path, caption: str, n: int, **settings) -> list[np.ndarray]:
    """Return what the library draws, at the size of the server's files."""
    drawings = limner.load(folder)(caption, n=n, **settings)
    return [pixels(base64.b64encode(drawing.png()).decode()) for drawing in drawings]


def test_the_sdk_gets_the_pictures_that_the_library_draws(server, folder):
    answer = server.client().images.generate(
        prompt="a red circle", n=2, quality="high", extra_body={"seed": 5, "candidates": 6}
    )
    expected = drawn(folder, "a red circle", 2, seed=5, candidates=6)
    assert len(answer.data) == 2
    for picture, own in zip(answer.data, expected, strict=True):
        assert np.array_equal(pixels(picture.b64_json), own)
        assert (picture.seed, picture.candidate in range(1, 7)) == (5, True)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens > 0
    assert answer.warnings == ["quality has no effect"]
    again = server.client().images.generate(prompt="a red circle", extra_body={"candidates": 2})
    assert again.data[0].seed != server.client().images.generate(prompt="a red circle").data[0].seed


def test_a_stream_has_partial_pictures_and_ends_with_the_complete_ones(server, folder):
    options = {"prompt": "a red circle", "n": 2, "stream": True, "partial_images": 2}
    events = list(server.client().images.generate(**options, extra_body={"seed": 5, "candidates": 6}))
    partial = [event for event in events if event.type == "image_generation.partial_image"]
    complete = [event for event in events if event.type == "image_generation.completed"]
    assert {event.image_index for event in partial} == {0, 1} and len(partial) <= 4
    assert [event.image_index for event in complete] == [0, 1] and events[-2:] == complete
    for event, own in zip(complete, drawn(folder, "a red circle", 2, seed=5, candidates=6), strict=True):
        assert np.array_equal(pixels(event.b64_json), own)
    assert all(pixels(event.b64_json).shape == pixels(complete[0].b64_json).shape for event in partial)


def test_an_edit_draws_where_the_mask_is_transparent(server, folder):
    pipe = limner.load(folder)
    side = pipe.size
    picture, mask = io.BytesIO(), io.BytesIO()
    original = np.asarray(pipe("a red circle", candidates=1).images[0])
    Image.fromarray(original).save(picture, "PNG")
    alpha = np.full((side, side), 255, np.uint8)
    alpha[side // 2 :] = 0
    Image.fromarray(np.dstack([original, alpha])).save(mask, "PNG")  # opaque where the picture may be light
    files = {"image": picture.getvalue(), "mask": mask.getvalue()}
    options = {"prompt": "a blue square", "extra_body": {"seed": 3, "candidates": 4}}
    answer = server.client().images.edit(**files, **options)
    light = Image.fromarray(np.where(alpha == 0, 255, 0).astype(np.uint8))
    prompt = pipe.prime(Image.fromarray(original), mask=light)
    own = pipe("a blue square", candidates=4, seed=3, prompt_tokens=prompt)[0]
    assert np.array_equal(pixels(answer.data[0].b64_json), pixels(base64.b64encode(own.png()).decode()))
    assert answer.usage.input_tokens_details.image_tokens == int((prompt >= 0).sum()) > 0
    stream = list(server.client().images.edit(**files, **options, stream=True))
    assert stream[-1].type == "image_edit.completed" and stream[-1].b64_json == answer.data[0].b64_json


@pytest.mark.parametrize(("kind", "magic"), [("jpeg", b"\xff\xd8"), ("webp", b"RIFF"), ("png", b"\x89PNG")])
def test_files_have_the_format_and_the_provenance(server, kind, magic):
    answer = server.client().images.generate(prompt="a red circle", output_format=kind, size="100x70")
    data = base64.b64decode(answer.data[0].b64_json)
    assert data.startswith(magic) and b"trainedAlgorithmicMedia" in data and b"a red circle" in data
    side = Image.open(io.BytesIO(data)).width
    assert answer.size == f"{side}x{side}" and side <= 70
    assert any("times a whole number" in warning for warning in answer.warnings)


def test_mistakes_are_errors_of_the_sdk_with_one_sentence(server):
    client = server.client()
    for options, param in (
        ({"prompt": "  "}, "prompt"),
        ({"prompt": "a", "n": 11}, "n"),
        ({"prompt": "a", "size": "big"}, "size"),
        ({"prompt": "a", "extra_body": {"seed": -1}}, "seed"),
        ({"prompt": "a", "extra_body": {"temperature": -1}}, None),
        ({"prompt": "a", "response_format": "url"}, "response_format"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.images.generate(**options)
        assert caught.value.body["param"] == param and caught.value.body["message"], options
    with pytest.raises(openai.NotFoundError, match="did you mean|choose") as missing:
        client.images.generate(prompt="a", model="other")
    assert missing.value.code == "model_not_found" and missing.value.request_id
    with pytest.raises(openai.BadRequestError, match="not a usable picture: broken image"):
        client.images.edit(image=b"\x89PNG broken", prompt="a")
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_sixteen_clients_at_once_get_what_each_gets_alone(server, folder):
    pipe = limner.load(folder)
    captions = [f"{color} circle {i}" for i in range(8) for color in ("red", "blue")]

    def ask(i: int) -> np.ndarray:
        settings = {"seed": i, "candidates": 1 + i % 3}
        return pixels(server.client().images.generate(prompt=captions[i], extra_body=settings).data[0].b64_json)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    equal = 0
    for i, answer in enumerate(answers):
        own = pipe(captions[i], seed=i, candidates=1 + i % 3)[0]
        equal += np.array_equal(answer, pixels(base64.b64encode(own.png()).decode()))
    assert equal >= 15  # rounding depends on the batch and may flip a choice


def test_a_client_that_leaves_gives_its_place_to_others(folder):
    with serve(folder, "--max-requests", "1") as server:
        slow = {"prompt": "a", "extra_body": {"candidates": 256}, "stream": True, "partial_images": 3}
        stream = server.client().images.generate(**slow)
        deadline = time.monotonic() + 20
        while not server.open_requests() and time.monotonic() < deadline:
            time.sleep(0.01)
        if server.open_requests():  # else it is drawn already
            for streams in (False, True):
                with pytest.raises(openai.RateLimitError) as caught:
                    server.client().images.generate(prompt="b", stream=streams)
                assert int(caught.value.response.headers["retry-after"]) >= 1
        stream.close()
        while server.open_requests() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.open_requests() == 0
        assert server.client().images.generate(prompt="b").data


def test_other_sites_and_other_names_are_refused(server):
    body = json.dumps({"prompt": "a"})
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        status, _, answer = server.send("POST", "/v1/images/generations", body, **headers)
        assert status == 403 and json.loads(answer)["error"]["code"].startswith("forbidden")
    own = f"http://127.0.0.1:{server.port}"
    status, headers, _ = server.send("GET", "/", origin=own)
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    assert "server" not in {name.lower() for name in headers}
    for size in (str(MAX_BODY + 1), "9" * 30, "-1", "x"):
        assert server.send("POST", "/v1/images/generations", b"", content_length=size)[0] in (400, 413)


def test_keys_are_needed_elsewhere_and_name_the_client(folder, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"# people\nAnna B {hash_key('secret')}\n")
    with serve(folder, "--keys", str(keys)) as server:
        with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
            server.client(api_key="wrong").images.generate(prompt="a")
        assert server.client(api_key="secret").images.generate(prompt="a").data
        assert server.send("GET", "/health", host="example.org")[0] == 200
        assert server.send("GET", "/metrics")[0] == 401
        assert any("Anna B POST /v1/images/generations 200" in line for line in server.log)
        assert not any("secret" in line for line in server.log)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "limner", "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_wrong_options_of_the_command_are_one_sentence(tmp_path):
    (tmp_path / "keys").write_text("Anna 12\n")
    for options, message in (
        (["--host", "0.0.0.0"], "needs --keys FILE"),
        (["--keys", str(tmp_path / "keys")], "line 1 is not `NAME SHA-256`"),
        (["--keys", str(tmp_path / "none")], "No such file"),
        (["--model", "a/tiny", "b/tiny"], "folders have different names"),
        (["--model"], "one model or more"),
    ):
        done = run(*options)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
        assert message in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as busy:
        done = run("--port", str(busy.getsockname()[1]))
        assert done.returncode == 2 and "in use" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    key, line = run("--new-key", "Anna B").stdout.splitlines()
    assert line == f"Anna B {hash_key(key)}"


def test_a_server_that_is_told_to_stop_finishes_what_it_draws(folder):
    with serve(folder) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client().images.generate, prompt="a", extra_body={"candidates": 64})
        deadline = time.monotonic() + 20
        while not server.open_requests() and not answer.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert answer.result(60).data
        assert server.process.wait(60) in (0, -signal.SIGTERM)


def test_a_killed_server_leaves_no_client_waiting_and_starts_again(folder):
    files = {path: path.read_bytes() for path in folder.iterdir()}
    with serve(folder) as server, ThreadPoolExecutor(20) as pool:
        client = server.client(timeout=60)
        options = {"prompt": "a", "extra_body": {"candidates": 64}}
        answers = [pool.submit(client.images.generate, **options) for _ in range(20)]
        deadline = time.monotonic() + 30
        while not server.open_requests() and time.monotonic() < deadline:
            time.sleep(0.01)
        server.process.kill()
        errors = [answer.exception(timeout=60) for answer in answers]
        assert any(errors) and all(e is None or isinstance(e, openai.APIConnectionError) for e in errors)
    with serve(folder, "--port", str(server.port)) as again:
        assert again.port == server.port and again.client().images.generate(prompt="a").data
    assert {path: path.read_bytes() for path in folder.iterdir()} == files


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
FIELDS = st.sampled_from([*Generate.model_fields, "quality"])


@settings(max_examples=60, deadline=None)
@given(body=st.dictionaries(FIELDS, JSON, max_size=5) | JSON, prompt=st.none() | st.text(max_size=20))
def test_no_body_makes_the_server_fail(server, body, prompt):
    if isinstance(body, dict):
        body = {**body, "candidates": 1, **({} if prompt is None else {"prompt": prompt})}
    status, headers, answer = server.send("POST", "/v1/images/generations", json.dumps(body))
    assert status in (200, 400, 404)
    if headers["content-type"] == "application/json":
        content = json.loads(answer)
        assert content["data"] if status == 200 else content["error"]["message"]


def test_answers_and_fields_are_those_of_the_sdk(server):
    from openai.types import ImageGenCompletedEvent, ImagesResponse
    from openai.types.image_generate_params import ImageGenerateParamsBase

    own = {"seed", "candidates", "temperature", "top_k", "top_p", "guidance", "stream", "trace"}
    assert set(Generate.model_fields) - own <= set(ImageGenerateParamsBase.__annotations__)
    _, _, answer = server.send("POST", "/v1/images/generations", json.dumps({"prompt": "a"}))
    ImagesResponse.model_validate_json(answer, strict=True)
    body = json.dumps({"prompt": "a", "stream": True})
    _, _, answer = server.send("POST", "/v1/images/generations", body)
    comment, event, done, _ = answer.decode().split("\n\n")
    assert comment.startswith(": ") and done == "data: [DONE]"
    ImageGenCompletedEvent.model_validate_json(event.split("data: ", 1)[1], strict=True)
