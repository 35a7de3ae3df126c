"""Quality after an hour of training: limner and `dalle-pytorch` on the same pictures and captions of icons.

    python bench/quality.py DATA --dalle-pytorch PATH --reranker MODEL     # two hours with the default --minutes 60

DATA is the output of `limner data icons`, PATH a folder as described in `bench/prior.py`, MODEL a bundle whose
contrastive model reranks the candidates of both. Each side runs in a separate process: it trains a dVAE and a
transformer from random weights for `--minutes`, then draws held-out combinations of subject and style, and training
captions. The classifier of `limner evaluate icons` reads the drawings. The output has the shares of right drawings with
95% intervals.

    ours       the recipe `icons` with 8 x 8 tokens instead of 16 x 16, which need more than an hour, and as many prior
               steps as the time allows; drawn with its defaults
    theirs     DiscreteVAE and DALLE of dalle-pytorch 1.6.6 with the defaults of its `train_vae.py`, `train_dalle.py`
               and `generate.py`, except for changes in its favor: pictures of 64 pixels, our tokenizer of 2,048 words
               instead of one of 49,408, 40 text positions instead of 256. Its dVAE has a third of the time, or 20
               epochs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peers import dalle_pytorch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from limner import recipes
from limner.data.datasets import ImageCaptionDataset
from limner.data.open_source import open_source
from limner.evaluation.confidence import TEST_SEEDS_FROM, proportion
from limner.evaluation.generate_batches import generate_batches
from limner.evaluation.icon_classifier import IconClassifierConfig, train_classifier
from limner.evaluation.icon_pictures import Icons
from limner.pipeline import TextToImage, load
from limner.progress import progress
from limner.recipes.recipe import PatchStage, Recipe, resolve
from limner.runs.run_data import RunData
from limner.runs.stages import StageTrainer
from limner.runs.time_estimate import seconds_per_step, timing_inputs
from limner.sampling.rerank import best, scores
from limner.text.bpe import Tokenizer

SIZE, CANDIDATES, TEXT = 64, 16, 40
_SPLITS = {"combination": "held-out combinations", "train": "training captions"}
_CAPTIONS_PER_SPLIT = 128  # at most
_PEER_BATCH = 64  # candidates per batch of dalle-pytorch
_PEER_DVAE_SHARE = 1 / 3  # of dalle-pytorch's training time


class Clock:
    """Clock of the training time, without data preparation and without optional evaluations."""

    def __init__(self, minutes: float) -> None:
        self.start, self.seconds = time.monotonic(), 60 * minutes

    def share(self) -> float:
        """Return the elapsed share of the time, which can exceed 1."""
        return (time.monotonic() - self.start) / self.seconds


def ours(options: argparse.Namespace, folder: Path, captions: list[str]) -> Tensor:
    """Train the recipe and draw the captions."""
    recipe, clock = _coarse(recipes.get("icons")), Clock(options.minutes)
    assert isinstance(recipe.dvae, PatchStage)
    steps = max(1, round(recipe.dvae.training.steps * min(1.0, options.minutes / 240)))
    recipe = _with_steps(recipe, dvae=steps)
    StageTrainer(RunData.open(recipe, options.data, folder / "run"), ("dvae",)).model("dvae")
    remaining = (1 - clock.share()) * clock.seconds
    # 5% for data preparation
    affordable = int(0.95 * remaining / seconds_per_step(*timing_inputs(resolve(recipe), "prior"), target_seconds=10.0))
    recipe = _with_steps(recipe, prior=max(1, min(recipe.prior.training.steps, affordable)))
    trainer = StageTrainer(RunData.open(recipe, options.data, folder / "run"), ("prior",))
    dvae, prior = trainer.model("dvae"), trainer.model("prior")
    assert trainer.tokenizer is not None
    minutes = clock.share() * options.minutes
    print(f"ours: {steps:,} and {recipe.prior.training.steps:,} steps in {minutes:.1f} minutes", file=sys.stderr)
    unused = trainer.resolved.models["contrastive"].build()
    defaults = {"temperature": recipe.prior.temperature, "guidance": recipe.prior.guidance}
    pipe = TextToImage(dvae, prior, unused.eval(), trainer.tokenizer, {"name": "ours", **defaults})
    pictures = []
    with progress("drawing", len(captions) * CANDIDATES, unit="drawing") as bar:
        for _, part in generate_batches(pipe, captions, CANDIDATES, TEST_SEEDS_FROM, progress=bar.advance):
            pictures.append(part.pictures)
    return torch.cat(pictures)


def _coarse(recipe: Recipe) -> Recipe:
    """Return the recipe with 8 x 8 tokens: a wider decoder, and twice the batch size."""
    assert isinstance(recipe.dvae, PatchStage)
    model = replace(recipe.dvae.model, patch=8, width=256, pixel_blocks=3)
    return replace(
        recipe,
        dvae=replace(recipe.dvae, model=model, training=replace(recipe.dvae.training, steps=3_000), augment=False),
        prior=replace(
            recipe.prior, training=replace(recipe.prior.training, steps=6_500, batch_size=32), temperature=1.0
        ),
    )


def _with_steps(recipe: Recipe, **steps: int) -> Recipe:
    """Return the recipe with other numbers of steps and without evaluations during training."""
    stages = {}
    for name, count in steps.items():
        stage = getattr(recipe, name)
        training = replace(
            stage.training, steps=count, warmup_steps=min(stage.training.warmup_steps, count // 10), eval_every=10**6
        )
        stages[name] = replace(stage, training=training)
    return replace(recipe, **stages)


def theirs(options: argparse.Namespace, folder: Path, captions: list[str]) -> Tensor:
    """Train as the scripts of dalle-pytorch do and draw the captions."""
    code = dalle_pytorch(options.dalle_pytorch)
    torch.manual_seed(0)
    source = open_source(options.data)
    train = [i for i in range(len(source)) if source.meta(i).get("split") == "train"]
    _, pixels, texts, _ = ImageCaptionDataset(source, SIZE).load(np.array(train))
    tokenizer = Tokenizer.train((caption for captions in texts for caption in captions), 2_048)

    def encode(captions: list[str]) -> Tensor:
        return tokenizer.encode(captions, TEXT).clamp_min(-1) + 1  # 0 is its padding

    rng, clock = np.random.default_rng(0), Clock(options.minutes)
    vae = code.DiscreteVAE(
        image_size=SIZE, num_layers=3, num_tokens=8_192, codebook_dim=512, hidden_dim=256, num_resnet_blocks=2
    )
    dvae_steps = _train_their_dvae(vae, pixels, clock, rng)
    dalle = code.DALLE(
        dim=512, vae=vae, num_text_tokens=tokenizer.vocab_size + 1, text_seq_len=TEXT, depth=2, heads=8, dim_head=64,
        attn_types=("full",), loss_img_weight=7, shift_tokens=False, rotary_emb=False,
    )  # fmt: skip
    optimizer, steps = torch.optim.Adam([p for p in dalle.parameters() if p.requires_grad], lr=3e-4), 0
    while clock.share() < 1:
        for rows in _epoch(len(pixels), 4, rng):
            if clock.share() >= 1:
                break
            captions_of_rows = [texts[i][rng.integers(len(texts[i]))] for i in rows]
            loss = dalle(encode(captions_of_rows), _cropped(pixels[rows], rng), return_loss=True)
            loss.backward()
            nn.utils.clip_grad_norm_(dalle.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps % 500 == 0:
                print(f"theirs: step {steps:,}, loss {loss.item():.3f}, {clock.share():.0%}", file=sys.stderr)
    print(
        f"theirs: {dvae_steps:,} and {steps:,} steps in {clock.share() * options.minutes:.1f} minutes", file=sys.stderr
    )
    # The original drops the given cache and recomputes all positions; the tokens are equal.
    dalle.forward_with_cond_scale = lambda text, image, cond_scale, cache: dalle(text, image, cache=cache)
    pictures, batch = [], _PEER_BATCH // CANDIDATES
    with progress("drawing", len(captions) * CANDIDATES, unit="drawing") as bar:
        for start in range(0, len(captions), batch):
            text = encode(captions[start : start + batch]).repeat_interleave(CANDIDATES, 0)
            images = dalle.generate_images(text, filter_thres=0.9, use_cache=True)
            pictures.append(
                ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).unflatten(0, (-1, CANDIDATES))
            )
            bar.advance(len(text))
    return torch.cat(pictures)


def _train_their_dvae(vae: Any, pixels: Tensor, clock: Clock, rng: np.random.Generator) -> int:
    """Train as `train_vae.py`: Adam, with learning rate and temperature decayed every 100 steps of an epoch."""
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    steps, temperature = 0, 1.0
    for _ in range(20):
        for i, rows in enumerate(_epoch(len(pixels), 8, rng)):
            if clock.share() >= _PEER_DVAE_SHARE:
                return steps
            loss = vae(pixels[rows].float() / 255, return_loss=True, return_recons=True, temp=temperature)[0]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 100 == 0:
                temperature = max(temperature * float(np.exp(-1e-6 * steps)), 0.5)
                schedule.step()
                print(f"theirs: dVAE step {steps:,}, loss {loss.item():.4f}, {clock.share():.0%}", file=sys.stderr)
            steps += 1
    return steps


def _epoch(samples: int, batch: int, rng: np.random.Generator) -> list[np.ndarray]:
    return np.array_split(rng.permutation(samples)[: samples // batch * batch], samples // batch)


def _cropped(pixels: Tensor, rng: np.random.Generator) -> Tensor:
    """Apply torchvision's RandomResizedCrop with square crops of 75 to 100% of the area, as in `train_dalle.py`."""
    crops = []
    for picture in pixels.float() / 255:
        side = round(SIZE * float(np.sqrt(rng.uniform(0.75, 1.0))))
        y, x = rng.integers(0, SIZE - side + 1, 2)
        crop = picture[None, :, y : y + side, x : x + side]
        crops.append(F.interpolate(crop, (SIZE, SIZE), mode="bilinear", antialias=True)[0])
    return torch.stack(crops)


