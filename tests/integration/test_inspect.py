"""`limner inspect` on a run that was trained a moment ago."""

import re

import pytest

from limner.cli import main
from limner.runs.train import train_all
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from tiny import STEPS, tiny_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_scenes(folder / "data", SceneDataSettings(count=12, size=24, held_out=0.2))
    train_all(tiny_recipe(), folder / "data", folder / "run", ("dvae", "prior"))
    return folder


def test_spikes_of_a_run_are_listed_and_drawn(trained, tmp_path, capsys):
    assert main(["inspect", "spikes", str(trained / "run" / "prior"), "-o", str(tmp_path / "spikes.html")]) == 0
    out = capsys.readouterr().out
    assert re.match(rf"{STEPS} steps, \d+ spikes? of the loss", out)
    assert "<svg" in (tmp_path / "spikes.html").read_text()
    assert main(["inspect", "spikes", str(trained / "run")]) == 0
    assert re.findall(r"^(.+): \d+ steps", capsys.readouterr().out, re.MULTILINE) == ["dVAE", "prior"]


def test_underflow_lists_every_resblock(trained, capsys):
    options = ["inspect", "underflow", str(trained / "run"), str(trained / "data")]
    assert main(options) == 0
    plain = capsys.readouterr().out
    for block in ("blocks.0.attention", "blocks.1.mlp"):
        assert f"{block}, activations" in plain and f"{block}, parameters" in plain
    assert "embed.image, parameters" in plain

    def lost(text):
        row = next(line for line in text.splitlines() if line.startswith("blocks.0.mlp, activations"))
        return float(row.split()[-1].rstrip("%"))  # in e4m3

    assert main([*options, "--scale", "8192"]) == 0
    scaled = capsys.readouterr().out
    assert lost(plain) > 20 and lost(scaled) < lost(plain) / 4


def test_underflow_draws_histograms(trained, tmp_path, capsys):
    page = tmp_path / "exponents.html"
    assert main(["inspect", "underflow", str(trained / "run"), str(trained / "data"), "-o", str(page)]) == 0
    drawn = page.read_text()
    assert drawn.count("<svg") == int(capsys.readouterr().out.split()[0])  # one for each part
    assert "blocks.1.mlp" in drawn


def test_a_folder_without_a_run_is_reported_in_a_sentence(trained, tmp_path, capsys):
    for argv, says in (
        (["underflow", str(tmp_path), str(trained / "data")], "lacks recipe.json"),
        (["underflow", str(trained / "run"), str(trained / "data"), "--stage", "contrastive"], "train the stage"),
        (["spikes", str(tmp_path)], "name a run"),
    ):
        assert main(["inspect", *argv]) == 2
        err = capsys.readouterr().err
        assert says in err and "Traceback" not in err
