"""The models that come with the package draw, and what each draws fits its own caption best."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from limner import catalogue, load
from limner.cli.draw import main

CAPTIONS = {
    "scenes": ["a large red circle on a white background", "a small blue square on a black background"],
    "icons": ["a tiger, flat", "a hamburger, line drawing", "a grinning face, 3d", "a red heart, simple"],
}


@pytest.mark.parametrize("name", catalogue.bundled())
@torch.inference_mode()
def test_a_drawing_fits_its_own_caption_best(name: str) -> None:
    pipe, captions = load(name), CAPTIONS[name]
    drawn = [pipe(caption, candidates=8, seed=1_000)[0] for caption in captions]
    pictures = torch.stack([torch.as_tensor(np.array(drawing.image)).movedim(-1, 0) for drawing in drawn])
    texts = pipe.contrastive.encode_text(pipe.tokenizer.encode(captions, pipe.contrastive.config.text_len))
    likeness = pipe.contrastive.encode_image(pictures) @ texts.T
    assert likeness.argmax(1).tolist() == list(range(len(captions)))


@pytest.mark.parametrize("name", catalogue.bundled())
def test_drawing_does_not_import_the_compiler(name: str) -> None:
    """It takes a second, and one operation on the meta device is enough for torch to import it."""
    code = f"import sys, limner; limner.load({name!r})('a cat', candidates=2); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_drawings_of_what_a_model_knows_by_heart_are_said_to_be_alike(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["a tiger, line drawing", "--model", "icons", "--candidates", "4", "-n", "3"])
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == len(list(tmp_path.iterdir())) == 3
    assert "only 1 of 4 candidates differ" in said.err
