"""`limner convert openai-dvae | clip`: published weights in limner's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from limner.cli import run_subcommand
from limner.cli.arguments import NewFolder
from limner.errors import UserError, escape_control
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


@dataclass(frozen=True, kw_only=True)
class PublishedCLIP(Validated):
    """Convert published CLIP weights with a vision transformer, of OpenAI, open_clip or Hugging Face.

    Pictures of another size are resized as for the published model, and normalized by its mean and standard deviation.
    """

    weights: Positional[Path]
    """A safetensors file, such as Hugging Face's `model.safetensors`."""
    tokenizer: Positional[Path]
    """`tokenizer.json` or `merges.txt` of Hugging Face, or OpenAI's `bpe_simple_vocab_16e6.txt.gz`."""
    out: Positional[NewFolder]
    """New folder, for `limner evaluate zero-shot`, `limner draw --rerank` and `limner evaluate fidelity`."""
    activation: Literal["quick-gelu", "gelu"]
    """The activation, which the file of weights does not show: quick-gelu for OpenAI's models, gelu for most others
    (`hidden_act` or `quick_gelu` in the config of the published model)."""


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner convert`."""
    run_subcommand("limner convert", [openai_dvae, clip], argv)


def openai_dvae(options: OpenAIDVAE) -> None:
    """convert a dVAE of OpenAI's architecture"""
    from limner.bundles import save_model
    from limner.models.openai_dvae import from_openai, read

    dvae = from_openai(read(options.encoder), read(options.decoder), options.size)
    save_model(options.out, "dvae", dvae, {"name": options.out.resolve().name, "about": "a converted dVAE"})
    c = dvae.config
    print(
        f"{escape_control(options.out)}: {c.vocab:,} codes, {c.stride}x downsampling, width {c.width}, without rounding"
    )


def clip(options: PublishedCLIP) -> None:
    """convert a published CLIP model"""
    from limner.bundles import save_model
    from limner.models.published_clip import from_published, read
    from limner.text.clip_bpe import CLIPTokenizer

    tokenizer = CLIPTokenizer.load(options.tokenizer)
    model = from_published(read(options.weights), options.activation == "quick-gelu")
    c = model.config
    if c.text_vocab != tokenizer.vocab_size:
        raise UserError(
            f"{options.tokenizer} has {tokenizer.vocab_size:,} tokens, the weights have {c.text_vocab:,}: give the "
            "tokenizer of this model"
        )
    info = {"name": options.out.resolve().name, "about": "a converted CLIP model"}
    save_model(options.out, "contrastive", model, info, tokenizer)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    tower = f"ViT of width {c.width}, depth {c.depth}, patches of {c.patch} pixels"
    print(f"{escape_control(options.out)}: {tower}, pictures of {c.size} pixels, {count:,.1f} M parameters")
