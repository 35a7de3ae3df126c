"""Conversion of the dVAE that OpenAI published with DALL-E, from its parameters alone.

Its encoder and decoder equal ours at another size: names, shapes and arithmetic agree, so the tensors determine the
config. See https://github.com/openai/DALL-E (`dall_e/encoder.py`, `decoder.py`).

They were published as `encoder.pkl` and `decoder.pkl`, whole modules pickled by torch. A pickle names functions to
call. This reader looks none of them up: torch's reader for weights makes the tensors, and a `_Part` replaces each class
of the dVAE and keeps its pickled attributes. A file with any other name raises `UserError` before it is read.
"""

from __future__ import annotations

import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from limner.atomic_io import require_file
from limner.errors import UserError
from limner.models.dvae import DVAE, DVAEConfig

_BLOCK = re.compile(r"blocks\.group_(\d)\.block_(\d{1,2})\.")
_STORED = (torch.float32, torch.float16, torch.bfloat16)
_GRID = 64  # longest side of a grid of tokens
_PICKLE_BYTES = 1 << 20  # without the tensors; the published files have about 20 kB

_CLASSES = (
    "dall_e.encoder.Encoder",
    "dall_e.encoder.EncoderBlock",
    "dall_e.decoder.Decoder",
    "dall_e.decoder.DecoderBlock",
    "dall_e.utils.Conv2d",
    "torch.nn.modules.activation.ReLU",
    "torch.nn.modules.container.Sequential",
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.pooling.MaxPool2d",
    "torch.nn.modules.upsampling.Upsample",
)
_VALUES = (  # what torch makes of tensors, devices, sets and dictionaries
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.FloatStorage",
    "torch.HalfStorage",
    "torch.BFloat16Storage",
    "torch.device",
    "__builtin__.set",
    "builtins.set",
)


class _Part:
    """Attributes of a module in the file, without its methods."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a published encoder or decoder: a pickled module, or a state dict of torch or safetensors.

    Runs no code of the file. Raises `UserError` for any other file.
    """
    require_file(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = _unpickled(path)
    except UserError:
        raise
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except Exception as error:  # a stranger's pickle makes torch's reader fail in any way
        raise UserError(f"{path} is damaged, or not a file of torch: {type(error).__name__}") from None
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(f"{path} is not a state dict, a mapping of names to tensors")
    if sum(value.numel() * value.element_size() for value in found.values()) > path.stat().st_size:
        raise UserError(f"{path} is damaged: it is smaller than its tensors")
    return found


def _unpickled(path: Path) -> dict[str, Tensor]:
    if not zipfile.is_zipfile(path):
        with path.open("rb"):  # what is missing or forbidden says so
            pass
        raise UserError(
            f"{path} is not a file of torch 1.6 or later: load it where it was made and save it again there"
        )
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(e.compress_type for e in entries) or len({e.filename for e in entries}) < len(entries):
            raise UserError(f"{path} is not as torch writes it: parts of it are compressed, or there twice")
        (pickled,) = (e for e in entries if re.fullmatch(r"[^/]*/data\.pkl", e.filename))
        if pickled.file_size > _PICKLE_BYTES:
            raise UserError(f"{path} holds {pickled.file_size} bytes beside its tensors: more than a dVAE has")
        raw = archive.read(pickled)
    for name in sorted(_names(raw)):
        if name not in _CLASSES + _VALUES:
            raise UserError(f"{path} is not a dVAE that OpenAI published: it holds a {name[:80]!r}, which was not run")
    with torch.serialization.safe_globals([(_Part, name) for name in _CLASSES]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return dict(_tensors(found)) if isinstance(found, _Part) else dict(found)


def _names(raw: bytes) -> set[str]:
    """Return the names that unpickling would look up."""
    found = set()
    for opcode, value, _ in pickletools.genops(raw):
        if opcode.name in ("GLOBAL", "INST"):
            found.add(str(value).replace(" ", "."))
        elif opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):  # which torch does not write
            found.add(opcode.name)
    return found


def _tensors(module: _Part) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors as in `state_dict`. A malformed module may raise any exception."""
    todo, met = [("", module)], set()
    while todo:
        prefix, part = todo.pop()
        if id(part) in met:
            raise ValueError("a module is there twice, or part of itself")
        met.add(id(part))
        for name, value in {**part.state["_parameters"], **part.state["_buffers"]}.items():
            if value is not None:
                yield _joined(prefix, name), value
        for name, inner in part.state["_modules"].items():
            if inner is not None:
                todo.append((_joined(prefix, name) + ".", inner))


def _joined(prefix: str, name: object) -> str:
    if not isinstance(name, str) or len(prefix) > 1_000:
        raise ValueError("a name is no text, or too long")
    return prefix + name


def from_openai(encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor], size: int = 256) -> DVAE:
    """Build a `DVAE` with the exact parameters of two published state dicts.

    Args:
        size: side of the pictures that it is used for; any multiple of the stride works.

    Raises:
        UserError: the state dicts are not the encoder and decoder of such a dVAE.
    """
    try:
        groups, blocks = (max(int(m[i]) for key in encoder if (m := _BLOCK.match(key))) for i in (1, 2))
        width, vocab = encoder["blocks.input.w"].shape[0], encoder["blocks.output.conv.w"].shape[0]
        code_width = decoder["blocks.input.w"].shape[0]
        if groups * blocks > len(encoder):
            raise ValueError
    except (KeyError, ValueError, IndexError):
        raise UserError("these are not the parameters of a published dVAE: their names differ") from None
    stride = 2 ** (groups - 1)
    if not stride <= size <= _GRID * stride or size % stride:
        raise UserError(f"size must be a multiple of {stride} up to {_GRID * stride}, not {size}")
    try:
        config = DVAEConfig(size=size, width=width, groups=groups, blocks=blocks, vocab=vocab, code_width=code_width)
        with torch.device("meta"):  # nothing is as large as a file says before its tensors were found to be
            model = config.build()
    except (RuntimeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"these are not the parameters of a published dVAE: {error}".splitlines()[0]) from None
    for name, part, state in (("encoder", model.encoder, encoder), ("decoder", model.decoder, decoder)):
        own = part.state_dict()
        for key in dict.fromkeys([*own, *state]):
            if key not in own or key not in state or own[key].shape != state[key].shape:
                raise UserError(
                    f"the {name} is not of a published dVAE: {key[:80]!r} is missing, unknown or of another shape"
                )
            if state[key].dtype not in _STORED or not state[key].isfinite().all():
                raise UserError(
                    f"the {name} is not of a published dVAE: {key[:80]!r} is no fp32 or 16-bit tensor, or not finite"
                )
    model = model.to_empty(device="cpu")
    model.encoder.load_state_dict(encoder)
    model.decoder.load_state_dict(decoder)
    return model.eval()
