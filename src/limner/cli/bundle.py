"""`limner bundle RUN OUT`: pack a trained model with a name, a description and scores."""

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
    """Copy a bundle, with your own model card and scores. --bits does not apply to the dVAE, whose weights are stored
    in 16 bits if this is lossless."""

    source: Positional[str]
    """A run of `limner train`, or a bundle."""
    out: Positional[Path]
    """The new folder."""
    name: str | None = None
    """Name of the model; the name of the new folder by default."""
    about: str | None = None
    """One sentence on what it draws."""
    license: str | None = None
    """License of the model, such as CC-BY-4.0; by default that of the source."""
    scores: tuple[Path, ...] = ()
    """JSON files of `limner evaluate`, whose tables are added to the card."""
    bits: Literal[8, 16] = 16
    """Bits per weight of the prior and the contrastive model; 8 bits apply to matrices, with a scale per row."""
    prune: str | None = None
    """Remove dVAE codes that no picture of this data set uses."""


def main(argv: Sequence[str]) -> None:
    """Copy a bundle with another name or card, weights in 8 bits, or fewer codes."""
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
