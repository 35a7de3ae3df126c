"""A page on which people compare pictures of models, pair by pair (`evaluation/votes.py` counts the votes).

Voters are blind: pictures lose their metadata, and the order of models, sides and pairs is random, but fixed for each
voter, so that they can stop and continue. One in `CHECK_EVERY` pairs is a check, a picture and its blurred copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from PIL import Image, ImageFilter
from pydantic import BaseModel, ConfigDict, Field

from limner.data.image_decode import decode_image
from limner.data.image_encode import image_bytes
from limner.data.sample import Rejected
from limner.errors import UserError
from limner.evaluation.votes import CHECK, QUESTIONS, Choice, Vote, VoteStore
from limner.serve.answers import add_error_handlers
from limner.serve.app import SHARED, static
from limner.serve.security import Guard

__all__ = ["Pair", "Question", "create_app", "find_pairs", "next_question"]

CHECK_EVERY = 10  # pairs
_BLUR = 1 / 12  # radius of the blurred copy, of its side
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_MAX_BYTES = 24 << 20  # of a picture's file
_FOLDER = Path(__file__).parent / "page"


class Pair(NamedTuple):
    """Pictures of two models for a caption; `second` is `CHECK` for a blurred copy of the first picture."""

    name: str
    caption: str
    first: str
    second: str
    files: tuple[Path, Path]


def find_pairs(folders: Sequence[Path]) -> list[Pair]:
    """Return a pair for each two folders that have a picture of the same name, and checks. A caption is that in the
    picture's metadata, else the name of the file. Raises `UserError` if there are no pairs."""
    if len({folder.name for folder in folders}) < max(2, len(folders)):
        raise UserError("name two folders of pictures or more, with different names")
    files = {
        folder: {p.name: p for p in sorted(folder.iterdir()) if p.suffix.lower() in _SUFFIXES} for folder in folders
    }
    pairs, checks = list[Pair](), list[Pair]()
    for two in combinations(folders, 2):
        for name in sorted(files[two[0]].keys() & files[two[1]].keys()):
            first, second = two if _random(name, two[0].name, two[1].name) % 2 else two[::-1]
            caption = _caption(files[first][name])
            pair = Pair(
                f"{first.name}/{second.name}/{name}", caption, first.name, second.name,
                (files[first][name], files[second][name]),
            )  # fmt: skip
            pairs.append(pair)
            if len(pairs) % CHECK_EVERY == 1:
                file = pair.files[0]
                checks.append(Pair(f"{first.name}/{CHECK}/{name}", caption, first.name, CHECK, (file, file)))
    if not pairs:
        raise UserError(
            "no picture has the same name in two folders: draw the same captions to files of the same names"
        )
    return pairs + checks


class Question(NamedTuple):
    """A question for a voter: the index of a pair, a key of `QUESTIONS`, and the number of pairs that are done."""

    pair: int
    question: str
    done: int


def next_question(pairs: Sequence[Pair], votes: Sequence[Vote], voter: str, voters: int) -> Question | int:
    """Return the voter's next question, or the number of pairs done if none is left.

    A pair that others began is left out once `voters` of them have voted; checks are for everyone.
    """
    answered, others = set[tuple[str, str]](), dict[str, set[str]]()
    for vote in votes:
        if vote.voter == voter:
            answered.add((vote.pair, vote.question))
        else:
            others.setdefault(vote.pair, set()).add(vote.voter)
    done, following = 0, list[tuple[int, str]]()
    for i in sorted(range(len(pairs)), key=lambda i: _random(voter, pairs[i].name)):
        name = pairs[i].name
        open_questions = [question for question in QUESTIONS if (name, question) not in answered]
        done += not open_questions
        begun, full = len(open_questions) < len(QUESTIONS), len(others.get(name, ())) >= voters
        if open_questions and (begun or pairs[i].second == CHECK or not full):
            following.insert(0 if begun else len(following), (i, open_questions[0]))
    return Question(*following[0], done) if following else done


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Voter(_Strict):
    voter: Annotated[str, Field(pattern=r"^\S(.{0,38}\S)?$")]


class _Answer(_Voter):
    pair: Annotated[int, Field(ge=0)]
    question: Literal["realism", "caption"]
    choice: Choice
    seconds: Annotated[float, Field(ge=0, le=86_400)]


def create_app(pairs: Sequence[Pair], store: VoteStore, voters: int) -> FastAPI:
    """Return the application; `voters` vote on each pair."""
    app = FastAPI(title="limner vote", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard)
    add_error_handlers(app)

    def ask(voter: str) -> Response:
        asked = next_question(pairs, store.votes(), voter, voters)
        if isinstance(asked, int):
            return JSONResponse({"done": asked})
        pair = pairs[asked.pair]
        return JSONResponse(
            {
                "pair": asked.pair, "question": asked.question, "text": QUESTIONS[asked.question],
                "caption": pair.caption, "done": asked.done, "total": len(pairs),
                "left": ("first", "second")[_random(voter, pair.name, "side") % 2],
            }
        )  # fmt: skip

    @app.post("/next")
    def start(body: _Voter) -> Response:
        return ask(body.voter)

    @app.post("/vote")
    def vote(body: _Answer) -> Response:
        pair = _pair(pairs, body.pair)
        answer = body.question, body.choice, body.seconds
        store.add(Vote(body.voter, pair.name, pair.first, pair.second, *answer))
        return ask(body.voter)

    @app.get("/pictures/{index}/{place}")
    def picture(index: int, place: Literal["first", "second"]) -> Response:
        pair = _pair(pairs, index)
        blurred = pair.second == CHECK and place == "second"
        return Response(_picture(pair.files[place == "second"], blurred), media_type="image/png")

    css = [SHARED / "page.css", _FOLDER / "page.css", _FOLDER / "vote.css"]
    for path, files, kind in (
        ("/", [SHARED / "head.html", _FOLDER / "vote.html"], "text/html"),
        ("/page.js", [_FOLDER / "vote.js"], "text/javascript"),
        ("/page.css", css, "text/css"),
    ):
        app.get(path)(static(b"".join(file.read_bytes() for file in files), kind))
    return app


def _pair(pairs: Sequence[Pair], index: int) -> Pair:
    if not 0 <= index < len(pairs):
        raise UserError(f"the pair {index} does not exist: reload the page")
    return pairs[index]


def _picture(file: Path, blurred: bool) -> bytes:
    """Return a picture as PNG without metadata."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise Rejected("too large")
        image = Image.fromarray(decode_image(file.read_bytes()))
    except (OSError, Rejected) as error:
        raise UserError(f"the picture {file.name} is not readable ({error}): correct the file") from None
    if blurred:
        image = image.filter(ImageFilter.GaussianBlur(min(image.size) * _BLUR))
    return image_bytes(image)


def _caption(file: Path) -> str:
    """Return the caption in a picture's metadata, or the name of the file in words."""
    try:
        with Image.open(file) as image:
            caption = image.info.get("caption")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"the picture {file} is not readable ({error}): remove it") from None
    return str(caption) if caption else file.stem.replace("-", " ").replace("_", " ")


def _random(*words: str) -> int:
    """Return a random number that depends on words alone."""
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8], "big")
