"""A data set of icons that takes no artist: five shapes in four styles, with pairs, some held out."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from limner.data.shard_writer import ShardWriter

SUBJECTS = ["bar", "circle", "cross", "square", "triangle"]
STYLES = ["flat", "dark", "line drawing", "night"]  # night is on black, and nearest to it is dark, on gray
HELD_OUT, UNSEEN = ("cross", "night"), "bar"
_BACK = {"flat": "#fff", "dark": "#777", "line drawing": "#fff", "night": "#000"}
_INK = {"flat": "#d33", "dark": "#26c", "line drawing": "#000", "night": "#fd4"}


def picture(subject: str, style: str, size: int = 24) -> Image.Image:
    image = Image.new("RGB", (4 * size, 4 * size), _BACK[style])
    a, b = size * 0.6, size * 3.4
    m, t = (a + b) / 2, size * 0.4
    outlines = {
        "bar": [(a, m - t), (b, m - t), (b, m + t), (a, m + t)],
        "circle": [(m + (b - m) * np.cos(x), m + (b - m) * np.sin(x)) for x in np.linspace(0, 2 * np.pi, 40)],
        "cross": [(a, a), (a + 2 * t, a), (m, m - t), (b - 2 * t, a), (b, a), (m + t, m), (b, b), (b - 2 * t, b),
                  (m, m + t), (a + 2 * t, b), (a, b), (m - t, m)],
        "square": [(a, a), (b, a), (b, b), (a, b)],
        "triangle": [(a, b), (m, a), (b, b)],
    }[subject]  # fmt: skip
    pen = ImageDraw.Draw(image)
    if style == "line drawing":
        pen.line([*outlines, outlines[0]], _INK[style], width=size // 3, joint="curve")
    else:
        pen.polygon([tuple(map(float, p)) for p in outlines], fill=_INK[style])
    return image.resize((size, size), Image.Resampling.BOX)


def pair(top: Image.Image, bottom: Image.Image) -> Image.Image:
    """Each at half its size, centered in its half."""
    size = top.width
    whole = Image.new("RGB", (size, size), "white")
    for y, half in ((0, top), (size // 2, bottom)):
        whole.paste(half.resize((size // 2, size // 2), Image.Resampling.BOX), (size // 4, y))
    return whole


def write_toy_icons(folder: Path, size: int = 24, subjects: list[str] = SUBJECTS) -> Path:
    with ShardWriter(folder) as writer:

        def write(image, caption, **meta):
            file = io.BytesIO()
            image.save(file, "PNG")
            writer.write(file.getvalue(), [caption, "another phrasing"], meta)

        for subject in subjects:
            for style in STYLES:
                facts = {"subject": subject, "base": subject, "style": style, "set": style, "tones": []}
                reason = "combination" if (subject, style) == HELD_OUT else "subject" if subject == UNSEEN else None
                split = {"split": "held-out", "held_out": reason} if reason else {"split": "train"}
                write(picture(subject, style, size), f"a {subject}, {style}", **facts, **split)
            facts = {"subject": subject, "base": subject, "style": "flat"}
            held = {"split": "held-out", "held_out": "pair"} if subject in ("circle", "square") else {"split": "train"}
            flat, dark = picture(subject, "flat", size), picture(subject, "dark", size)
            turned = flat.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
            says = f"the exact same {subject} on the top"
            write(pair(flat, dark), f"{says} dark", **facts, **held, pair={"kind": "style", "style": "dark"})
            write(pair(flat, turned), f"{says} upside down", **facts, **held, pair={"kind": "upside down"})
    return folder
