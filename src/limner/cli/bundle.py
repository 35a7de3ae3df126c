"""`limner bundle RUN OUT`: pack a trained model with a name, a description and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import NewFolder, parse
from limner.errors import UserError, escape_control


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """Copy a bundle, with your own model card and scores. --bits does not apply to the dVAE, whose weights are stored
    in 16 bits if this is lossless."""

    source: Positional[str]
    """A run of `limner train`, or a bundle."""
    out: Positional[NewFolder]
    """The new folder."""
    name: Annotated[str | None, arg(metavar="NAME")] = None
    """Name of the model; the name of the new folder by default."""
    about: Annotated[str | None, arg(metavar="TEXT")] = None
    """One sentence on what the model draws."""
    license: Annotated[str | None, arg(metavar="NAME")] = None
    """License of the model, such as CC-BY-4.0; by default that of the source."""
    scores: tuple[Path, ...] = ()
    """JSON files of `limner evaluate`, whose tables are added to the card."""
    bits: Literal[8, 16] = 16
    """Bits per weight of the prior and the contrastive model; 8 bits apply to matrices, with a scale per row."""
    prune: Annotated[str | None, arg(metavar="DATA")] = None
    """Remove dVAE codes that no picture of this data uses."""


def main(argv: Sequence[str]) -> None:
    """Copy a bundle with another name or card, weights in 8 bits, or fewer codes."""
    options = parse(BundleOptions, argv, "limner bundle")
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
    pipe.info |= {key: value for key in ("about", "license") if (value := getattr(options, key))}
    pipe.info["name"] = options.name or options.out.resolve().name
    scores = pipe.info.get("scores") or {}
    if options.scores and not isinstance(scores, dict):
        raise UserError(f"{options.source}: scores in config.json must be a JSON object: correct it or omit --scores")
    for path in options.scores:
        result = read_json(path, 1 << 28)
        if isinstance(result, dict):  # without the cases
            result = [{key: part[key] for key in ("title", "rows", "settings")} for part in result.get("results", ())]
        pipe.info["scores"] = scores = {**scores, path.stem: result}
    pipe.save_pretrained(options.out, torch.int8 if options.bits == 8 else torch.float16)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"{escape_control(options.out)}: {escape_control(pipe.name)}, {size / 1e6:.1f} MB")
