"""limner's dVAE with OpenAI's parameters, against modules of the published form, and hostile files.

Outputs are compared with the published package where it is installed: `pip install --no-deps DALL-E`, as .ci/run does.
These tests do not import the files of the package that need its requirements, such as torchvision.
"""

import importlib.util
import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from limner.bundles import load_model
from limner.cli import main
from limner.errors import UserError
from limner.models.dvae import DVAEConfig, map_pixels
from limner.models.openai_dvae import from_openai, read


def small():
    torch.manual_seed(0)
    return DVAEConfig(size=32, width=16, groups=4, blocks=2, vocab=64, code_width=8).build()


class Conv2d(nn.Module):
    def __init__(self, n_in, n_out, kw):
        self.n_in, self.n_out, self.kw, self.use_float16 = n_in, n_out, kw, True
        self.device, self.requires_grad = torch.device("cpu"), False
        super().__init__()
        self.w = nn.Parameter(torch.randn(n_out, n_in, kw, kw) / (n_in * kw**2) ** 0.5)
        self.b = nn.Parameter(torch.randn(n_out) / 10)

    def forward(self, x):
        return F.conv2d(x, self.w, self.b, padding=self.kw // 2)


class Block(nn.Module):
    def __init__(self, n_in, n_out, kernels):
        super().__init__()
        hidden = n_out // 4
        self.post_gain, sizes = 1 / 64, (n_in, hidden, hidden, hidden, n_out)
        self.id_path = Conv2d(n_in, n_out, 1) if n_in != n_out else nn.Identity()
        parts = OrderedDict()
        for i, kernel in enumerate(kernels):
            parts[f"relu_{i + 1}"] = nn.ReLU()
            parts[f"conv_{i + 1}"] = Conv2d(sizes[i], sizes[i + 1], kernel)
        self.res_path = nn.Sequential(parts)

    def forward(self, x):
        return self.id_path(x) + self.post_gain * self.res_path(x)


class EncoderBlock(Block):
    pass


class DecoderBlock(Block):
    pass


class Half(nn.Module):
    """4 groups of 2 blocks, as published, with a `between` layer after the first three."""

    def build(self, first, widths, block, kernels, between, last):
        parts = OrderedDict(input=first)
        for g in range(1, 5):
            blocks = [block(widths[g - 1] if b == 0 else widths[g], widths[g], kernels) for b in range(2)]
            group = OrderedDict((f"block_{b + 1}", part) for b, part in enumerate(blocks))
            if g < 4:
                group[between] = nn.MaxPool2d(2) if between == "pool" else nn.Upsample(scale_factor=2, mode="nearest")
            parts[f"group_{g}"] = nn.Sequential(group)
        parts["output"] = nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=last))
        self.blocks = nn.Sequential(parts)
        return self

    def forward(self, x):
        return self.blocks(x)


class Encoder(Half):
    pass


