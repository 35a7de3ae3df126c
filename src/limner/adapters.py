"""LoRA adapters of the prior: low-rank updates of its linear layers (Hu et al. 2021, §4.1).

    y = W x + b + (alpha / r) B A x          A [r, in], B [out, r]

W and b are frozen; A and B train. B is zero at first, so that training begins with the model itself. An update of rank
r has r (in + out) numbers instead of in * out. Drawing is not slower: `merge` adds (alpha / r) B A to W once.

An adapter is a folder in the format of PEFT, read and written without it:

    adapter_model.safetensors   "base_model.model.LAYER.lora_A.weight" and "base_model.model.LAYER.lora_B.weight"
    adapter_config.json         "r", "lora_alpha", "target_modules"; "base_model_name_or_path" names the bundle, and
                                "revision" is the SHA-256 of its prior.safetensors
    examples.npy.xz             the pictures that it learned, if the bundle has training pictures (`retrieval.py`)

Adapters are untrusted: names, shapes and number formats are checked against the model before a tensor is read.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from limner.atomic_io import atomic_folder, atomic_write_bytes, file_hash, require_file
from limner.blocks import block_lists
from limner.errors import UserError
from limner.json_files import read_mapping, write_json
from limner.quantization.convert import convert
from limner.retrieval import Examples

__all__ = ["LoRALinear", "add_adapter", "merge", "save"]

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 1 << 10
_MAX_TENSORS = 1 << 14
_PREFIX = "base_model.model."  # of the names in PEFT's wrapper
_FACTOR_NAME = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")
_FLOAT_FORMATS = ("F32", "F16", "BF16")
#: Settings of PEFT that change the update, with the values under which it is the one above.
_PLAIN_SETTINGS: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"), (None, False)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "modules_to_save"), (None, {}, [])),
}


class LoRALinear(nn.Linear):
    """A linear layer with a trained update of rank `rank`; it shares its own parameters with `layer`."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias, self.alpha = layer.weight, layer.bias, alpha
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False, device=layer.weight.device)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False, device=layer.weight.device)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        return super().forward(x) + (self.alpha / self.lora_A.out_features) * self.lora_B(self.lora_A(x))


def add_adapter(model: nn.Module, rank: int, alpha: float) -> None:
    """Freeze the model, and give each linear layer of its lists of blocks an update that trains."""
    model.requires_grad_(False)
    for blocks in block_lists(model).values():
        convert(blocks, lambda layer: LoRALinear(layer, rank, alpha))


def save(model: nn.Module, folder: Path, base: str, weights: Path, examples: Examples | None = None) -> None:
    """Write the updates of the model's `LoRALinear` layers atomically, in half precision. Replace an existing adapter.

    `base` names the bundle that the model was read from, and `weights` is its file. `examples` are pictures that the
    model learned to follow. Raises `UserError` if the folder has other content or an update is not finite.
    """
    if folder.exists() and not (folder / CONFIG_FILE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an adapter: name a new folder")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    tensors = {
        _PREFIX + name: factor.detach().cpu().half().contiguous()
        for name, factor in model.state_dict().items()
        if name.endswith(("lora_A.weight", "lora_B.weight"))
    }
    if not_finite := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"training has diverged, {not_finite[0]!r} is not finite: lower the learning rate")
    layer = next(iter(layers.values()))
    config = {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": base, "revision": file_hash(weights),
        "r": layer.lora_A.out_features, "lora_alpha": layer.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}), "inference_mode": True,
    }  # fmt: skip
    with atomic_folder(folder) as fresh:
        atomic_write_bytes(fresh / WEIGHTS_FILE, serialize(tensors, {"format": "pt"}))
        write_json(fresh / CONFIG_FILE, config, indent=2)
        if examples:
            examples.save(fresh)


@torch.no_grad()
def merge(model: nn.Module, folder: str | Path, weights: Path) -> None:
    """Add the updates of the adapter in `folder` to the weights of its layers, in place.

    `weights` is the file that the model was read from. Raises `UserError` if the adapter is missing, damaged, of
    another kind, or belongs to another model.
    """
    folder = Path(folder)
    config = _read_config(folder, weights)
    path, scale = folder / WEIGHTS_FILE, config["lora_alpha"] / config["r"]
    require_file(path)
    try:
        with safe_open(path, "pt") as file:
            for name, layer in _layers(file, path, model, config["r"]).items():
                a, b = (file.get_tensor(f"{_PREFIX}{name}.lora_{kind}.weight").float() for kind in "AB")
                update = scale * (b @ a)
                if not update.isfinite().all():
                    raise UserError(f"{path}: the update of {name!r} is not finite")
                layer.weight += update.to(layer.weight)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the adapter is incomplete") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _read_config(folder: Path, weights: Path) -> dict[str, Any]:
    """Return the checked settings of an adapter for the model in the file `weights`."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not an adapter: it lacks {CONFIG_FILE}")
    config = read_mapping(path)
    for name, plain in _PLAIN_SETTINGS.items():
        if config.get(name) not in plain:
            raise UserError(f"{path}: {name} must be {plain[0]!r} or absent, not {str(config.get(name))[:40]!r}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise UserError(f"{path}: r must be a whole number from 1 to {MAX_RANK}, not {str(rank)[:40]!r}")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(f"{path}: lora_alpha must be a number, not {str(alpha)[:40]!r}")
    if config.get("revision") not in (None, file_hash(weights)):
        base = str(config.get("base_model_name_or_path"))[:80]
        raise UserError(
            f"the adapter in {folder} belongs to another model than {weights.parent}: it was trained on {base}"
        )
    return config


def _layers(file: Any, path: Path, model: nn.Module, rank: int) -> dict[str, nn.Linear]:
    """Return the layers that the file has factors of, by name, after a check of all names, shapes and formats."""
    keys = file.keys()
    if not 1 <= len(keys) <= _MAX_TENSORS:
        raise UserError(f"{path} has {len(keys)} tensors: an adapter has from 1 to {_MAX_TENSORS}")
    linears = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    names = {}
    for key in keys:
        match = _FACTOR_NAME.fullmatch(key)
        if not match or match[1] not in linears:
            raise UserError(f"{path} has an unknown tensor {key[:120]!r}: it belongs to another kind of model")
        layer = names[match[1]] = linears[match[1]]
        shape = (rank, layer.in_features) if match[2] == "A" else (layer.out_features, rank)
        tensor = file.get_slice(key)
        if (stored := tuple(tensor.get_shape())) != shape:
            raise UserError(f"{path}: {key!r} has shape {stored}, the model and rank {rank} require {shape}")
        if tensor.get_dtype() not in _FLOAT_FORMATS:
            raise UserError(
                f"{path}: {key!r} is stored as {tensor.get_dtype()}: use one of {', '.join(_FLOAT_FORMATS)}"
            )
    if len(keys) != 2 * len(names):
        raise UserError(f"{path} lacks one of the two factors of a layer: the adapter is incomplete")
    return names
