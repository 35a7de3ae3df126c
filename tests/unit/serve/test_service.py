"""Pictures that a service sends."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from limner.sampling.engine import Job
from limner.serve.protocol import Generate
from limner.serve.service import Service
from tiny import examples, tiny_pipe


@pytest.fixture
def service():
    service = Service("tiny", tiny_pipe(), max_requests=1)
    yield service
    service.worker.close()


def finished(service: Service, body: Generate, picture: Image.Image) -> Job:
    """Return a job whose only candidate is a picture."""
    request = service.request(body, "client")
    h, w = service.pipe.prior.config.grid
    job = Job(request, h * w, service.pipe.size)
    pixels = np.asarray(picture.convert("RGB").resize((service.pipe.size,) * 2))
    job.pictures[:] = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    job.tokens[:], job.scores[:] = 0, 0
    return job


def test_a_training_picture_that_is_followed_is_not_counted_as_text(service):
    service.pipe = tiny_pipe(condition_blocks=1)
    body, counts = Generate(prompt="a red circle", candidates=1), []
    for followed in (None, examples(service.pipe)):
        service.pipe.examples = followed
        job = finished(service, body, Image.new("RGB", (24, 24)))
        counts.append((len(job.request.text), service._images(body, job).usage.input_tokens))
    text_tokens = int((service.pipe.tokenizer.encode(["a red circle"], 30) >= 0).sum())
    assert counts == [(66, text_tokens)] * 2


def test_gray_pictures_are_traced_if_asked_for(service):
    gray = Image.new("RGB", (24, 24), "white")
    ImageDraw.Draw(gray).rectangle((6, 6, 17, 17), fill="black")
    red = Image.new("RGB", (24, 24), "red")
    for trace, picture, traced in ((True, gray, True), (False, gray, False), (True, red, False)):
        body = Generate(prompt="a square <&>", candidates=1, trace=trace)
        (sent,) = service._images(body, finished(service, body, picture)).data
        assert (sent.svg is not None) == traced
    body = Generate(prompt="a square <&>", candidates=1, trace=True)
    svg = service._images(body, finished(service, body, gray)).data[0].svg
    assert svg.startswith("<svg") and "a square &lt;&amp;&gt;" in svg