def work(options: argparse.Namespace) -> None:
    """Run one side: train, draw, and save the drawings, uint8 [C, 16, 3, 64, 64]."""
    folder = options.out / options.worker
    folder.mkdir(parents=True, exist_ok=True)
    captions = json.loads((options.out / "captions.json").read_text())
    pictures = {"ours": ours, "theirs": theirs}[options.worker](options, folder, captions)
    save_file({"pictures": pictures.contiguous()}, folder / "drawings.safetensors")


def main() -> None:
    """Train and draw with both sides, one after the other, and print the shares of right drawings."""
    parser = argparse.ArgumentParser(description="quality after an hour of training, limner and dalle-pytorch")
    parser.add_argument("data", help="output of `limner data icons`")
    parser.add_argument("--dalle-pytorch", required=True, help="a folder with dalle_pytorch and its three dependencies")
    parser.add_argument("--reranker", required=True, help="a bundle whose contrastive model reranks for both")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time of each side")
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    icons = Icons.from_source(open_source(options.data), SIZE)
    wanted = [
        i for split in _SPLITS for i in icons.references.split_indices(split, _CAPTIONS_PER_SPLIT, TEST_SEEDS_FROM)
    ]
    captions = [icons.references.captions[w] for w in wanted]
    (options.out / "captions.json").write_text(json.dumps(captions))
    for side in ("ours", "theirs"):
        if not (options.out / side / "drawings.safetensors").exists():
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--worker", side], check=True)
    folder = Path(options.data).resolve()
    with progress("training the classifier", IconClassifierConfig().steps) as bar:
        classifier = train_classifier(icons.labeled, folder.parent / f"{folder.name}-classifier", bar=bar)
    reranker = load(options.reranker)
    text = reranker.tokenizer.encode(captions, reranker.contrastive.config.text_len)
    subjects = [icons.references.families[w] for w in wanted]
    right, best_right = {}, {}
    for side in ("ours", "theirs"):
        pictures = load_file(options.out / side / "drawings.safetensors")["pictures"]
        subject, style = classifier.classify(pictures.flatten(0, 1))
        right[side] = np.array(
            [
                (subject[k], style[k]) == (subjects[k // CANDIDATES], icons.styles[wanted[k // CANDIDATES]])
                for k in range(len(subject))
            ]
        ).reshape(-1, CANDIDATES)
        top = best(scores(reranker.contrastive, text, pictures), 1).numpy()
        best_right[side] = np.take_along_axis(right[side], top, 1)[:, 0]
    for split, name in _SPLITS.items():
        rows = [k for k, w in enumerate(wanted) if icons.references.splits[w] == split]
        print(f"{len(rows)} {name}; drawings of the right subject in the right style")
        print(f"{'':10}{'best of 1':>28}{f'best of {CANDIDATES}':>28}")
        for side in ("ours", "theirs"):
            proportions = [
                proportion(verdicts[rows], [subjects[k] for k in rows])
                for verdicts in (right[side].mean(1), best_right[side])
            ]
            print(f"{side:10}" + "".join(f"{rate!s:>28}" for rate in proportions))


if __name__ == "__main__":
    main()
