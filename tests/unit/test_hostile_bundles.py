"""Bundles with a few numbers, values or bytes changed: each is read, or refused in one sentence.

Seeded; what fails says the number of its case.
"""

import json
import random
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from limner.errors import UserError
from limner.pipeline import load
from tiny import tiny_pipe

VALUES = (
    0, -1, 1, 3, 255, 4_000, 2**14, 2**24, 2**63, 10**400, 0.5, 1e308, float("nan"), float("inf"), True, None,
    "", "\ud800", "x" * 5_000, [], {}, [1, 2], [4_096, 1], {"type": "x"},
)  # fmt: skip


@pytest.fixture(scope="module", params=[torch.float16, torch.int8], ids=["16 bits", "8 bits"])
def whole(tmp_path_factory, request):
    return tiny_pipe().save_pretrained(tmp_path_factory.mktemp("bundles") / "tiny", request.param)


def places(tree, path=()):
    """Paths to all values of a JSON document, few of each list or vocabulary."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items)[:12]:
        yield (*path, key)
        yield from places(value, (*path, key))


def other_values(rng, raw):
    document = json.loads(raw)
    *parents, last = rng.choice(list(places(document)))
    inner = document
    for key in parents:
        inner = inner[key]
    if rng.random() < 0.2:
        del inner[last]
    else:
        inner[last] = rng.choice(VALUES)
    return json.dumps(document).encode()


def other_bytes(rng, raw):
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 2, 20))):
        at = rng.randrange(min(len(changed), rng.choice((9, 4_000, len(raw)))) or 1)
        if rng.random() < 0.7:
            changed[at : at + 1] = [rng.randrange(256)]
        elif rng.random() < 0.5:
            changed[at : at + 8] = rng.choice((0, 2**32, 2**63 - 1, 2**64 - 1)).to_bytes(8, "little")
        else:
            del changed[at : at + rng.choice((1, 8, 1_000))]
    return bytes(changed)


def other_header(rng, raw):
    """Change shape, format, offset or name of a tensor in a safetensors file."""
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    name = rng.choice(list(header))
    change = rng.randrange(4)
    if change == 0:
        header[name]["shape"] = rng.choice(([], [0], [2**62, 4], [2**31, 2**31], [-1], None))
    elif change == 1:
        header[name]["dtype"] = rng.choice(("F64", "I64", "BOOL", "I8", "F8_E4M3", "C64", "X"))
    elif change == 2:
        header[name]["data_offsets"] = rng.choice(([0, 0], [0, 2**62], [-1, 4], [4, 0]))
    else:
        header[rng.choice(("x", "\n" * 50, "a" * 9_999))] = header.pop(name)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + raw[8 + size :]


@pytest.mark.parametrize("seed", range(3))
def test_a_changed_bundle_is_read_or_refused_in_one_sentence(whole, tmp_path, seed):
    rng, bundle = random.Random(seed), shutil.copytree(whole, tmp_path / "bundle")
    parts = [f"{part}.safetensors" for part in ("dvae", "prior", "contrastive")]
    for case in range(25):
        name, change = rng.choice((
            ("config.json", other_values), ("config.json", other_values), ("config.json", other_bytes),
            ("tokenizer.json", other_values), (rng.choice(parts), other_bytes), (rng.choice(parts), other_header),
        ))  # fmt: skip
        changed = change(rng, (whole / name).read_bytes())
        (bundle / name).write_bytes(changed)
        begun, output = time.process_time(), ""
        try:
            load(bundle).save_pretrained(tmp_path / "again")
        except UserError as refusal:
            output = str(refusal)
        except Exception as error:
            raise AssertionError(f"case {case}: {name} with {change.__name__}") from error
        assert "\n" not in output and len(output) < 700, (case, name, output[:300])
        assert time.process_time() - begun < 10, (case, name)  # processor time, independent of other processes
        shutil.copy(whole / name, bundle / name)


def test_parameters_are_counted_before_memory_is_taken(whole, tmp_path):
    """A model of 2 TB whose file cannot fill it raises an error about its shapes, not about memory."""
    bundle = shutil.copytree(whole, tmp_path / "bundle")
    config = json.loads((bundle / "config.json").read_text())
    config["prior"]["text_vocab"] = config["prior"]["image_vocab"] = 2**24
    config["prior"]["width"] = 2**14
    (bundle / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has shape"):
        load(bundle)


KEY = "blocks.0.attention.branch.qkv.weight"
SPOILED = {
    "a missing scale": (lambda t: t.pop(KEY + ".scale"), "lacks 'blocks.0.attention.branch.qkv.weight.scale'"),
    "a scale too many": (lambda t: t.update({"x.scale": torch.ones(3)}), "has an unknown tensor 'x.scale'"),
    "a scale of what has none": (
        lambda t: t.update({KEY: torch.ones(t[KEY].shape)}), "has an unknown tensor '" + KEY + ".scale'",
    ),
    "one scale for all rows": (lambda t: t.update({KEY + ".scale": torch.ones(1)}), r"has shape \(1,\)"),
    "a scale for each column": (lambda t: t.update({KEY + ".scale": torch.ones(32)}), r"has shape \(32,\)"),
    "a scale of other shape": (
        lambda t: t.update({KEY + ".scale": t[KEY + ".scale"][:, None].clone()}), r"has shape \(96, 1\)",
    ),
    "an infinite scale": (lambda t: t[KEY + ".scale"].fill_(float("inf")), "has values that are not finite"),
    "a scale that is no number": (lambda t: t[KEY + ".scale"].fill_(float("nan")), "has values that are not finite"),
    "a scale that overflows": (lambda t: t[KEY + ".scale"].fill_(3e38), "has values that are not finite"),
    "a scale of whole numbers": (
        lambda t: t.update({KEY + ".scale": t[KEY + ".scale"].int()}), "stored as I32: .* one of F32, F16, BF16$",
    ),
    "a vector in 8 bits": (
        lambda t: t.update({"embed.start": t["embed.start"].char()}), "stored as I8: .* one of F32, F16, BF16$",
    ),
    "a matrix in 64 bits": (
        lambda t: (t.update({KEY: t[KEY].double()}), t.pop(KEY + ".scale")), "stored as F64: .* BF16, I8$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_bad_scale_is_one_sentence(tmp_path, spoil):
    bundle = tiny_pipe().save_pretrained(tmp_path / "tiny", torch.int8)
    act, says = SPOILED[spoil]
    tensors = load_file(bundle / "prior.safetensors")
    act(tensors)
    save_file(tensors, bundle / "prior.safetensors")
    with pytest.raises(UserError, match=says) as caught:
        load(bundle)
    assert "\n" not in str(caught.value)


def test_a_dvae_is_never_in_8_bits(tmp_path):
    bundle = tiny_pipe().save_pretrained(tmp_path / "tiny", torch.int8)
    tensors = load_file(bundle / "dvae.safetensors")
    assert torch.int8 not in {value.dtype for value in tensors.values()}
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].char()}, bundle / "dvae.safetensors")
    with pytest.raises(UserError, match="stored as I8"):
        load(bundle)
