"""Planted near-duplicates are found, and different pictures are not; a flat picture is like no other."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from limner.cli.data import main
from limner.data.open_source import open_source
from limner.errors import UserError
from limner.evaluation.fidelity import FidelitySettings, fidelity_task
from limner.evaluation.overlap import closest, read_seen, thumbnails
from limner.experiments.fidelity import CHANGES
from limner.tasks import rendering, scenes


def crowded(i: int) -> np.ndarray:
    rng = np.random.default_rng([i, 9])
    picture = rendering.render(scenes.sample_dense_scene(rng), 48) + rng.normal(0, 4, (48, 48, 3))
    return picture.clip(0, 255).astype(np.uint8)


def to_thumbnails(pictures: list[np.ndarray]) -> torch.Tensor:
    return thumbnails(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2))


REFERENCES = [crowded(i) for i in range(200)]


@pytest.mark.parametrize("change", [*CHANGES, "cropped and compressed", "mirrored and turned"])
def test_planted_duplicates_are_closer_than_any_other_picture(change):
    planted = []
    for picture in REFERENCES[:12]:
        image = Image.fromarray(picture)
        for name in change.split(" and "):
            image = CHANGES[name](image)
        planted.append(np.asarray(image))
    found = closest(to_thumbnails(planted), to_thumbnails(REFERENCES), proposals=8)
    assert (found.reference == torch.arange(12)).float().mean() >= 11 / 12
    assert (found.similarity > 0.85).float().mean() >= 11 / 12


def test_different_pictures_are_not_alike_and_equal_ones_are():
    others = closest(to_thumbnails([crowded(i) for i in range(1_000, 1_030)]), to_thumbnails(REFERENCES), proposals=8)
    assert (others.similarity < 0.85).float().mean() >= 0.95
    same = closest(to_thumbnails(REFERENCES[:5]), to_thumbnails(REFERENCES))
    torch.testing.assert_close(same.similarity, torch.ones(5), atol=1e-4, rtol=0)


def test_a_flat_picture_is_like_no_other():
    flat = [np.full((48, 48, 3), level, np.uint8) for level in (0, 128)]
    found = closest(to_thumbnails(flat + REFERENCES[:1]), to_thumbnails([*flat, *REFERENCES[:3]]))
    assert (found.similarity[:2] <= 0).all() and found.similarity[2] > 0.99


def test_color_counts_and_brightness_does_not():
    red = np.zeros((48, 48, 3), np.uint8)
    red[12:36, 12:36, 0] = 200
    found = closest(to_thumbnails([red]), to_thumbnails([np.roll(red, 1, -1)]))
    brighter = closest(to_thumbnails([red]), to_thumbnails([np.clip(red * 1.2 + 20, 0, 255).astype(np.uint8)]))
    assert found.similarity[0] < 0.8 and brighter.similarity[0] > 0.99


def test_the_command_lists_planted_duplicates_and_shows_them(tmp_path, capsys):
    for folder, pictures in (("training", REFERENCES[:40]), ("test", [crowded(i) for i in range(500, 510)])):
        (tmp_path / folder).mkdir()
        for i, picture in enumerate(pictures):
            Image.fromarray(picture).save(tmp_path / folder / f"{i:02}.png")
            (tmp_path / folder / f"{i:02}.txt").write_text(f"{folder} <{i}>")
    planted = CHANGES["mirrored"](Image.fromarray(REFERENCES[7]))
    planted.save(tmp_path / "test" / "05.png")
    (tmp_path / "test" / "03.png").write_bytes(b"broken")
    page, results = tmp_path / "overlap.html", tmp_path / "overlap.json"
    where = [str(tmp_path / "test"), "--training", str(tmp_path / "training")]
    main(["overlap", *where, "--page", str(page), "-o", str(results)])
    assert "11.1%" in capsys.readouterr().out  # one of nine that can be read
    first, *others = json.loads(results.read_text())["results"][0]["cases"]
    assert (first["picture"], first["training"]) == (5, 7) and first["similarity"] > 0.95
    assert len(others) == 8 and all(case["similarity"] < 0.85 for case in others)
    text = page.read_text()
    assert text.index("training &lt;7&gt;") < text.index("below the threshold") and "<7>" not in text


def test_fidelity_leaves_out_what_training_has_seen(tmp_path):
    for name in ("test", "training"):
        (tmp_path / name).mkdir()
        for i in range(6):
            picture = REFERENCES[i] if name == "training" or i < 2 else crowded(600 + i)
            Image.fromarray(picture).save(tmp_path / name / f"{i}.png")
            (tmp_path / name / f"{i}.txt").write_text(f"caption {i}")
    where = [str(tmp_path / "test"), "--training", str(tmp_path / "training")]
    results = tmp_path / "overlap.json"
    main(["overlap", *where, "-o", str(results)])
    source = open_source(tmp_path / "test")
    task = fidelity_task(source, FidelitySettings(captions=2), results)
    names = {task.source.captions(i)[0] for i in range(len(task.source))}
    assert names == {f"caption {i}" for i in range(2, 6)} and task.split == "all without 2 seen"
    with pytest.raises(UserError, match="belongs to data of 6 samples, not 3"):
        read_seen(results, 3)
    for bad in ("{}", "[]", '{"results": [{"settings": {}}]}'):
        results.write_text(bad)
        with pytest.raises(UserError, match="does not hold an overlap"):
            read_seen(results, 6)


def test_sources_without_readable_pictures_are_one_sentence(tmp_path):
    (tmp_path / "a.png").write_bytes(b"broken")
    (tmp_path / "a.txt").write_text("caption")
    with pytest.raises(UserError, match="evaluation data lacks a readable picture"):
        main(["overlap", str(tmp_path), "--training", str(tmp_path)])
