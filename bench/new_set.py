"""Finetuning on some icons of a set that no training saw: are icons that it lacks drawn in its style?

    python bench/new_set.py data/glyphs unicons "teenyicons outline" --icons 50 100

DATA is the output of `limner data glyphs`. The styles are those of its four held-out sets. Random icons of a style, as
many as `--icons` says, are a folder of pictures and captions, as a user has them, on which `limner finetune glyphs
FOLDER` trains with the arguments after `--`. Then the bundle and the finetuned one draw other icons of the style, whose
subject the bundle's training pictures contain:

    right    of all real icons of the style, that of the caption is the nearest, as in `limner evaluate glyphs`
    style    a classifier of styles reads the asked one. It is trained on training icons, and on icons of the new
             styles that are not drawn. Its share of right answers on the real icons is the limit

Both also draw held-out combinations of styles that the bundle knows, which measures forgetting. The output has shares
with 95% intervals, and for each style a grid of drawings after finetuning, real icons, and drawings before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from limner.data.open_source import open_source
from limner.evaluation.confidence import TEST_SEEDS_FROM, proportion
from limner.evaluation.generate_batches import to_image
from limner.evaluation.glyphs import StyleRanks, style_data
from limner.evaluation.icon_classifier import IconClassifier, IconClassifierConfig, train_classifier
from limner.evaluation.icon_pictures import Icons
from limner.evaluation.nearest_neighbor import ReferenceSettings, draw_and_compare
from limner.evaluation.result import Verdicts
from limner.pipeline import TextToImage, load
from limner.progress import progress
from limner.tasks.icons import stable_hash

_GRID_CAPTIONS, _GRID_COLUMNS = 24, 4


@dataclass(frozen=True)
class NewStyle:
    """A style of a held-out set: rows of the icons to learn, in random order, and of those that are drawn."""

    name: str
    learned: list[int]
    drawn: list[int]

    @staticmethod
    def of(icons: Icons, name: str, learned: int, drawn: int, subjects: set[str]) -> NewStyle:
        """Return the first icons to learn, and at most `drawn` of the others that have one of the subjects."""
        keys = icons.references.keys
        rows = [i for i in icons.references.split_indices("set") if icons.styles[i] == name]
        rows.sort(key=lambda i: stable_hash("new style", keys[i]))
        others = [i for i in rows[learned:] if keys[i] in subjects]
        return NewStyle(name, rows[:learned], others[:drawn])


def write_icons(icons: Icons, rows: list[int], folder: Path) -> None:
    """Write pictures with captions in text files."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in rows:
        name = icons.references.keys[i].replace(" ", "-").replace("/", "-")
        to_image(icons.references.pictures[i]).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(icons.references.captions[i] + "\n", encoding="utf-8")


def classifier_of(icons: Icons, styles: list[NewStyle], folder: Path, steps: int) -> IconClassifier:
    """Train the classifier of styles, or load it. It does not see the drawn icons of `styles`."""
    names, drawn = {style.name for style in styles}, {i for style in styles for i in style.drawn}
    also = [i for i in icons.references.split_indices("set") if icons.styles[i] in names and i not in drawn]
    with progress("training the classifier", steps) as bar:
        return train_classifier(style_data(icons, also), folder, IconClassifierConfig(steps=steps, varied=False), bar)


def draw(
    pipe: TextToImage, icons: Icons, targets: list[int], classifier: IconClassifier, title: str
) -> tuple[dict[str, Verdicts], Tensor]:
    """Draw the captions of `targets`; return verdicts and the best of 16 drawings."""
    ranks, settings = StyleRanks(icons), ReferenceSettings(seed=TEST_SEEDS_FROM)

    def verdict(pictures: Tensor, rows: Sequence[int]) -> Verdicts:
        right, (_, styles) = ranks.verdicts(pictures, rows), classifier.classify(pictures)
        style = np.array([icons.styles[t] == name for t, name in zip(rows, styles, strict=True)])
        return {"right": right["subject"], "style": style, "both": right["subject"] & style}

    with progress(title, len(targets) * settings.candidates, unit="drawing") as bar:
        return draw_and_compare(pipe, icons.references, targets, verdict, settings, bar.advance)


