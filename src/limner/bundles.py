"""Reading and writing of bundles: folders with a complete text-to-image model.

A bundle has `config.json`, `dvae.safetensors`, `prior.safetensors`, `contrastive.safetensors`, `tokenizer.json` and
`README.md`, a model card; some have `examples.npy.xz` (`retrieval.py`). A folder for a dVAE alone has `config.json` and
`dvae.safetensors`; one for a published CLIP model also has its `tokenizer.json`. Bundles are untrusted: reading runs
and unpickles nothing, and checks each size and key against the configuration before it allocates memory.

The prior and the contrastive model are stored in half precision, or their matrices in 8 bits: `NAME` has integers, and
`NAME.scale` a factor per row. A dVAE is stored without loss, in 16 bits where possible: the prior is trained on its
tokens, and changed weights give other tokens. So training rounds a dVAE (`rounded`) before the prior is trained.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from limner.atomic_io import atomic_folder, atomic_write_bytes, atomic_write_text, require_file
from limner.config import from_dict, to_dict
from limner.errors import UserError
from limner.json_files import parse_json, read_mapping, to_json, write_json
from limner.model_card import model_card
from limner.models.contrastive import CLIPConfig
from limner.models.patch_dvae import AnyDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.optim.dtensor import shard_like
from limner.pretrained import FORMAT, find_bundle, is_bundle, resolve_name
from limner.quantization.quantize import quantize
from limner.retrieval import Examples
from limner.text.bpe import Tokenizer
from limner.text.clip_bpe import CLIPTokenizer

__all__ = [
    "check_fit", "check_replaceable", "find_model", "load_model", "read", "read_info", "rounded", "save_model", "write",
]  # fmt: skip

M = TypeVar("M", bound=nn.Module)

#: Formats of folders with one model.
FORMATS = {"dvae": "limner-dvae-1", "contrastive": "limner-clip-1"}

_PARTS: dict[str, Any] = {"dvae": AnyDVAEConfig, "prior": TransformerConfig, "contrastive": CLIPConfig}
_MAX_POSITIONS = 1 << 12  # in a caption or a picture: masks grow with the square
_MAX_WIDTH = 1 << 14
_MAX_TENSORS = 1 << 14  # in one model
_FLOAT_FORMATS = ("F32", "F16", "BF16")
SCALE_SUFFIX = ".scale"
FILES = ("config.json", *(f"{name}.safetensors" for name in _PARTS), "tokenizer.json", "README.md")  # of all bundles


# ---------------------------------------------------------------------------- writing


def write(
    folder: Path, models: Mapping[str, Any], tokenizer: Tokenizer, info: Mapping[str, Any], dtype: torch.dtype,
    examples: Examples | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write a bundle atomically, replacing an existing one. Return the info as written.

    `dtype` is the format of the prior and the contrastive model; int8 applies to their matrices, and other tensors are
    in half precision. Raises `UserError` if the folder has other content or a weight is not finite.
    """
    check_replaceable(folder, FORMAT, "a bundle")
    name = folder.resolve().parent.name if folder.name == "bundle" else folder.name
    info = _to_json_values({"name": name, "created": datetime.now(UTC).date().isoformat(), **info})
    with atomic_folder(folder) as fresh:
        _write_weights(fresh, models, dtype)
        tokenizer.save(fresh / "tokenizer.json")
        if examples:
            examples.save(fresh)
            info["examples"] = len(examples)
        _write_config(fresh, FORMAT, models, info)
        atomic_write_text(fresh / "README.md", model_card(models, tokenizer, info))
    return info


def save_model(
    folder: str | Path, part: str, model: Any, info: Mapping[str, Any], tokenizer: CLIPTokenizer | None = None
) -> Path:
    """Write a folder with one model, "dvae" or "contrastive", without rounding its weights. Raises `UserError`."""
    folder = Path(folder)
    check_replaceable(folder, FORMATS[part], "a folder of such a model")
    with atomic_folder(folder) as fresh:
        _write_weights(fresh, {part: model})
        if tokenizer:
            tokenizer.save(fresh / "tokenizer.json")
        _write_config(fresh, FORMATS[part], {part: model}, _to_json_values(info))
    return folder


