"""`limner import openai-dvae ENCODER DECODER OUT`: published weights, in our format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from limner.cli import dispatch
from limner.cli.arguments import parse
from limner.config import Checked, Range
from limner.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OpenAIDVAE(Checked):
    """Convert the two halves of a dVAE with the parameter names that OpenAI published.

    Each is a .safetensors file, or a torch file that holds a state dict and nothing that runs code.
    """

    encoder: Positional[Path]
    decoder: Positional[Path]
    out: Positional[Path]
    """New folder; recipes take it as --dvae.bundle, where they borrow a dVAE."""
    size: Annotated[int, Range(1, 4_096)] = 256
    """Side of the pictures that it will be used for."""


def main(argv: Sequence[str]) -> None:
    dispatch("limner import", {"openai-dvae": openai_dvae}, argv)


def openai_dvae(argv: Sequence[str]) -> None:
    """a dVAE with the names of OpenAI's release"""
    options = parse(OpenAIDVAE, argv, "limner import openai-dvae")
    from limner.bundles import save_dvae
    from limner.models.openai import from_openai

    dvae = from_openai(_state(options.encoder), _state(options.decoder), options.size)
    save_dvae(dvae, options.out, {"name": options.out.resolve().name, "about": "an imported dVAE"})
    c = dvae.config
    print(f"{options.out}: {c.vocab:,} codes, {c.stride}x downsampling, width {c.width}")


def _state(path: Path) -> dict[str, Any]:
    """The tensors of a file by name; code in it is never run."""
    import pickle

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than tensors, and reading it would run its code: in an environment that you trust, "
            "save its state_dict() to another file"
        ) from None
    except (SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UserError(f"{path} is not a state dict, a mapping of names to tensors")
    return found
