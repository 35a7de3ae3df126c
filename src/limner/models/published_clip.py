"""Conversion of published CLIP weights, the models with a vision transformer, from their tensors alone.

OpenAI's and open_clip's checkpoints name tensors one way, Hugging Face's another. The shapes of the tensors determine
the config, except for the heads, which have a width of 64 (80 in ViT-H/14), and the activation. What the published
models compute beyond limner's `CLIP` is folded into its parameters:

    pixels    (p / 255 - mean) / std, where limner has p / 127.5 - 1: into weight and bias of the patch embedding
    class     a class token and its position, where limner has their sum

The published text tower reads the token with the highest number, which is the last token of `CLIPTokenizer`.

Sources: Radford et al. 2021; https://github.com/openai/CLIP, https://github.com/mlfoundations/open_clip and
https://github.com/huggingface/transformers for names and constants.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from limner.atomic_io import require_file
from limner.errors import UserError
from limner.models.contrastive import CLIP, CLIPConfig

__all__ = ["from_published", "read"]

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of pixels in 0 .. 1
_MAX_POSITIONS = 1 << 12  # of a bundle's models, too: masks grow with the square
_WIDTH_OF_H = 1_280  # of the vision transformer ViT-H/14, whose heads have a width of 80
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Tensors of published files that are not parameters.
_IGNORED = re.compile(r"input_resolution|context_length|vocab_size|(.*\.)?position_ids|(.*\.)?attn_mask")
#: Parts of names, limner's and published, in the order of replacement.
_OPENAI = {
    "image_blocks.": "visual.transformer.resblocks.", "text_blocks.": "transformer.resblocks.",
    "attention.norm.": "ln_1.", "attention.branch.qkv.": "attn.in_proj_", "attention.branch.out.": "attn.out_proj.",
    "mlp.norm.": "ln_2.", "mlp.branch.up.": "mlp.c_fc.", "mlp.branch.down.": "mlp.c_proj.",
    "ln_pre.": "visual.ln_pre.", "image_norm.": "visual.ln_post.", "text_norm.": "ln_final.",
    "image_out.weight": "visual.proj", "text_out.weight": "text_projection", "patches.": "visual.conv1.",
    "image_position": "visual.positional_embedding", "text_position.weight": "positional_embedding",
    "text.weight": "token_embedding.weight", "log_scale": "logit_scale", "class_token": "visual.class_embedding",
}  # fmt: skip
_HUGGING_FACE = {
    "image_blocks.": "vision_model.encoder.layers.", "text_blocks.": "text_model.encoder.layers.",
    "attention.norm.": "layer_norm1.", "attention.branch.qkv.": "self_attn.{}_proj.",
    "attention.branch.out.": "self_attn.out_proj.",
    "mlp.norm.": "layer_norm2.", "mlp.branch.up.": "mlp.fc1.", "mlp.branch.down.": "mlp.fc2.",
    "ln_pre.": "vision_model.pre_layrnorm.", "image_norm.": "vision_model.post_layernorm.",
    "text_norm.": "text_model.final_layer_norm.",
    "image_out.": "visual_projection.", "text_out.": "text_projection.",
    "patches.": "vision_model.embeddings.patch_embedding.",
    "image_position": "vision_model.embeddings.position_embedding.weight",
    "text_position.": "text_model.embeddings.position_embedding.",
    "text.weight": "text_model.embeddings.token_embedding.weight", "log_scale": "logit_scale",
    "class_token": "vision_model.embeddings.class_embedding",
}  # fmt: skip


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file. Raises `UserError` for any other file, such as a pickle."""
    require_file(path)
    if path.suffix != ".safetensors":
        raise UserError(
            f"{path} is not a .safetensors file, and a .pt file can run code: where you trust it, write its state dict "
            "(torch.jit.load(FILE).state_dict() for OpenAI's) with safetensors.torch.save_file"
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def from_published(state: Mapping[str, Tensor], quick_gelu: bool) -> CLIP:
    """Build a `CLIP` in fp32 with the parameters of a published state dict.

    Args:
        quick_gelu: the activation, which tensors do not show: True for OpenAI's weights, False for most of open_clip's.

    Raises:
        UserError: a tensor is missing, unknown, of another shape, or not finite.
    """
    names = _HUGGING_FACE if any(key.startswith("vision_model.") for key in state) else _OPENAI
    tensors = {key.removeprefix("text."): value for key, value in state.items() if not _IGNORED.fullmatch(key)}
    config = _config(tensors, names, quick_gelu)
    try:
        with torch.device("meta"):  # no memory before the shapes are compared
            model = config.build()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"these are not the weights of a published CLIP model: {error}".splitlines()[0]) from None
    shapes = {key: value.shape for key, value in model.state_dict().items() if key != "patches.bias"}
    shapes["class_token"] = torch.Size([config.width])
    if names is _OPENAI:  # stored as [inputs, outputs]
        shapes |= {key: shapes[key][::-1] for key in ("image_out.weight", "text_out.weight")}
    converted = {key: _take(tensors, key, names, shape) for key, shape in shapes.items()}
    if tensors:
        raise UserError(f"the weights have the unknown tensor {min(tensors)[:80]!r}: they belong to another model")
    model.load_state_dict(_fold(converted, transpose=names is _OPENAI), assign=True)
    return model.eval()


