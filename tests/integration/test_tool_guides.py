"""The commands and programs of the guides on detectors, profiles and finetuning, word by word, each page in one folder.

Smaller sizes are appended to commands that would take minutes.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from limner.models.detector import DetectorConfig
from pages import ROOT, add_programs, shell, steps
from toy_icons import write_toy_icons

pytestmark = pytest.mark.slow

GUIDES = ("detect", "profile", "finetune")
STEPS = [(guide, kind, text) for guide in GUIDES for kind, text in steps(f"docs/guides/{guide}.md")]
_STAGES = " ".join(f"--{stage}.training.steps 14 --{stage}.training.batch-size 4" for stage in ("prior", "contrastive"))
_DVAE = "--dvae.model.vocab 64 --dvae.training.steps 14 --dvae.training.batch-size 4"
APPENDED = {  # to a command that begins so
    "limner detector": "--training.steps 2 --training.batch-size 2",
    "limner evaluate detector": "--count 8 --captions 2",
    "limner train": f"{_DVAE} {_STAGES}",
    "torchrun": _DVAE,
    "limner finetune": "--steps 10 --score-every 5",
    "limner draw": "--candidates 2",
}
WAITS_FOREVER = ("python -m http.server",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each page, with what its commands take from the reader."""
    folders = {guide: tmp_path_factory.mktemp(guide) for guide in GUIDES}
    for folder in folders.values():
        add_programs(folder)
    for name in ("photos", "photos-test"):
        _coco_folder(folders["detect"] / name)
    write_toy_icons(folders["detect"] / "data/icons")
    Image.new("RGB", (144, 144), "gray").save(folders["detect"] / "drawing.png")
    detector = DetectorConfig(layout="ssdlite320", classes=90).build()
    save_file(detector.state_dict(), folders["detect"] / "ssdlite.safetensors")
    (folders["finetune"] / "acme").mkdir()
    for i, name in enumerate(("arrow-left", "heart", "user")):
        body = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path d="M4 {4 + i}h16v9H4z"/></svg>'
        (folders["finetune"] / f"acme/{name}.svg").write_text(body)
    shutil.copytree(ROOT / "bench", folders["finetune"] / "bench", ignore=shutil.ignore_patterns("results", "gpu"))
    return folders


def _coco_folder(folder: Path) -> None:
    """Write eight pictures of one square each, and their boxes."""
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for i in range(8):
        pixels = np.full((48, 64, 3), 80, np.uint8)
        pixels[8 + i : 32 + i, 10:34] = 255
        Image.fromarray(pixels).save(folder / f"images/{i}.png")
        images.append({"id": i, "file_name": f"{i}.png", "width": 64, "height": 48})
        annotations.append({"image_id": i, "category_id": 1, "bbox": [10, 8 + i, 24, 24]})
    data = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "square"}]}
    (folder / "annotations.json").write_text(json.dumps(data))


@pytest.mark.parametrize(("guide", "kind", "text"), STEPS, ids=[f"{guide}: {text[:50]}" for guide, _, text in STEPS])
def test_a_step_does_what_the_page_says(guide: str, kind: str, text: str, folders: dict[str, Path]) -> None:
    folder = folders[guide]
    if text.startswith(WAITS_FOREVER):
        pytest.skip("serves until it is interrupted")
    if kind == "python":
        (folder / "program.py").write_text(text)
        text = "python program.py"
    if "rank0.pt.trace.json" in text:  # traces of another program
        for i, name in enumerate(("rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz")):
            shutil.copy(folder / f"runs/two/dvae/profile/rank{i}.json.gz", folder / name)
        shell("gunzip -k rank0.pt.trace.json.gz", folder)
    more = next((more for begin, more in APPENDED.items() if text.startswith(begin)), "")
    done = shell(f"{text} {more}", folder)
    assert done.stdout or done.stderr or kind == "python"


def test_each_page_has_commands_and_programs() -> None:
    assert {(guide, kind) for guide, kind, _ in STEPS} == {
        (guide, kind) for guide in GUIDES for kind in ("sh", "python")
    }
