"""`limner bundle RUN OUT`: pack a trained model with a name, a description and its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from limner.cli.arguments import parse, place
from limner.errors import UserError, printable


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """Copy a bundle, with a model card of your words and scores. A dVAE's weights are stored in 16 bits if that changes
    none of them, whatever --bits says."""

    source: Positional[str]
    """A run of `limner train`, or a bundle."""
    out: Positional[Path]
    """The new folder."""
    name: str | None = None
    """Of the model; the new folder's by default."""
    about: str | None = None
    """One sentence on what it draws."""
    license: str | None = None
    """Of the model, such as CC-BY-4.0; by default what the source says."""
    scores: tuple[Path, ...] = ()
    """JSON files of `limner evaluate` whose tables go into the card."""
    bits: Literal[8, 16] = 16
    """Bits of each number of the prior and the contrastive model; with 8, matrices have a scale for each row."""
    prune: str | None = None
    """Leave out the codes of the dVAE that no picture of this data has."""


def main(argv: Sequence[str]) -> None:
    """Write a bundle anew: with another name or card, weights in 8 bits, or fewer codes."""
    options = parse(BundleOptions, argv, "limner bundle")
    out = place(options.out, folder=True)
    import torch

    from limner.json_files import read_json
    from limner.pipeline import load

    pipe = load(options.source)
    if options.prune:
        from limner.data.open_source import open_source
        from limner.runs.prune_codebook import prune, used_codes

        codes = used_codes(pipe.dvae, open_source(options.prune))
        print(f"{len(codes)} of {pipe.dvae.config.vocab} codes are in use")
        pipe = prune(pipe, codes)
    said: dict[str, Any] = {"about": options.about, "license": options.license}
    pipe.info |= {key: value for key, value in said.items() if value}
    pipe.info["name"] = options.name or out.resolve().name
    scores = pipe.info.get("scores") or {}
    if options.scores and not isinstance(scores, dict):
        raise UserError(f"{options.source}: the scores in its config.json are no mapping, so none can be added to them")
    for path in options.scores:
        found = read_json(path, 1 << 28)
        if isinstance(found, dict):
            found = found.get("table", {key: value for key, value in found.items() if key != "captions"})
        pipe.info["scores"] = scores = {**scores, path.stem: found}
    pipe.save_pretrained(out, torch.int8 if options.bits == 8 else torch.float16)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{printable(options.out)}: {printable(pipe.name)}, {size / 1e6:.1f} MB")
