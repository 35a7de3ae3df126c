"""Converted CLIP models against torch's own layers with the same random weights, and files of other models."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from limner.errors import UserError
from limner.models.published_clip import from_published, read
from limner.text import PAD
from published_clip import PUBLISHED, hugging_face, random_clip


def largest_difference(published, converted, pictures=2):
    """Largest difference of the two models' embeddings of random pictures and texts, all of unit length."""
    size, vocab = converted.config.size, converted.config.text_vocab
    pixels = torch.randint(0, 256, (pictures, 3, size, size), dtype=torch.uint8)
    text = torch.zeros(3, 77, dtype=torch.long)
    for row, length in zip(text, (5, 77, 2), strict=True):
        row[:length] = torch.randint(0, vocab - 1, (length,))
        row[length - 1] = vocab - 1
    padded = text.clone()
    padded[0, 5:], padded[2, 2:] = PAD, PAD
    with torch.inference_mode():
        image = converted.encode_image(pixels) - published.encode_image(pixels)
        return max(image.abs().max(), (converted.encode_text(padded) - published.encode_text(text)).abs().max())


@pytest.mark.parametrize("quick", [True, False])
def test_small_models_equal_the_reference_under_all_names(quick):
    published = random_clip(quick=quick)
    state = published.state_dict()
    custom_text = {name if name.startswith(("visual.", "logit")) else f"text.{name}": v for name, v in state.items()}
    for names in (state, custom_text, hugging_face(state)):
        before = {name: value.clone() for name, value in names.items()}
        converted = from_published(names, quick)
        assert largest_difference(published, converted) < 1e-6
        assert converted.scale() == published.logit_scale.exp()
        assert all(torch.equal(value, before[name]) for name, value in names.items())
    assert largest_difference(published, from_published(state, not quick)) > 1e-3
    c = converted.config
    assert (c.size, c.patch, c.tower, c.text_tower) == (32, 8, (128, 2, 2), (64, 3, 1))
    assert (c.embedding, c.text_vocab, c.text_len, c.quick_gelu) == (48, 600, 77, quick)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_equal_the_reference(name):
    published = random_clip(PUBLISHED[name])
    converted = from_published(published.state_dict(), quick_gelu=True)
    assert largest_difference(published, converted) < 1e-6
    assert sum(p.numel() for p in published.parameters()) == {
        "ViT-B/32": 151_277_313, "ViT-B/16": 149_620_737, "ViT-L/14": 427_616_513,
    }[name]  # fmt: skip


def test_half_precision_and_buffers_of_published_files():
    state = {name: value.half() for name, value in random_clip().state_dict().items()}
    extra = {"input_resolution": torch.tensor(32), "context_length": torch.tensor(77), "vocab_size": torch.tensor(600)}
    published = random_clip()
    published.load_state_dict({name: value.float() for name, value in state.items()})
    assert largest_difference(published, from_published(state | extra, True)) < 1e-6
    ids = {"text_model.embeddings.position_ids": torch.arange(77)[None]}
    assert largest_difference(published, from_published(hugging_face(state) | ids, True)) < 1e-6


def changed(**changes):
    state = random_clip().state_dict()
    for name, value in changes.items():
        name = name.replace("__", ".")
        state[name] = value
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"transformer__resblocks__1__mlp__c_fc__bias": None}, "lack 'transformer.resblocks.1.mlp.c_fc.bias'"),
        ({"visual__class_embedding": None}, "lack 'visual.class_embedding' with 1 dimensions"),
        ({"visual__proj": torch.zeros(3)}, "lack 'visual.proj' with 2 dimensions"),
        ({"bn__weight": torch.zeros(3)}, "the unknown tensor 'bn.weight'"),
        ({"visual__ln_pre__bias": torch.zeros(3)}, r"'visual.ln_pre.bias' has the shape \(3,\).*require \(128,\)"),
        ({"ln_final__bias": torch.full((64,), torch.nan)}, "'ln_final.bias' is not fp32 or 16-bit, or has values that"),
        ({"ln_final__bias": torch.zeros(64, dtype=torch.int8)}, "'ln_final.bias' is not fp32 or 16-bit"),
        ({"positional_embedding": torch.zeros(5_000, 64)}, "more than 4096 positions"),
        ({"visual__positional_embedding": torch.zeros(9, 128)}, "visual.positional_embedding' has the shape|patch"),
        ({"visual__positional_embedding": torch.zeros(1, 128)}, "not the weights of a published CLIP model: size must"),
    ],
)
def test_a_wrong_tensor_is_named_in_a_sentence(changes, says):
    with pytest.raises(UserError, match=says):
        from_published(changed(**changes), True)


def test_a_missing_tensor_of_hugging_face_has_its_published_name():
    state = hugging_face(random_clip().state_dict())
    del state["text_model.encoder.layers.2.self_attn.k_proj.weight"]
    with pytest.raises(UserError, match=r"lack 'text_model.encoder.layers.2.self_attn.k_proj.weight'"):
        from_published(state, True)


def test_only_safetensors_are_read(tmp_path):
    torch.save(random_clip().state_dict(), tmp_path / "ViT-B-32.pt")
    with pytest.raises(UserError, match=r"is not a .safetensors file.*safetensors.torch.save_file"):
        read(tmp_path / "ViT-B-32.pt")
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "ViT-B-32.pt").read_bytes())
    (tmp_path / "b.safetensors").write_bytes(b"")
    for name in "abc":
        with pytest.raises(UserError, match=f"{name}.safetensors cannot be read"):
            read(tmp_path / f"{name}.safetensors")
    model = nn.Linear(2, 2)
    save_file(model.state_dict(), tmp_path / "linear.safetensors")
    with pytest.raises(UserError, match=r"lack 'visual.conv1.weight'"):
        from_published(read(tmp_path / "linear.safetensors"), True)