class Decoder(Half):
    pass


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Modules with the names of the published package, pickled by torch as `encoder.pkl` and `decoder.pkl`."""
    modules = {"encoder": [Encoder, EncoderBlock], "decoder": [Decoder, DecoderBlock], "utils": [Conv2d]}
    monkeypatch.setitem(sys.modules, "dall_e", types.ModuleType("dall_e"))
    for name, classes in modules.items():
        module = types.ModuleType(f"dall_e.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for kind in classes:
            monkeypatch.setattr(kind, "__module__", module.__name__)
            setattr(module, kind.__name__, kind)
    torch.manual_seed(1)
    encoder = Encoder().build(
        Conv2d(3, 16, 7), (16, 16, 32, 64, 128), EncoderBlock, (3, 3, 3, 1), "pool", Conv2d(128, 64, 1)
    )
    decoder = Decoder().build(
        Conv2d(64, 8, 1), (8, 128, 64, 32, 16), DecoderBlock, (1, 3, 3, 3), "upsample", Conv2d(16, 6, 1)
    )
    torch.save(encoder, tmp_path / "encoder.pkl")
    torch.save(decoder, tmp_path / "decoder.pkl")
    monkeypatch.chdir(tmp_path)
    return encoder, decoder


def convert(*arguments):
    return main(["convert", "openai-dvae", *map(str, arguments)])


def test_published_files_convert_exactly_without_their_package(published, tmp_path, monkeypatch, capsys):
    for name in ("dall_e", "dall_e.encoder", "dall_e.decoder", "dall_e.utils"):
        monkeypatch.setitem(sys.modules, name, None)  # makes importing it fail
    assert convert("encoder.pkl", "decoder.pkl", "out", "--size", 64) == 0
    assert "64 codes, 8x downsampling, width 16, without rounding" in capsys.readouterr().out
    ours, (encoder, decoder) = load_model(tmp_path / "out", "dvae"), published
    assert ours.config.grid == (8, 8)
    for half, theirs in ((ours.encoder, encoder), (ours.decoder, decoder)):
        expected = theirs.state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in half.state_dict().items())
    pixels = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        logits = encoder(map_pixels(pixels))
        torch.testing.assert_close(ours.encode(pixels), logits, atol=1e-5, rtol=1e-4)
        tokens = logits.argmax(1)
        assert torch.equal(ours.tokenize(pixels), tokens.flatten(1))
        z = F.one_hot(tokens, 64).movedim(-1, 1).float()
        torch.testing.assert_close(torch.cat(ours.decode(z), 1), decoder(z), atol=1e-5, rtol=1e-4)


def test_state_dicts_of_torch_and_safetensors_convert(published, tmp_path, capsys):
    encoder, decoder = published
    torch.save(encoder.half().state_dict(), "encoder.pt")
    save_file({k: v.contiguous() for k, v in decoder.state_dict().items()}, "decoder.safetensors")
    assert convert("encoder.pt", "decoder.safetensors", "out", "--size", 64) == 0
    stored = load_file(tmp_path / "out" / "dvae.safetensors")
    assert {v.dtype for k, v in stored.items() if k.startswith("encoder")} == {torch.float16}
    assert stored["decoder.blocks.input.w"].dtype == torch.float32
    assert torch.equal(stored["encoder.blocks.input.w"], encoder.state_dict()["blocks.input.w"])


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, call, *arguments):
        self.reduced = (call, arguments)

    def __reduce__(self):
        return self.reduced


def rewrite(change, compress=zipfile.ZIP_STORED):
    """Write bad.pkl, a copy of encoder.pkl with a changed pickle."""
    with zipfile.ZipFile("encoder.pkl") as old:
        entries = {entry.filename: old.read(entry) for entry in old.infolist()}
    with zipfile.ZipFile("bad.pkl", "w", compress) as new:
        for name, content in entries.items():
            new.writestr(name, change(content) if name.endswith("data.pkl") else content)


def cyclic(encoder):
    encoder.blocks._modules["again"] = encoder
    torch.save(encoder, "bad.pkl")


def many_paths(encoder):
    """Nest modules with 2^60 paths from the root to the last one."""
    part = nn.Sequential()
    for _ in range(60):
        part = nn.Sequential(part, part)
    encoder.blocks = part
    torch.save(encoder, "bad.pkl")


def deep(encoder):
    for i in range(100):
        encoder = nn.Sequential(OrderedDict({"x" * (i + 1): encoder}))
    torch.save(encoder, "bad.pkl")


def attribute(name, value):
    def spoil(encoder):
        encoder.blocks.input.__dict__[name] = value
        torch.save(encoder, "bad.pkl")

    return spoil


def state(key, value):
    def spoil(encoder):
        torch.save({**encoder.state_dict(), key: value}, "bad.pkl")

    return spoil


def wider(key, *shape):
    return state(key, torch.ones(1).expand(*shape))


HOSTILE = {
    "code": lambda e: torch.save(Calls(os.system, "touch ran"), "bad.pkl"),
    "code in a module": attribute("n_in", Calls(os.system, "touch ran")),
    "code in a state dict": state("x", Calls(os.system, "touch ran")),
    "a bare pickle": lambda e: Path("bad.pkl").write_bytes(pickle.dumps(Calls(os.system, "touch ran"))),
    "the legacy format": lambda e: torch.save(e.state_dict(), "bad.pkl", _use_new_zipfile_serialization=False),
    "memory": state("x", Calls(bytearray, 1 << 40)),
    "an importable name": lambda e: rewrite(lambda raw: raw.replace(b"torch\ndevice", b"torch.hub\nload")),
    "newer opcodes": lambda e: rewrite(lambda raw: raw[:2] + b"\x8c\x02os\x8c\x06system\x93" + raw[2:]),
    "a module in itself": cyclic,
    "modules in modules": many_paths,
    "a deep module": deep,
    "no modules": attribute("_modules", 7),
    "no parameters": attribute("_parameters", None),
    "numbers for names": attribute("_parameters", {1: torch.ones(1)}),
    "texts for tensors": attribute("_parameters", {"w": "text"}),
    "a list": lambda e: torch.save([1, 2], "bad.pkl"),
    "compressed": lambda e: rewrite(lambda raw: raw, zipfile.ZIP_DEFLATED),
    "cut": lambda e: Path("bad.pkl").write_bytes(Path("encoder.pkl").read_bytes()[:-999]),
    "empty": lambda e: Path("bad.pkl").touch(),
    "missing": lambda e: None,
    "a pipe": lambda e: os.mkfifo("bad.pkl"),
    "a device": lambda e: os.symlink("/dev/zero", "bad.pkl"),
    "a folder": lambda e: os.mkdir("bad.pkl"),
    "a larger tensor than the file": wider("blocks.input.w", 1 << 20, 3, 7, 7),
    "a wide model": wider("blocks.input.w", 8_000, 1, 1, 1),
    "a million groups": state("blocks.group_100000000000.block_1.x", torch.ones(1)),
    "many blocks": state("blocks.group_1.block_99.x", torch.ones(1)),
    "digits": state(f"blocks.group_1.block_{'9' * 5000}.x", torch.ones(1)),
    "a tensor for a scalar": state("blocks.input.w", torch.tensor(1.0)),
    "complex numbers": state("blocks.input.b", torch.ones(16, dtype=torch.complex64)),
    "64 bits": state("blocks.input.b", torch.ones(16, dtype=torch.float64)),
    "not a number": state("blocks.input.b", torch.full((16,), torch.nan)),
}


@pytest.mark.parametrize("spoil", HOSTILE)
def test_a_hostile_file_is_a_user_error_and_runs_nothing(published, spoil, capsys):
    HOSTILE[spoil](published[0])
    assert convert("bad.pkl", "decoder.pkl", "out", "--size", 64) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("limner: ") and len(error) < 400, error
    assert not Path("ran").exists() and not Path("out").exists()


def test_parts_of_another_model_are_rejected(published, capsys):
    torch.save(small().encoder, "ours.pkl")
    assert convert("ours.pkl", "decoder.pkl", "out") == 2
    assert "does not load its 'limner.models.dvae" in capsys.readouterr().err
    assert convert("encoder.pkl", "encoder.pkl", "out") == 2
    assert convert("encoder.pkl", "decoder.pkl", "out", "--size", 520) == 2
    assert "multiple of 8 up to 512" in capsys.readouterr().err


def test_mismatched_encoder_and_decoder_are_rejected():
    encoder, decoder = small().encoder.state_dict(), small().decoder.state_dict()
    with pytest.raises(UserError, match="decoder"):
        from_openai(encoder, {**decoder, "extra": torch.ones(1)}, 32)
    with pytest.raises(UserError, match="multiple of 8"):
        from_openai(encoder, decoder, 30)
    with pytest.raises(UserError, match="names differ"):
        from_openai({}, decoder, 32)


def test_weights_have_the_strides_of_a_newly_built_model(published):
    ours = from_openai(read(Path("encoder.pkl")), read(Path("decoder.pkl")), 64)
    built = ours.config.build().state_dict()
    assert all(value.stride() == built[key].stride() for key, value in ours.state_dict().items())


@pytest.fixture
def dall_e(monkeypatch):
    """The published package without its `__init__.py`, which imports `requests`."""
    spec = importlib.util.find_spec("dall_e")
    if spec is None:
        pytest.skip("needs pip install --no-deps DALL-E")
    package = types.ModuleType("dall_e")
    package.__path__ = spec.submodule_search_locations
    monkeypatch.setitem(sys.modules, "dall_e", package)
    for name in ("encoder", "decoder", "utils"):
        monkeypatch.delitem(sys.modules, f"dall_e.{name}", raising=False)
        setattr(package, name, importlib.import_module(f"dall_e.{name}"))
    yield package
    for name in ("encoder", "decoder", "utils"):
        del sys.modules[f"dall_e.{name}"]


def test_outputs_equal_those_of_the_published_package(dall_e):
    torch.manual_seed(0)
    theirs = [
        dall_e.encoder.Encoder(n_hid=64, vocab_size=512),
        dall_e.decoder.Decoder(n_init=8, n_hid=64, vocab_size=512),
    ]
    ours = from_openai(theirs[0].state_dict(), theirs[1].state_dict(), 32)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mapped = dall_e.utils.map_pixels(pixels.float() / 255)
    with torch.no_grad():
        logits = theirs[0].float()(mapped)
        torch.testing.assert_close(ours.encode(pixels), logits, atol=1e-5, rtol=1e-4)
        z = torch.nn.functional.one_hot(logits.argmax(1), 512).movedim(-1, 1).float()
        torch.testing.assert_close(torch.cat(ours.decode(z), 1), theirs[1].float()(z), atol=1e-5, rtol=1e-4)