def report(name: str, verdicts: Verdicts, subjects: list[str]) -> dict[str, str]:
    """Print and return shares with intervals."""
    shares = {respect: str(proportion(values, subjects)) for respect, values in verdicts.items()}
    print(f"{name}: " + ", ".join(f"{respect} {share}" for respect, share in shares.items()), flush=True)
    return shares


def grid(icons: Icons, targets: list[int], drawings: Tensor, before: Tensor) -> Image.Image:
    """Return drawings after finetuning and before it, and the real icons: three pictures in each cell."""
    side, gap = icons.references.pictures.shape[-1], 6
    rows = -(-len(targets) // _GRID_COLUMNS)
    sheet = Image.new("RGB", (_GRID_COLUMNS * (3 * side + 4 * gap), rows * (side + gap)), "#dddddd")
    for k, target in enumerate(targets):
        x, y = k % _GRID_COLUMNS * (3 * side + 4 * gap), k // _GRID_COLUMNS * (side + gap)
        for column, picture in enumerate((drawings[k], icons.references.pictures[target], before[k])):
            sheet.paste(to_image(picture), (x + column * (side + gap), y))
    return sheet.resize((2 * sheet.width, 2 * sheet.height))


def main() -> None:
    """Finetune on each style, and measure."""
    parser = argparse.ArgumentParser(description="finetuning on some icons of an unseen set")
    parser.add_argument("data", help="output of `limner data glyphs`")
    parser.add_argument("styles", nargs="+", help="styles of held-out sets")
    parser.add_argument("--icons", type=int, nargs="+", default=[100], help="numbers of icons to learn from")
    parser.add_argument("--captions", type=int, default=200, help="most captions of a group")
    parser.add_argument("--known", type=int, default=200, help="held-out combinations that measure forgetting")
    parser.add_argument("--classifier-steps", type=int, default=6_000)
    parser.add_argument("--out", type=Path, default=Path("runs/new-set"))
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:at])
    start = load("glyphs")
    assert start.examples is not None
    icons, subjects = Icons.from_source(open_source(options.data), start.size), set(start.examples.subjects)
    counts = Counter(icons.styles[i] for i in icons.references.split_indices("set"))
    most = max(options.icons)
    styles = [
        NewStyle.of(icons, name, most, options.captions, subjects) for name, n in sorted(counts.items()) if n > most
    ]
    classifier = classifier_of(icons, styles, options.out / "classifier", options.classifier_steps)
    known = icons.references.split_indices("combination", options.known, TEST_SEEDS_FROM)
    results, families = [], icons.references.families

    def measure(pipe: TextToImage, targets: list[int], style: str, model: str) -> Tensor:
        rows, drawings = draw(pipe, icons, targets, classifier, f"{style}, {model}")
        shares = report(f"{style}, {model}", rows["best of 16"], [families[t] for t in targets])
        results.append({"asked": style, "model": model, "captions": len(targets), **shares})
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
        return drawings

    if known:
        measure(start, known, "known styles", "before")
    for style in (style for style in styles if style.name in options.styles):
        _, read = classifier.classify(icons.references.pictures[style.drawn])
        verdict = {"style": np.array([name == style.name for name in read])}
        limit = report(f"{style.name}, real icons", verdict, [families[t] for t in style.drawn])
        results.append({"asked": style.name, "model": "real icons", "captions": len(style.drawn), **limit})
        before = measure(start, style.drawn, style.name, "before")
        for count in options.icons:
            folder = options.out / f"{style.name} {count}".replace(" ", "-")
            run = folder.with_name(f"{folder.name}-run")
            write_icons(icons, style.learned[:count], folder)
            command = ["limner", "finetune", "glyphs", str(folder), "--out", str(run), *sys.argv[at + 1 :]]
            subprocess.run([sys.executable, "-m", *command], check=True)
            tuned = load("glyphs", adapter=run / "adapter")
            after = measure(tuned, style.drawn, style.name, f"after {count} icons")
            shown = slice(_GRID_CAPTIONS)
            grid(icons, style.drawn[shown], after[shown], before[shown]).save(folder.with_suffix(".png"))
            if known:
                measure(tuned, known, "known styles", f"after {count} icons of {style.name}")


if __name__ == "__main__":
    main()
