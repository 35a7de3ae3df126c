"""From a client's request to pictures: what both endpoints share, streamed or not."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

import numpy as np
from PIL import Image
from torch import Tensor

from limner.drawing import Drawing, Drawings, ImageKind, enlargement
from limner.errors import UserError
from limner.pipeline import TextToImage
from limner.sampling.engine import Job, Request
from limner.sampling.generation_config import GenerationConfig
from limner.serve.protocol import Completed, Generate, Images, PartialImage, Picture, TextTokens, Usage
from limner.serve.worker import Partial, Worker
from limner.text import PAD

__all__ = ["Service", "Sign"]

#: Returns a file of a drawing, of a kind such as "png", with a signature (`signing.Signer`).
Sign = Callable[[bytes, ImageKind, Drawing], bytes]

_CANDIDATES = 16  # unless the model sets its number
_UNFINISHED = 235  # gray of the rows that are not drawn yet


class Service:
    """Draws what `Generate` asks for with one model."""

    def __init__(self, name: str, pipe: TextToImage, max_requests: int, sign: Sign | None = None) -> None:
        self.name, self.pipe, self.created, self.sign = name, pipe, int(time.time()), sign
        self.worker = Worker(pipe, max_requests)

    def request(self, body: Generate, client: str, prompt_tokens: Tensor | None = None) -> Request:
        """Return the request of the engine. Raises `UserError` if a setting is out of range."""
        candidates = max(body.n, body.candidates or self.pipe.defaults.candidates or _CANDIDATES)
        settings = {key: getattr(body, key) for key in ("temperature", "top_k", "top_p", "guidance")}
        try:
            sampler = GenerationConfig(**settings)
        except ValueError as error:
            raise UserError(str(error)) from None
        rows = self.pipe.prior.config.grid[0]
        return self.pipe.request(
            body.prompt, candidates, sampler=sampler, seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
            prompt_tokens=prompt_tokens, client=client,
            preview_every=-(-rows // (body.partial_images + 1)) if body.stream and body.partial_images else 0,
            preview_first=body.n,
        )  # fmt: skip

    async def images(self, body: Generate, request: Request) -> Images:
        """Draw a request, and return all pictures."""
        async with aclosing(self.worker.draw(request)) as events:
            async for event in events:
                if isinstance(event, Job):
                    return await asyncio.to_thread(self._images, body, event)
        raise AssertionError("the worker ended without a job")

    async def events(self, body: Generate, request: Request, prefix: str) -> AsyncGenerator[PartialImage | Completed]:
        """Draw a request, and yield partial pictures of its first candidates, then the best pictures."""
        counts = [0] * body.n
        async with aclosing(self.worker.draw(request)) as events:
            async for event in events:
                if isinstance(event, Job):
                    images = await asyncio.to_thread(self._images, body, event)
                    for i, picture in enumerate(images.data):
                        yield Completed(
                            type=f"{prefix}.completed", created_at=images.created, image_index=i,
                            output_format=images.output_format, size=images.size, usage=images.usage,
                            warnings=images.warnings, **picture.model_dump(),
                        )  # fmt: skip
                else:
                    for partial in await asyncio.to_thread(self._partials, body, event, counts, prefix):
                        yield partial

    def _partials(self, body: Generate, event: Partial, counts: list[int], prefix: str) -> list[PartialImage]:
        """Encode partial pictures of the first n candidates, complete in size; counts them in `counts`."""
        partials, side = [], self.pipe.size
        for i, pixels in zip(event.candidates, event.pictures, strict=True):
            if counts[i] < body.partial_images and pixels.shape[1] < side:
                whole = np.full((side, side, 3), _UNFINISHED, np.uint8)
                whole[: pixels.shape[1]] = pixels.permute(1, 2, 0).numpy()
                drawing = Drawing(
                    image=Image.fromarray(whole), caption=body.prompt, score=0.0, seed=0, candidate=i + 1,
                    model=self.name,
                )  # fmt: skip
                data, size = self._encode(body, drawing)
                partials.append(PartialImage(
                    type=f"{prefix}.partial_image", b64_json=data, created_at=int(time.time()), size=size,
                    output_format=body.output_format, partial_image_index=counts[i], image_index=i,
                ))  # fmt: skip
                counts[i] += 1
        return partials

    def _images(self, body: Generate, job: Job) -> Images:
        request = job.request
        drawings = Drawings.best(
            job.pictures.numpy(), job.scores.numpy(), job.tokens.numpy(), body.n, caption=body.prompt,
            seed=request.seed, model=self.name, settings=request.settings,
        )  # fmt: skip
        pictures, size = [], ""
        for drawing in drawings:
            (data, size), svg = self._encode(body, drawing, self.sign), None
            if body.trace:
                with suppress(UserError):  # for pictures with colors, and without contourpy
                    svg = drawing.svg()
            pictures.append(Picture(
                b64_json=data, seed=drawing.seed, candidate=drawing.candidate, score=drawing.score, svg=svg,
                follows=request.follows,
            ))  # fmt: skip
        text = int((request.text[: self.pipe.prior.config.text_len] != PAD).sum())  # without a picture to follow
        given = 0 if request.prompt_tokens is None else int((request.prompt_tokens >= 0).sum())
        sampled = job.tokens.numel() - given * len(job.tokens)
        usage = Usage(
            input_tokens=text + given, input_tokens_details=TextTokens(text_tokens=text, image_tokens=given),
            output_tokens=sampled, total_tokens=text + given + sampled,
        )  # fmt: skip
        return Images(
            created=int(time.time()), data=pictures, output_format=body.output_format, size=size, usage=usage,
            warnings=self._warnings(body, size, text),
        )  # fmt: skip

    def _encode(self, body: Generate, drawing: Drawing, sign: Sign | None = None) -> tuple[str, str]:
        """Return a file in base64, and its size."""
        scale = enlargement(self.pipe.size, body.scale(self.pipe.size))
        data = drawing.file(body.output_format, scale, body.output_compression)
        if sign:
            data = sign(data, body.output_format, drawing)
        return base64.b64encode(data).decode(), f"{self.pipe.size * scale}x{self.pipe.size * scale}"

    def _warnings(self, body: Generate, size: str, text_tokens: int) -> list[str]:
        warnings = [f"{name} has no effect" for name, value in (body.model_extra or {}).items() if value is not None]
        if body.size not in ("auto", size):
            warnings.append(f"the pictures are {size}: this model's side is {self.pipe.size}, times a whole number")
        if text_tokens == self.pipe.prior.config.text_len:
            warnings.append(f"the prompt has {text_tokens} tokens, as many as the model reads: more have no effect")
        return [warning[:200] for warning in warnings[:20]]
