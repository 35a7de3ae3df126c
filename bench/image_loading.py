"""Loading speed: augmented pictures from shards compared with Pillow's decoding alone.

    python bench/image_loading.py

Writes 512 pictures to a temporary folder, both in the format of img2dataset (tar shards, JPEG at quality 95) and as
single files, then times alternately and with the same number of threads:

    pillow   np.asarray(Image.open(path)): from a file to pixels in memory
    decode   Image.open(bytes).load(): without reading the file and without copying the pixels
    limner   ImageCaptionDataset.batch: read from the shard, parse caption and metadata, decode,
             Listing 2's crop and exact area resize to 256, into one uint8 tensor [B, 3, 256, 256]

and prints the medians and the ratios of limner to the other two.

The pictures are synthetic, with the statistics that determine the decoding time of a JPEG: a falling amplitude
spectrum as in photographs, a few hard edges, sensor noise. They have about 512 x 512 pixels and 0.55 bytes per pixel,
as COCO (train2017: 118,287 pictures of about 640 x 480 in 18 GB). `--quality 85` gives files of half the size, which
Pillow decodes faster, so the ratio is lower.
"""

from __future__ import annotations

import argparse
import io
import platform
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image

from limner.data.datasets import ImageCaptionDataset
from limner.data.open_source import open_source
from limner.data.shard_writer import ShardWriter


def picture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A synthetic photograph, uint8 [height, width, 3]."""
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    amplitude = np.maximum(np.hypot(fy, fx), 1 / max(height, width)) ** -1.3
    phases = np.exp(2j * np.pi * rng.random((3, *amplitude.shape)))
    field = np.fft.irfft2(amplitude * phases, (height, width))
    luma, chroma = field[0] / field[0].std(), field[1:] / field[1:].std()
    y, x = np.mgrid[:height, :width]
    for _ in range(6):  # hard edges: half planes of different brightness
        angle, shift = rng.uniform(0, 2 * np.pi), rng.uniform(-0.5, 0.5)
        side = np.cos(angle) * (x / width - 0.5) + np.sin(angle) * (y / height - 0.5) > shift
        luma = luma + 0.4 * rng.normal() * side
    luma = luma / luma.std()
    colors = np.stack([luma, luma, luma]) * 45 + np.stack(
        [chroma[0], -chroma.mean(0), chroma[1]]
    ) * 15  # fmt: skip
    colors += rng.normal(0, 2, colors.shape)
    return np.clip(colors + 120, 0, 255).astype(np.uint8).transpose(1, 2, 0)


def write(folder: str, count: int, quality: int) -> list[bytes]:
    """Write shards of `count` JPEGs to `folder` and return the JPEGs."""
    rng = np.random.default_rng(0)
    pictures = []
    with ShardWriter(folder, per_shard=count // 4) as writer:
        for number in range(count):
            height, width = (int(n) for n in rng.integers(480, 545, 2))
            buffer = io.BytesIO()
            Image.fromarray(picture(rng, height, width)).save(buffer, "JPEG", quality=quality)
            pictures.append(buffer.getvalue())
            writer.write(pictures[-1], [f"a synthetic photograph, number {number}"], suffix="jpg")
    return pictures


def main() -> None:
    """Write the pictures, time the three functions alternately and print the rates."""
    parser = argparse.ArgumentParser(description="augmented pictures from shards against Pillow")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--quality", type=int, default=95)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        pictures = write(f"{folder}/shards", options.count, options.quality)
        paths = [f"{folder}/{number}.jpg" for number in range(options.count)]
        for path, data in zip(paths, pictures, strict=True):
            Path(path).write_bytes(data)
        dataset = ImageCaptionDataset(open_source(f"{folder}/shards"), options.size, "prior", threads=options.threads)
        pool = ThreadPoolExecutor(options.threads)

        def pillow() -> None:
            list(pool.map(lambda path: np.asarray(Image.open(path)).shape, paths))

        def decode() -> None:
            list(pool.map(lambda data: Image.open(io.BytesIO(data)).load() and None, pictures))

        def limner() -> None:
            for start in range(0, options.count, 64):
                indices = np.arange(start, min(start + 64, options.count))
                dataset.batch(indices, indices.astype(np.uint64))

        rates: dict[str, list[float]] = {"pillow": [], "decode": [], "limner": []}
        for turn in range(options.rounds + 1):
            for function in (pillow, decode, limner):
                start = time.perf_counter()
                function()
                if turn:  # the first turn warms up
                    rate = options.count / (time.perf_counter() - start)
                    rates[function.__name__].append(rate)

    packages = " ".join(f"{name} {version(name)}" for name in ("pillow", "numpy", "simplejpeg"))
    size = sum(map(len, pictures)) / len(pictures) / 1024
    print(f"Python {platform.python_version()}, {packages}, {options.threads} threads")
    print(f"{options.count} JPEGs of about 512 x 512, quality {options.quality}, {size:.0f} KiB each")
    for name, values in rates.items():
        print(f"{name}: {statistics.median(values):7.0f} images/s (median of {options.rounds})")
    for name in ("pillow", "decode"):
        ratios = [b / a for a, b in zip(rates[name], rates["limner"], strict=True)]
        print(f"limner / {name}: {statistics.median(ratios):.0%} (from {min(ratios):.0%} to {max(ratios):.0%})")


if __name__ == "__main__":
    main()
