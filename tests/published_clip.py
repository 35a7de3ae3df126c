"""CLIP as published, of torch's own layers under OpenAI's names: a reference with random weights, and its files."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

MEAN, STD = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
#: Side of a picture and a patch, width and depth of the two towers, embedding, tokens.
SMALL = (32, 8, (128, 2), (64, 3), 48, 600)
PUBLISHED = {
    "ViT-B/32": (224, 32, (768, 12), (512, 12), 512, 49_408),
    "ViT-B/16": (224, 16, (768, 12), (512, 12), 512, 49_408),
    "ViT-L/14": (224, 14, (1_024, 24), (768, 12), 768, 49_408),
}
HUGGING_FACE = (
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"\.ln_(\d)\.", r".layer_norm\1."), (r"\.mlp\.c_fc\.", ".mlp.fc1."), (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."), (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.proj$", "visual_projection.weight"), (r"^text_projection$", "text_projection.weight"),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
)  # fmt: skip


class Layer(nn.Module):
    def __init__(self, width: int, quick: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, width // 64, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})
        self.quick = quick

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        hidden = self.mlp["c_fc"](self.ln_2(x))
        hidden = hidden / (1 + torch.exp(-1.702 * hidden)) if self.quick else F.gelu(hidden)
        return x + self.mlp["c_proj"](hidden)


class Tower(nn.Module):
    def __init__(self, width: int, depth: int, quick: bool) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Layer(width, quick) for _ in range(depth))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.resblocks:
            x = layer(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self, size: int, patch: int, width: int, depth: int, embedding: int, quick: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width) / 8)
        self.positional_embedding = nn.Parameter(torch.randn((size // patch) ** 2 + 1, width) / 8)
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = Tower(width, depth, quick)
        self.proj = nn.Parameter(torch.randn(width, embedding) / width**0.5)


class PublishedCLIP(nn.Module):
    """`encode_image` takes uint8 pictures of the model's size, `encode_text` tokens with zeros after the highest."""

    def __init__(self, size, patch, image_tower, text_tower, embedding, vocab, quick=True) -> None:
        super().__init__()
        width, depth = text_tower
        self.visual = Visual(size, patch, *image_tower, embedding, quick)
        self.transformer, self.token_embedding = Tower(width, depth, quick), nn.Embedding(vocab, width)
        self.positional_embedding = nn.Parameter(torch.randn(77, width) / 8)
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, embedding) / width**0.5)
        self.logit_scale = nn.Parameter(torch.tensor(4.6))
        with torch.no_grad():
            for norm in (module for module in self.modules() if isinstance(module, nn.LayerNorm)):
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.uniform_(-0.2, 0.2)
        self.requires_grad_(False).eval()

    def encode_image(self, pixels: Tensor) -> Tensor:
        visual = self.visual
        x = visual.conv1((pixels / 255 - MEAN[:, None, None]) / STD[:, None, None]).flatten(2).mT
        x = torch.cat([visual.class_embedding.expand(len(x), 1, -1), x], 1) + visual.positional_embedding
        x = visual.transformer(visual.ln_pre(x))
        return F.normalize(visual.ln_post(x[:, 0]) @ visual.proj, dim=-1)

    def encode_text(self, text: Tensor) -> Tensor:
        causal = torch.full((77, 77), -torch.inf).triu(1)
        x = self.ln_final(self.transformer(self.token_embedding(text) + self.positional_embedding, causal))
        return F.normalize(x[torch.arange(len(text)), text.argmax(1)] @ self.text_projection, dim=-1)


def random_clip(shape=SMALL, quick: bool = True) -> PublishedCLIP:
    torch.manual_seed(0)
    return PublishedCLIP(*shape, quick)


def hugging_face(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict under Hugging Face's names."""
    renamed = {}
    for name, value in state.items():
        for pattern, replacement in HUGGING_FACE:
            name = re.sub(pattern, replacement, name)
        if "attn.in_proj_" in name:
            for part, third in zip("qkv", value.chunk(3), strict=True):
                renamed[name.replace("attn.in_proj_", f"self_attn.{part}_proj.")] = third
        else:
            renamed[name] = value.mT if name.endswith("_projection.weight") else value
    return renamed


def write_merges(path: Path, merges: int = 86) -> Path:
    """A list of merges for a vocabulary of 514 tokens and one per merge: 600 by default, as `SMALL` has."""
    words = ["c a", "ca t</w>", "d o", "do g</w>", "p h", "ph o", "pho t", "phot o</w>", "o f</w>", "r e", "re d</w>"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    rest = [f"{a} {b}</w>" for a in letters for b in letters if f"{a} {b}</w>" != "o f</w>"]
    path.write_text("\n".join(["#version: 0.2", *[*words, *rest][:merges]]) + "\n")
    return path


def write_weights(path: Path, shape=SMALL) -> PublishedCLIP:
    """Write random weights under OpenAI's names. Return the model."""
    model = random_clip(shape)
    save_file(model.state_dict(), path)
    return model