def _to_json_values(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the info as JSON values. Replace surrogates (non-UTF-8 bytes of names or options) by question marks."""
    return parse_json(to_json(info, ensure_ascii=False).encode("utf-8", "replace"))


def check_replaceable(folder: Path, kind: str, name: str) -> None:
    """Raise `UserError` if `folder` exists, is not empty and does not have the format `kind`."""
    if folder.exists() and not is_bundle(folder, kind) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not {name}: name a new folder")


def _write_weights(folder: Path, models: Mapping[str, Any], dtype: torch.dtype | None = None) -> None:
    """Write the tensors of models. Without a `dtype`, tensors that half precision would round keep their format."""
    small = torch.float16 if dtype in (torch.int8, None) else dtype
    for name, model in models.items():
        state = model.state_dict()
        convert = _to_dtype_if_lossless if name == "dvae" or dtype is None else _to_dtype
        if not_finite := [key for key, value in state.items() if not value.isfinite().all()]:
            raise UserError(f"the {name} has diverged, its {not_finite[0]!r} is not finite: train it again")
        tensors = {key: convert(value, small) for key, value in state.items()}
        if dtype == torch.int8 and name != "dvae":
            for key in (key for key, value in state.items() if value.dim() == 2):
                tensors[key], tensors[key + SCALE_SUFFIX] = quantize(state[key].detach().cpu(), by_row=True)
        # `save_file` of safetensors creates a file that only its owner can read.
        atomic_write_bytes(folder / f"{name}.safetensors", save(tensors))


def _write_config(folder: Path, kind: str, models: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    configs = {name: to_dict(model.config, _PARTS[name]) for name, model in models.items()}
    write_json(folder / "config.json", {"format": kind, **configs, "info": dict(info)}, indent=2, ensure_ascii=False)


def _to_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to `dtype`, unless a value would overflow."""
    value = value.detach().cpu().contiguous()
    small = value.to(dtype)
    return small if small.isfinite().all() else value


def _to_dtype_if_lossless(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to `dtype` if this is lossless."""
    value = value.detach().cpu().contiguous()
    small = value.to(dtype)
    return small if torch.equal(small.to(value.dtype), value) else value


def rounded(model: M) -> M:
    """Round the parameters in place to the values that a bundle stores, so that later stages train with the weights
    used for drawing. Return the model."""
    model.load_state_dict({key: _to_dtype(value, torch.float16) for key, value in model.state_dict().items()})
    return model


# ---------------------------------------------------------------------------- reading


def read(folder: Path) -> tuple[dict[str, Any], Tokenizer, dict[str, Any]]:
    """Return the models by name, the tokenizer and the info of a bundle.

    Raises `UserError` if a part is missing, damaged or inconsistent.
    """
    data = read_mapping(path := folder / "config.json")
    info = _check_info(data, path)
    models = {name: _load_part(folder, name, kind, data) for name, kind in _PARTS.items()}
    return models, Tokenizer.load(folder / "tokenizer.json"), info


def load_model(name_or_folder: str | Path, part: str) -> Any:
    """Return one model of a bundle or of a folder with this model: "dvae", "prior" or "contrastive".

    Raises `UserError` if it is unusable.
    """
    folder = find_model(name_or_folder, part)
    return _load_part(folder, part, _PARTS[part], read_mapping(folder / "config.json"))


def read_info(name_or_folder: str | Path) -> dict[str, Any]:
    """Return the info of a bundle (by name or folder) or of a folder with one model. Raises `UserError`."""
    path = find_model(name_or_folder) / "config.json"
    return _check_info(read_mapping(path), path)


def find_model(name_or_folder: str | Path, *parts: str) -> Path:
    """Return the folder with one of the models `parts`, by default any, or the bundle. Raises `UserError`."""
    folder = Path(name_or_folder)
    alone = any(is_bundle(folder, kind) for part, kind in FORMATS.items() if part in (parts or FORMATS))
    return folder if alone else find_bundle(resolve_name(name_or_folder))


def _check_info(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    info = data.get("info", {})
    if not isinstance(info, dict):
        raise UserError(f"{path}: info must be a JSON object")
    try:
        to_json(info, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate: JSON can escape it, UTF-8 cannot encode it
        raise UserError(f"{path}: info contains text that is not valid Unicode") from None
    return info


def _load_part(folder: Path, name: str, kind: Any, data: Mapping[str, Any]) -> nn.Module:
    """Build one model and load its weights, after a check of all names, shapes and number formats."""
    where = folder / "config.json"
    if name not in data:
        raise UserError(f"{where} lacks the settings of {name!r}")
    try:
        config = from_dict(kind, data[name], name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    path = folder / f"{name}.safetensors"
    require_file(path)
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            if len(names) > _MAX_TENSORS:
                raise UserError(f"{path} has {len(names)} tensors: the maximum is {_MAX_TENSORS}")
            slices = {key: file.get_slice(key) for key in names}
            _check_size(config, len(slices), f"{where}: {name}")
            shapes = _shapes(config, f"{where}: {name}")
            matrices = {key for key, shape in shapes.items() if len(shape) == 2 and name != "dvae"}
            int8 = {key for key in matrices & slices.keys() if slices[key].get_dtype() == "I8"}
            expected = shapes | {key + SCALE_SUFFIX: shapes[key][:1] for key in int8}
            for key in (*(expected.keys() - slices.keys()), *(slices.keys() - expected.keys())):
                verb = "lacks" if key in expected else "has an unknown tensor"
                raise UserError(
                    f"{path} {verb} {key[:80]!r}: the file belongs to another configuration or version of limner"
                )
            for key, shape in expected.items():
                if (stored_shape := tuple(slices[key].get_shape())) != shape:
                    raise UserError(f"{path}: {key!r} has shape {stored_shape}, its configuration requires {shape}")
                if (stored := slices[key].get_dtype()) not in _FLOAT_FORMATS and key not in int8:
                    formats = ", ".join((*_FLOAT_FORMATS, "I8") if key in matrices else _FLOAT_FORMATS)
                    raise UserError(f"{path}: {key!r} is stored as {stored}: a bundle stores one of {formats}")
            with torch.random.fork_rng(devices=[]), _NoInitialValues():
                model = config.build()

            def value(key: str) -> Tensor:
                tensor = file.get_tensor(key).float()
                return tensor * file.get_tensor(key + SCALE_SUFFIX).float()[:, None] if key in int8 else tensor

            state = model.state_dict()
            for key in shapes:  # one tensor at a time: each process may keep only a small shard
                if not (tensor := value(key)).isfinite().all():
                    raise UserError(f"{path}: {key!r} has values that are not finite")
                state[key].copy_(shard_like(tensor, state[key]))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the bundle is incomplete") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return model.eval().requires_grad_(False)


def _check_size(config: Any, tensors: int, where: str) -> None:
    """Raise `UserError` for sizes that would make building slow. The number of `tensors` in the file bounds the
    number of layers."""
    if config.depth > tensors:
        raise UserError(f"{where} has {config.depth} layers, but its file has only {tensors} tensors")
    positions = math.prod(config.grid)
    longest = max(positions, getattr(config, "text_len", 0))
    if positions < 1 or longest > _MAX_POSITIONS:
        raise UserError(f"{where} has {longest} positions: a bundle must have from 1 to {_MAX_POSITIONS}")
    if config.width > _MAX_WIDTH:
        raise UserError(f"{where}.width must be at most {_MAX_WIDTH}, not {config.width}")


def _shapes(config: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the model's parameters and buffers, from a model on the meta device.

    Initialization is skipped here too, since on the meta device it imports modules of torch for a second. Raises
    `UserError` if `config` is inconsistent.
    """
    try:
        with torch.device("meta"), _NoInitialValues():
            model = config.build()
    except (ValueError, RuntimeError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"{where} is inconsistent: {error}".splitlines()[0]) from None
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


class _NoInitialValues(TorchFunctionMode):
    """Skip random initialization of weights that are then loaded from a file."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def check_fit(dvae: AnyDVAEConfig, prior: TransformerConfig, contrastive: CLIPConfig, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if the models of a bundle were not trained together."""
    pairs = (
        ("grid of the prior", tuple(prior.grid), "grid of the dVAE", tuple(dvae.grid)),
        ("image vocabulary of the prior", prior.image_vocab, "codebook of the dVAE", dvae.vocab),
        ("picture of the contrastive model", contrastive.size, "picture of the dVAE", dvae.size),
        ("text vocabulary of the prior", prior.text_vocab, "tokenizer", tokenizer.vocab_size),
        ("text vocabulary of the contrastive model", contrastive.text_vocab, "tokenizer", tokenizer.vocab_size),
    )
    for left, a, right, b in pairs:
        if a != b:
            raise UserError(f"the models do not match: the {left} has size {a}, the {right} {b}")
