"""`limner vote`: let people compare pictures of models on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import Writable, parse
from limner.cli.serve import run_server
from limner.errors import UserError
from limner.validation import Range, Validated


@dataclass(frozen=True, kw_only=True)
class VoteOptions(Validated):
    """Serve a page on this machine, on which people compare pictures of two models or more.

    A folder has the pictures of a model; pictures of the same name in two folders are a pair. `limner evaluate votes`
    counts the votes.
    """

    folders: Positional[tuple[Path, ...]]
    """Folders of pictures, of a model each."""
    votes: Annotated[Path, arg(metavar="FILE"), Writable("file")] = Path("votes.sqlite")
    """The file of votes, which is continued if it exists."""
    voters: Annotated[int, Range(1, 1_000)] = 5
    """Voters on each pair."""
    port: Annotated[int, Range(0, 65_535)] = 8000
    """The port to listen on; 0 takes a free one."""


def main(argv: Sequence[str]) -> None:
    """Serve the page until the process is interrupted."""
    options = parse(VoteOptions, argv, "limner vote")
    try:
        import uvicorn  # noqa: F401

        from limner.serve.vote import create_app, find_pairs
    except ModuleNotFoundError as error:
        raise UserError(f"limner vote needs {error.name}: run pip install 'limner[serve]'") from None
    from limner.evaluation.votes import VoteStore

    for folder in options.folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder of pictures")
    pairs = find_pairs(options.folders)
    app = create_app(pairs, VoteStore(options.votes), options.voters)
    print(f"{len(pairs)} pairs; results: limner evaluate votes {options.votes}")
    run_server(app, "127.0.0.1", options.port)
