"""A bundle pruned of unused codes generates the same pictures."""

import numpy as np
import torch

from limner.cli import main
from limner.data.datasets import ImageCaptionDataset
from limner.data.open_source import open_source
from limner.pipeline import load
from limner.runs.prune_codebook import prune, used_codes
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from tiny import tiny_pipe


def test_pictures_and_likelihoods_of_used_codes_stay(tmp_path, capsys):
    write_scenes(tmp_path / "data", SceneDataSettings(count=70, size=24, pairs=0.0))
    pipe, source = tiny_pipe(), open_source(str(tmp_path / "data"))
    used = used_codes(pipe.dvae, source)
    assert 1 < len(used) < pipe.dvae.config.vocab
    small = prune(pipe, used)
    pixels = ImageCaptionDataset(source, 24).load(np.arange(70))[1]
    tokens, fewer = pipe.dvae.tokenize(pixels), small.dvae.tokenize(pixels)
    assert torch.equal(used[fewer], tokens)
    assert torch.equal(small.dvae.decode_tokens(fewer), pipe.dvae.decode_tokens(tokens))
    text = torch.randint(0, 99, (70, 30))
    for got, want in zip(small.prior(text, fewer), pipe.prior(text, tokens), strict=True):
        torch.testing.assert_close(got, want if got.shape == want.shape else want[..., used])

    pipe.save_pretrained(tmp_path / "whole")
    assert main(["bundle", str(tmp_path / "whole"), str(tmp_path / "less"), "--prune", str(tmp_path / "data")]) == 0
    assert f"{len(used)} of 32 codes" in capsys.readouterr().out
    assert load(tmp_path / "less").dvae.config.vocab == len(used)


def test_data_without_a_readable_picture_raises(tmp_path, capsys):
    tiny_pipe().save_pretrained(tmp_path / "whole")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_text("no picture")
    (tmp_path / "data" / "a.txt").write_text("a caption")
    assert main(["bundle", str(tmp_path / "whole"), str(tmp_path / "less"), "--prune", str(tmp_path / "data")]) == 2
    assert "no picture of the data is readable" in capsys.readouterr().err
    assert not (tmp_path / "less").exists()
