"""CLIP in the form of Radford et al. 2021 against torch's own transformer layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limner.models.contrastive import CLIP, CLIPConfig
from limner.models.transformer import Block

CONFIG = CLIPConfig(
    text_vocab=30, text_len=6, size=16, patch=4, width=16, depth=2, heads=2, embedding=8, text_tower=(12, 3, 3)
)


def torch_layer(block: Block) -> nn.TransformerEncoderLayer:
    attention, up, down = block.attention.branch, block.mlp.branch.up, block.mlp.branch.down
    width = attention.out.out_features
    layer = nn.TransformerEncoderLayer(
        width, attention.heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
    )
    weights = {
        "self_attn.in_proj_": attention.qkv, "self_attn.out_proj.": attention.out, "linear1.": up, "linear2.": down,
        "norm1.": block.attention.norm, "norm2.": block.mlp.norm,
    }  # fmt: skip
    layer.load_state_dict(
        {f"{prefix}{name}": value for prefix, part in weights.items() for name, value in part.state_dict().items()}
    )
    return layer


def image_tower(clip: CLIP, pixels: Tensor) -> Tensor:
    """Class token, positions, `ln_pre`, blocks, `ln_post` of the class token, projection: CLIP's VisionTransformer."""
    class_position, positions = clip.image_position[0], clip.image_position[1:]
    patches = F.conv2d(pixels / 127.5 - 1, clip.patches.weight, clip.patches.bias, stride=4).flatten(2).mT
    class_token = torch.zeros(len(pixels), 1, 16) + class_position  # the sum of CLIP's class token and its position
    x = clip.ln_pre(torch.cat([class_token, patches + positions], 1))
    for block in clip.image_blocks:
        x = torch_layer(block)(x)
    return F.normalize(F.layer_norm(x[:, 0], (16,)) @ clip.image_out.weight.mT, dim=-1)


def text_tower(clip: CLIP, text: Tensor) -> Tensor:
    """Causal blocks, `ln_final` of the last token, projection."""
    x = clip.text.weight[text.clamp_min(0)] + clip.text_position.weight
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    for block in clip.text_blocks:
        x = torch_layer(block)(x, src_mask=mask, is_causal=True)
    last = torch.stack([row[(tokens >= 0).sum() - 1] for row, tokens in zip(x, text, strict=True)])
    return F.normalize(F.layer_norm(last, (12,)) @ clip.text_out.weight.mT, dim=-1)


def test_both_towers_equal_the_reference():
    torch.manual_seed(0)
    clip = CONFIG.build()
    with torch.no_grad():
        for parameter in (p for name, p in clip.named_parameters() if "_norm." not in name):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
        text = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, -1, -1, -1, -1], [9, 10, 11, 12, -1, -1]])
        torch.testing.assert_close(clip.encode_image(pixels), image_tower(clip, pixels.float()), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(clip.encode_text(text), text_tower(clip, text), atol=1e-5, rtol=1e-4)
