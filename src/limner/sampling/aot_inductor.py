"""Decoding steps compiled ahead of time by AOTInductor, and kept on disk for the next process.

Compiling takes half a minute or more; loading a compiled step takes almost no time. The file holds machine code and
the weights, laid out as they are multiplied. Its name is therefore a hash of all that it was made from, and its folder
must be one that nobody else may write to: whoever can write there could run code here. Damaged files are compiled
again.
"""

from __future__ import annotations

import copy
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from limner.atomic_io import atomic_write_bytes, atomic_write_text, file_hash
from limner.errors import UserError
from limner.layers.cache import Cache, LayerCache
from limner.layers.convert import convert
from limner.layers.inference_linear import DotLinear
from limner.models.transformer import Transformer
from limner.version import __version__

Step = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]

# Weights are constants, and a value that is broadcast is computed once, not for each element.
_HOW = {"freezing": True, "realize_opcount_threshold": 1}
_KEPT = 16  # files in the folder; the least recently used is removed first


def compiled(model: Transformer, layers: Sequence[LayerCache], token: Tensor, position: Tensor) -> Step:
    """A step over caches like `layers`: (token [M], position [1], the caches' memory, which it changes) -> logits
    [M, V]. The weights are constants: changed later, they have no effect. On a CPU, this needs a C++ compiler."""
    memory = Cache(layers).memory
    path = _folder() / f"{_name(model, memory)}.pt2"
    digest = path.with_suffix(".sha256")
    if not (path.is_file() and digest.is_file() and digest.read_bytes() == file_hash(path).encode()):
        made = _compile(_Step(_for_rows(model, len(token)), layers), (token, position, memory))
        atomic_write_bytes(path, made)
        atomic_write_text(digest, hashlib.sha256(made).hexdigest())
    os.utime(path)
    for old in sorted(path.parent.glob("*.pt2"), key=lambda file: file.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)
        old.with_suffix(".sha256").unlink(missing_ok=True)
    package = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)  # as CUDA graphs need it
    run = package.loader.run  # calling the package itself parses what its arguments are, each time
    return lambda token, position, memory: run([token, position, *memory])[0]


def _compile(step: nn.Module, args: tuple[Tensor, Tensor, list[Tensor]]) -> bytes:
    from torch._inductor.utils import fresh_cache  # a second to import, so only now

    with tempfile.TemporaryDirectory() as scratch, fresh_cache(dir=scratch):
        path = Path(scratch) / "step.pt2"
        whole = torch.export.export(step, args, strict=False)
        torch._inductor.aoti_compile_and_package(whole, package_path=str(path), inductor_configs=_HOW)
        return path.read_bytes()


def _for_rows(model: Transformer, rows: int) -> Transformer:
    """The model as it is compiled for this many rows, with the same weights. For one row its products are loops over
    the weights, which take a CPU no longer than reading them."""
    plain = any(type(layer) is nn.Linear for layer in model.modules())
    if rows > 1 or not plain or model.head.image.weight.device.type != "cpu":
        return model
    return convert(copy.deepcopy(model, {id(p): p for p in model.parameters()}), DotLinear)


class _Step(nn.Module):
    """A step as a function of all that changes."""

    def __init__(self, model: Transformer, layers: Sequence[LayerCache]) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, token: Tensor, position: Tensor, memory: Sequence[Tensor]) -> Tensor:
        left = iter(memory)
        layers = [layer.at(left) for layer in self.layers]
        return self.model.step(Cache(layers, position.clone()), token)


def _name(model: Transformer, memory: Sequence[Tensor]) -> str:
    """A hash of what the machine code was made from: this program, torch, the processor, weights and shapes."""
    found = hashlib.sha256()
    package = Path(__file__).parent.parent
    for file in sorted((*package.glob("layers/*.py"), *package.glob("models/*.py"), Path(__file__))):
        found.update(file.read_bytes())
    device = memory[0].device
    if device.type == "cuda":
        machine: object = torch.cuda.get_device_properties(device)
    else:
        machine = torch.get_num_threads(), _processor()
    found.update(repr((__version__, torch.__version__, machine, model.config)).encode())
    for key, value in (*model.state_dict().items(), *((str(i), x) for i, x in enumerate(memory))):
        found.update(repr((key, value.shape, value.dtype)).encode())
    for value in model.state_dict().values():
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _processor() -> str:
    """The processor's features as the system lists them; code for another processor may not run."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _folder() -> Path:
    """Where compiled steps are kept. Raises `UserError` if it is not the user's alone."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    path = (base if base.is_absolute() else Path.home() / ".cache") / "limner" / "steps"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be made to keep compiled steps in: {error.strerror}; name another folder in "
            "XDG_CACHE_HOME, or draw without compiling"
        ) from None
    status = path.lstat()
    others = stat.S_IMODE(status.st_mode) & 0o022
    if hasattr(os, "getuid") and (stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or others):
        raise UserError(
            f"{path} holds machine code that drawing runs, and others may write to it: delete it, or name another "
            "folder in XDG_CACHE_HOME"
        )
    return path
