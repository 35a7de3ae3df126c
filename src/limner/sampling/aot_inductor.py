"""Decoding steps compiled ahead of time by AOTInductor, cached on disk for later processes.

Compiling takes half a minute or more; loading a compiled step takes almost no time. The file holds machine code and
the weights in the layout of its products, so its name is a hash of code, weights, shapes and machine. Loading it runs
code: the cache folder must be writable by its user only. Damaged files are compiled again.
"""

import copy
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from limner import compat
from limner.atomic_io import atomic_write_bytes, atomic_write_text, file_hash
from limner.attention.cache import KVCache, LayerKVCache
from limner.errors import UserError
from limner.models.transformer import Transformer
from limner.quantization.convert import convert
from limner.quantization.inference_linear import DotLinear
from limner.sampling.decoder import TokenDecoder
from limner.version import __version__

CompiledStep = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]

# Freezing makes weights constants. The low threshold computes a broadcast value once, not for each element.
_INDUCTOR_CONFIG = {"freezing": True, "realize_opcount_threshold": 1}
_MAX_CACHED_STEPS = 16  # the least recently used file is deleted first


def load_or_compile(
    model: Transformer, layers: Sequence[LayerKVCache], tokens: Tensor, position: Tensor
) -> CompiledStep:
    """Compile a step for caches shaped like `layers`, or load it from the folder.

    The step maps tokens [M, W], position [1] or [M, 1] and the memory of the caches, which it updates, to logits
    [M, W, V]. Later changes of the model's weights have no effect on it. On a CPU, compiling needs a C++ compiler.
    """
    memory = KVCache(layers).buffers
    path = cache_folder() / f"{cache_key(model, memory, tokens)}.pt2"
    digest = path.with_suffix(".sha256")
    if not (path.is_file() and digest.is_file() and digest.read_bytes() == file_hash(path).encode()):
        code = compile_step(_Step(_model_for_rows(model, tokens.numel()), layers), (tokens, position, memory))
        atomic_write_bytes(path, code)
        atomic_write_text(digest, hashlib.sha256(code).hexdigest())
    os.utime(path)
    for old in sorted(path.parent.glob("*.pt2"), key=lambda file: file.stat().st_mtime)[:-_MAX_CACHED_STEPS]:
        old.unlink(missing_ok=True)
        old.with_suffix(".sha256").unlink(missing_ok=True)
    package = compat.aoti_load_package(str(path), run_single_threaded=True)  # for CUDA graphs
    run = package.loader.run  # faster than calling the package, which parses its arguments
    return lambda tokens, position, memory: run([tokens, position, *memory])[0]


def compile_step(step: nn.Module, args: tuple[Tensor, Tensor, list[Tensor]]) -> bytes:
    """Compile a step for arguments of these shapes. Return the content of a package file."""
    with tempfile.TemporaryDirectory() as scratch, compat.fresh_inductor_cache(dir=scratch):
        path = Path(scratch) / "step.pt2"
        program = torch.export.export(step, args, strict=False)
        compat.aoti_compile_and_package(program, package_path=str(path), inductor_configs=_INDUCTOR_CONFIG)
        return path.read_bytes()


def _model_for_rows(model: Transformer, rows: int) -> Transformer:
    """Variant of the model to compile for this number of rows, sharing its weights. For one row on a CPU, products are
    loops over the weights, bound by memory bandwidth."""
    has_linear = any(type(layer) is nn.Linear for layer in model.modules())
    if rows > 1 or not has_linear or model.head.image.weight.device.type != "cpu":
        return model
    return convert(copy.deepcopy(model, {id(p): p for p in model.parameters()}), DotLinear)


class _Step(nn.Module):
    """A step as a function of tokens, position and cache memory."""

    def __init__(self, model: Transformer, layers: Sequence[LayerKVCache]) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, tokens: Tensor, position: Tensor, memory: Sequence[Tensor]) -> Tensor:
        buffers = iter(memory)
        layers = [layer.bind(buffers) for layer in self.layers]
        return TokenDecoder(self.model).step(KVCache(layers, position), tokens)


def cache_key(model: Transformer, memory: Sequence[Tensor], tokens: Tensor) -> str:
    """Hash of everything that determines the machine code: limner, torch, processor, weights and shapes."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    files = [file for name in ("attention", "quantization", "models") for file in package.glob(f"{name}/*.py")]
    for file in sorted([*files, Path(__file__), Path(__file__).with_name("decoder.py")]):
        digest.update(file.read_bytes())
    device = memory[0].device
    if device.type == "cuda":
        machine: object = torch.cuda.get_device_properties(device)
    else:
        machine = torch.get_num_threads(), processor_features()
    digest.update(repr((__version__, torch.__version__, machine, model.config, tokens.shape)).encode())
    for key, value in (*model.state_dict().items(), *((str(i), x) for i, x in enumerate(memory))):
        digest.update(repr((key, value.shape, value.dtype)).encode())
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def processor_features() -> str:
    """Processor model and features, since code compiled for one processor may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def cache_folder() -> Path:
    """Folder of compiled steps. Raises `UserError` if other users can write to it."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    path = (base if base.is_absolute() else Path.home() / ".cache") / "limner" / "steps"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{path}, the cache of compiled steps, cannot be created: {error.strerror}; set XDG_CACHE_HOME to another "
            "folder, or draw without compiling"
        ) from None
    status = path.lstat()
    shared = stat.S_ISLNK(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o022
    if hasattr(os, "getuid") and (shared or status.st_uid != os.getuid()):
        raise UserError(
            f"other users may write to {path}, from which limner runs machine code: delete it, or set "
            "XDG_CACHE_HOME to another folder"
        )
    return path