def _published(key: str, names: Mapping[str, str]) -> str:
    """Return the published name of a parameter; "{}" stands for q, k and v."""
    for ours, theirs in names.items():
        if ours in key and (ours.startswith(("attention", "mlp")) or key.startswith(ours)):
            key = key.replace(ours, theirs, 1)
    return key


def _config(tensors: Mapping[str, Tensor], names: Mapping[str, str], quick_gelu: bool) -> CLIPConfig:
    def shape(key: str, dims: int) -> torch.Size:
        name = _published(key, names)
        if name not in tensors or tensors[name].dim() != dims:
            raise UserError(f"the weights lack {name!r} with {dims} dimensions: give a CLIP model with a ViT")
        return tensors[name].shape

    def depth(blocks: str) -> int:
        prefix = names[blocks]
        return len({key[len(prefix) :].partition(".")[0] for key in tensors if key.startswith(prefix)})

    (_, _, patch, _), (positions, _) = shape("patches.weight", 4), shape("image_position", 2)
    (text_vocab, text_width), (text_len, _) = shape("text.weight", 2), shape("text_position.weight", 2)
    (width,), projection = shape("class_token", 1), shape("image_out.weight", 2)
    if max(positions, text_len) > _MAX_POSITIONS:
        raise UserError(f"the weights have more than {_MAX_POSITIONS} positions: give a CLIP model with a ViT")
    try:
        return CLIPConfig(
            text_vocab=text_vocab, text_len=text_len, size=patch * math.isqrt(max(0, positions - 1)), patch=patch,
            width=width, depth=depth("image_blocks."), heads=max(1, width // (80 if width == _WIDTH_OF_H else 64)),
            embedding=projection[1 if names is _OPENAI else 0],
            text_tower=(text_width, depth("text_blocks."), max(1, text_width // 64)), quick_gelu=quick_gelu,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"these are not the weights of a published CLIP model: {error}") from None


def _take(tensors: dict[str, Tensor], key: str, names: Mapping[str, str], shape: torch.Size) -> Tensor:
    """Remove a parameter from `tensors` and return it, with queries, keys and values in one."""
    name = _published(key, names)
    parts = [name.format(part) for part in "qkv"] if "{}" in name else [name]
    expected = (shape[0] // len(parts), *shape[1:]) if shape else ()
    for part in parts:
        if part not in tensors:
            raise UserError(f"the weights lack {part!r}: the file is incomplete or belongs to another model")
        if (value := tensors[part]).shape != expected:
            raise UserError(f"{part!r} has the shape {tuple(value.shape)}, but the other tensors require {expected}")
        if value.dtype not in _DTYPES or not value.isfinite().all():
            raise UserError(f"{part!r} is not fp32 or 16-bit, or has values that are not finite: use another copy")
    return torch.cat([tensors.pop(part).float() for part in parts]) if shape else tensors.pop(name).float()


def _fold(parameters: dict[str, Tensor], transpose: bool) -> dict[str, Tensor]:
    """Convert parameters in place to what limner's model computes with; see the module's docstring."""
    weight, mean, std = parameters["patches.weight"].double(), *(torch.tensor(x).double() for x in (MEAN, STD))
    # (p / 255 - mean) / std = (y + 1 - 2 mean) / (2 std), where y = p / 127.5 - 1
    parameters["patches.weight"] = weight / (2 * std[:, None, None])
    parameters["patches.bias"] = torch.einsum("dcij,c->d", weight, (1 - 2 * mean) / (2 * std))
    parameters["image_position"][0] += parameters.pop("class_token")
    for key in ("image_out.weight", "text_out.weight") if transpose else ():
        parameters[key] = parameters[key].mT
    return {key: value.float().contiguous() for key, value in parameters.items()}
