"""OpenAI's Images API as pydantic models: what its Python SDK sends and reads, and limner's own fields.

A field that a small model cannot serve (quality, style, background, ...) is accepted, and named in `warnings`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from limner.drawing import ImageKind

__all__ = [
    "ApiError", "Completed", "ErrorBody", "Generate", "Images", "Model", "Models", "PartialImage", "Picture",
    "TextTokens", "Usage",
]  # fmt: skip

MAX_PROMPT = 32_000  # characters, as OpenAI's
MAX_CANDIDATES = 256  # of a request
MAX_SIDE = 4_096  # of a file, in pixels
MAX_SEED = 2**53 - 1  # larger numbers are not exact in every client's JSON
_SIZE = "^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"
_TEMPERATURES = [{"const": 0}, {"type": "number", "minimum": 0.01, "maximum": 100}, {"type": "null"}]


class Generate(BaseModel):
    """The fields of a drawing request. Fields that are not listed are ignored and named in the answer's `warnings`."""

    model_config = ConfigDict(extra="allow", strict=True)

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT, json_schema_extra={"pattern": r"\S"})]
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=10)] = 1
    size: Annotated[
        str, Field(description='side of the file, "384x384", or "auto"', json_schema_extra={"pattern": _SIZE})
    ] = "auto"
    output_format: ImageKind = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] = 100
    response_format: Literal["b64_json"] = "b64_json"
    stream: bool = False
    partial_images: Annotated[int, Field(ge=0, le=3)] = 0
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED, description="random by default")] = None
    candidates: Annotated[int | None, Field(ge=1, le=MAX_CANDIDATES)] = None
    temperature: Annotated[float | None, Field(json_schema_extra={"anyOf": _TEMPERATURES})] = None
    top_k: Annotated[int | None, Field(ge=1, le=2**24)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    guidance: Annotated[float | None, Field(ge=0, le=100)] = None
    trace: Annotated[bool, Field(description="add an SVG document, traced from it, to each gray picture")] = False

    @field_validator("n", "output_compression", "partial_images", "seed", "candidates", "top_k", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else value  # 1.0 is an integer in JSON

    @field_validator("prompt")
    @classmethod
    def _not_blank(cls, prompt: str) -> str:
        if not prompt.strip():
            raise ValueError("the prompt is empty: describe the picture")
        return prompt

    @field_validator("size")
    @classmethod
    def _size(cls, size: str) -> str:
        if not re.fullmatch(_SIZE, size):
            raise ValueError(f'size is "auto" or like "384x384", not {size[:40]!r}')
        return size

    def scale(self, side: int) -> int | None:
        """Return the factor that enlarges a picture of `side` pixels to the asked size or the next smaller one."""
        if self.size == "auto":
            return None
        return max(1, min(*map(int, self.size.split("x")), MAX_SIDE) // side)


class TextTokens(BaseModel):
    """Tokens of a caption, and of a picture that it comes with."""

    text_tokens: int
    image_tokens: int


class Usage(BaseModel):
    """Tokens read and sampled. Output tokens count all candidates."""

    input_tokens: int
    input_tokens_details: TextTokens
    output_tokens: int
    total_tokens: int


class Picture(BaseModel):
    """A finished picture. `candidate` is its number, from 1, and `score` that of the reranker; `svg` if asked for.

    `follows` has subject and style of the training picture that the drawing follows, if it follows one.
    """

    b64_json: str
    seed: int
    candidate: int
    score: float
    svg: str | None = None
    follows: str | None = None


class Images(BaseModel):
    """The answer to a request that does not stream."""

    created: int
    data: list[Picture]
    background: Literal["opaque"] = "opaque"
    output_format: ImageKind
    size: str
    usage: Usage
    warnings: list[str] = []


class _Event(BaseModel):
    type: str
    background: Literal["opaque"] = "opaque"
    created_at: int
    output_format: ImageKind
    image_index: int
    quality: Literal["auto"] = "auto"
    size: str


class PartialImage(_Event):
    """An event: the top rows of a candidate. The picture that is kept in the end may be another candidate."""

    b64_json: str
    partial_image_index: int


class Completed(_Event, Picture):
    """An event: a finished picture."""

    usage: Usage
    warnings: list[str] = []


class Model(BaseModel):
    """A model that the server draws with. If it `follows`, an edit without a mask follows the picture."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "limner"
    about: str = ""
    size: int
    follows: bool


class Models(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[Model]


class ApiError(BaseModel):
    """An error in one sentence, and the parameter that caused it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ApiError
