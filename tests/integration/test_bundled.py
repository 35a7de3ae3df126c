"""The models that come with the package draw, and what each draws fits its own caption best."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from limner import load, pretrained
from limner.cli import edit
from limner.cli.draw import main
from limner.tasks import rendering, scene_reader
from limner.tasks.scenes import BACKGROUNDS, COLORS, EXTENT, FILLS, SHAPES, UNITS, Scene, SceneObject

CAPTIONS = {
    "scenes": ["a large red circle on a white background", "a small blue square on a black background"],
    "icons": ["a tiger, flat", "a hamburger, line drawing", "a grinning face, 3d", "a red heart, simple"],
    "glyphs": ["rocket, phosphor thin", "heart, solar bold", "house, tabler outline", "key, material symbols rounded"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", pretrained.list_pretrained())
@torch.inference_mode()
def test_a_drawing_fits_its_own_caption_best(name: str) -> None:
    pipe, captions = load(name), CAPTIONS[name]
    drawn = [pipe(caption, candidates=8, seed=1_000)[0] for caption in captions]
    pictures = torch.stack([torch.as_tensor(np.array(drawing.image)).movedim(-1, 0) for drawing in drawn])
    texts = pipe.contrastive.encode_text(pipe.tokenizer.encode(captions, pipe.contrastive.config.text_len))
    likeness = pipe.contrastive.encode_image(pictures) @ texts.T
    assert likeness.argmax(1).tolist() == list(range(len(captions)))


@pytest.mark.parametrize("name", pretrained.list_pretrained())
def test_drawing_does_not_import_the_compiler(name: str) -> None:
    """The import takes a second, and one operation on the meta device makes torch do it."""
    code = f"import sys, limner; limner.load({name!r})('a cat', candidates=2); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_candidates_that_are_all_equal_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["a tiger, line drawing", "--model", "icons", "--candidates", "4", "-n", "3", "--top-k", "1"])
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == len(list(tmp_path.iterdir())) == 3
    assert "only 1 of 4 candidates differ" in output.err


@pytest.mark.slow
@torch.inference_mode()
def test_an_outline_of_a_circle_is_filled(tmp_path):
    pytest.importorskip("resvg_py")
    circle = '<circle cx="12" cy="12" r="9" fill="none" stroke="currentColor" stroke-width="2"/>'
    (tmp_path / "icon.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24">{circle}</svg>')
    edit.main(
        ["--like", str(tmp_path / "icon.svg"), "the same, filled", "--model", "glyphs", "-o", str(tmp_path / "a.png")]
    )
    ink = 255 - np.asarray(Image.open(tmp_path / "a.png").convert("L").resize((24, 24)), int)
    assert ink[9:15, 9:15].mean() > 200 and ink[:2].mean() < 20  # the middle of an outline is white


@pytest.mark.parametrize(
    ("caption", "hint"),
    [
        ("an ambulance, lucide", None),
        ("a ambulanc, lucide", ": did you mean 'ambulance'?"),
        ("platypus, lucide", "from its words alone\n"),
    ],
)
def test_a_subject_without_training_pictures_is_named(caption, hint, tmp_path, capsys):
    main([caption, "--model", "glyphs", "--candidates", "1", "-o", str(tmp_path / "a.png")])
    output, message = capsys.readouterr()
    assert ("follows the training picture 'ambulance, " in output) == (hint is None)
    assert ("follows" in Image.open(tmp_path / "a.png").text) == (hint is None)
    assert ("no training picture shows a subject of the caption" in message) == bool(hint)
    assert (hint or "") in message


def test_the_dvae_of_scenes_keeps_small_shapes() -> None:
    """At most one in a hundred is read as another shape, and then the drawing is about as near to that shape."""
    dvae, backgrounds = load("scenes").dvae, list(BACKGROUNDS)
    changed = 0
    for seed in range(100, 110):
        rng = np.random.default_rng(seed)
        scenes = []
        for shape, color, fill in ((s, c, f) for s in SHAPES for c in COLORS for f in FILLS):
            x, y = map(int, rng.integers(0, UNITS - EXTENT["small"] + 1, 2))
            thing = SceneObject(shape=shape, color=color, size="small", fill=fill, x=x, y=y)
            scenes.append(Scene(objects=(thing,), background=backgrounds[rng.integers(len(backgrounds))]))
        pictures = torch.from_numpy(np.stack([rendering.render(scene) for scene in scenes])).permute(0, 3, 1, 2)
        drawn = dvae.decode_tokens(dvae.tokenize(pictures)).permute(0, 2, 3, 1).numpy()
        for scene, picture in zip(scenes, drawn, strict=True):
            (original,), read = scene.objects, scene_reader.read(picture).objects
            if len(read) != 1 or read[0].attributes == original.attributes:
                continue
            changed += 1
            seen = replace(read[0], x=original.x, y=original.y)
            far, near = (
                np.square(rendering.render(replace(scene, objects=(thing,))) - picture.astype(float)).mean()
                for thing in (original, seen)
            )
            assert near < 1.2 * far, (scene, seen)
    assert changed <= 0.01 * 1_200
