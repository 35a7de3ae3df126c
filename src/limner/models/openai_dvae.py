"""Conversion of the dVAE that OpenAI published with DALL-E, from its parameters alone.

Its encoder and decoder equal ours at another size: names, shapes and arithmetic agree, so the tensors determine the
config. See https://github.com/openai/DALL-E (`dall_e/encoder.py`, `decoder.py`).

They were published as `encoder.pkl` and `decoder.pkl`, whole modules pickled by torch. A pickle names functions to
call. This reader looks none of them up: torch's reader for weights makes the tensors, and a `_ModuleState` replaces
each class of the dVAE and keeps its pickled attributes. A file with any other name raises `UserError` before it is
read.
"""

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
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_GRID = 64  # longest side of a grid of tokens
_MAX_PICKLE_BYTES = 1 << 20  # without the tensors; the published files have about 20 kB

_DVAE_CLASSES = (
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
_TORCH_NAMES = (  # what torch makes of tensors, devices, sets and dictionaries
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


class _ModuleState:
    """Attributes of a module in the file, without its methods."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a published encoder or decoder: a pickled module, or a state dict of torch or safetensors.

    Runs no code of the file. Raises `UserError` for any other file.
    """
    require_file(path)
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else _unpickle(path)
    except UserError:
        raise
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except Exception as error:  # a stranger's pickle makes torch's reader fail in any way
        raise UserError(f"{path} is damaged or was not written by torch ({type(error).__name__})") from None
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(f"{path} is not a state dict, a mapping of names to tensors")
    if sum(value.numel() * value.element_size() for value in tensors.values()) > path.stat().st_size:
        raise UserError(f"{path} is damaged: it is smaller than its tensors")
    return tensors


def _unpickle(path: Path) -> dict[str, Tensor]:
    if not zipfile.is_zipfile(path):
        with path.open("rb"):  # raises if the file is missing or cannot be read
            pass
        raise UserError(f"{path} was not written by torch 1.6 or later: save it again with a newer torch")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(e.compress_type for e in entries) or len({e.filename for e in entries}) < len(entries):
            raise UserError(f"{path} was not written by torch: it contains compressed or duplicate entries")
        (pickled,) = (e for e in entries if re.fullmatch(r"[^/]*/data\.pkl", e.filename))
        if pickled.file_size > _MAX_PICKLE_BYTES:
            raise UserError(f"{path} contains a pickle of {pickled.file_size} bytes, more than a published dVAE has")
        raw = archive.read(pickled)
    for name in sorted(_names(raw)):
        if name not in _DVAE_CLASSES + _TORCH_NAMES:
            raise UserError(f"{path} is not a dVAE published by OpenAI: limner does not load its {name[:80]!r}")
    with torch.serialization.safe_globals([(_ModuleState, name) for name in _DVAE_CLASSES]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return dict(_tensors(loaded)) if isinstance(loaded, _ModuleState) else dict(loaded)


def _names(raw: bytes) -> set[str]:
    """Return the names that unpickling would look up."""
    names = set()
    for opcode, value, _ in pickletools.genops(raw):
        if opcode.name in ("GLOBAL", "INST"):
            names.add(str(value).replace(" ", "."))
        elif opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):  # torch does not write these
            names.add(opcode.name)
    return names


def _tensors(module: _ModuleState) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors as in `state_dict`. A malformed module may raise any exception."""
    pending, seen = [("", module)], set()
    while pending:
        prefix, part = pending.pop()
        if id(part) in seen or len(prefix) > 1_000:
            raise ValueError("a module occurs twice, contains itself or is nested too deep")
        seen.add(id(part))
        for name, value in {**part.state["_parameters"], **part.state["_buffers"]}.items():
            if value is not None:
                yield prefix + name, value
        for name, inner in part.state["_modules"].items():
            if inner is not None:
                pending.append((prefix + name + ".", inner))


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
        raise UserError("these are not the parameters of a published dVAE: the tensor names differ") from None
    stride = 2 ** (groups - 1)
    if not stride <= size <= _MAX_GRID * stride or size % stride:
        raise UserError(f"size must be a multiple of {stride} up to {_MAX_GRID * stride}, not {size}")
    try:
        config = DVAEConfig(size=size, width=width, groups=groups, blocks=blocks, vocab=vocab, code_width=code_width)
        with torch.device("meta"):  # nothing is as large as a file says before its tensors were found to be
            model = config.build()
    except (RuntimeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"these are not the parameters of a published dVAE: {error}".splitlines()[0]) from None
    for name, part, state in (("encoder", model.encoder, encoder), ("decoder", model.decoder, decoder)):
        expected = part.state_dict()
        for key in dict.fromkeys([*expected, *state]):
            if key not in expected or key not in state or expected[key].shape != state[key].shape:
                raise UserError(
                    f"the {name} is from another model: {key[:80]!r} is missing, unknown or has another shape"
                )
            if state[key].dtype not in _DTYPES or not state[key].isfinite().all():
                raise UserError(f"the {name} is from another model: {key[:80]!r} is not fp32 or 16-bit, or not finite")
    model = model.to_empty(device="cpu")
    model.encoder.load_state_dict(encoder)
    model.decoder.load_state_dict(decoder)
    return model.eval()
