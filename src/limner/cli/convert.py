"""`limner convert openai-dvae ENCODER DECODER OUT`: published weights in limner's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from limner.cli import run_subcommand
from limner.cli.arguments import NewFolder
from limner.errors import escape_control
from limner.validation import Range, Validated


@dataclass(frozen=True, kw_only=True)
class OpenAIDVAE(Validated):
    """Convert OpenAI's published dVAE, or another of its architecture, without rounding.

    Encoder and decoder are pickled modules as published (encoder.pkl, decoder.pkl), or state dicts of torch or
    safetensors. No code in a file is run.
    """

    encoder: Positional[Path]
    """File of the encoder."""
    decoder: Positional[Path]
    """File of the decoder."""
    out: Positional[NewFolder]
    """New folder; `limner train` accepts it as --dvae.bundle, with any recipe."""
    size: Annotated[int, Range(1, 4_096)] = 256
    """Side of the pictures in pixels."""


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner convert`."""
    run_subcommand("limner convert", [openai_dvae], argv)


def openai_dvae(options: OpenAIDVAE) -> None:
    """convert a dVAE of OpenAI's architecture"""
    from limner.bundles import save_dvae
    from limner.models.openai_dvae import from_openai, read

    dvae = from_openai(read(options.encoder), read(options.decoder), options.size)
    save_dvae(dvae, options.out, {"name": options.out.resolve().name, "about": "a converted dVAE"})
    c = dvae.config
    print(
        f"{escape_control(options.out)}: {c.vocab:,} codes, {c.stride}x downsampling, width {c.width}, without rounding"
    )
