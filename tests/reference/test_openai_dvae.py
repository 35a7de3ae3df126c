"""Our dVAE with OpenAI's parameters against their package, where it is installed (`pip install --no-deps DALL-E`)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from limner.bundles import load_model
from limner.errors import UserError
from limner.models.dvae import DVAEConfig
from limner.models.openai import from_openai


def small():
    torch.manual_seed(0)
    return DVAEConfig(size=32, width=16, groups=4, blocks=2, vocab=64, code_width=8).build()


def test_outputs_equal_those_of_the_published_package():
    dall_e = pytest.importorskip("dall_e")
    torch.manual_seed(0)
    theirs = [
        dall_e.encoder.Encoder(n_hid=64, vocab_size=512),
        dall_e.decoder.Decoder(n_init=8, n_hid=64, vocab_size=512),
    ]
    ours = from_openai(theirs[0].state_dict(), theirs[1].state_dict(), 32)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mapped = dall_e.map_pixels(pixels.float() / 255)
    with torch.no_grad():
        logits = theirs[0].float()(mapped)
        torch.testing.assert_close(ours.encode(pixels), logits, atol=1e-5, rtol=1e-4)
        z = torch.nn.functional.one_hot(logits.argmax(1), 512).movedim(-1, 1).float()
        torch.testing.assert_close(torch.cat(ours.decode(z), 1), theirs[1].float()(z), atol=1e-5, rtol=1e-4)


def run(*arguments, cwd):
    command = [sys.executable, "-m", "limner", "import", "openai-dvae", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_files_of_either_kind_are_imported_and_bad_ones_refused(tmp_path: Path):
    model = small()
    torch.save(model.encoder.state_dict(), tmp_path / "encoder.pt")
    save_file({k: v.contiguous() for k, v in model.decoder.state_dict().items()}, tmp_path / "decoder.safetensors")
    done = run("encoder.pt", "decoder.safetensors", "out", "--size", 64, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "64 codes, 8x" in done.stdout
    pixels = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    found = load_model(tmp_path / "out", "dvae")
    assert found.config.grid == (8, 8)
    torch.testing.assert_close(found.encode(pixels), model.encode(pixels), atol=2e-2, rtol=2e-2)  # stored in 16 bits
    torch.save(model.encoder, tmp_path / "pickled.pt")  # a whole module, as the original release has it
    for encoder in ("pickled.pt", "decoder.safetensors", "none.pt"):
        failed = run(encoder, "decoder.safetensors", "other", cwd=tmp_path)
        assert failed.returncode == 2 and failed.stderr.count("\n") == 1, failed.stderr
        assert not (tmp_path / "other").exists()


def test_halves_that_do_not_fit_are_refused():
    encoder, decoder = small().encoder.state_dict(), small().decoder.state_dict()
    with pytest.raises(UserError, match="decoder"):
        from_openai(encoder, {**decoder, "extra": torch.ones(1)}, 32)
    with pytest.raises(UserError, match="multiple of 8"):
        from_openai(encoder, decoder, 30)
    with pytest.raises(UserError, match="names differ"):
        from_openai({}, decoder, 32)
