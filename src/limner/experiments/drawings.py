"""Drawings of the bundled model of scenes, checked by the scene parser: reranking, variable binding, image to image.

Captions have combinations of attributes held out of training, and seeds with which nothing was chosen. Each seed has
other captions. Intervals of shares are over combinations; those of distances, over seeds.

Shapes: S seeds, B captions, N candidates, P candidates of a pool, K values of N.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from limner.evaluation.composition import CompositionSettings, pair_cases, sample_captions, sample_pairs, score
from limner.evaluation.confidence import TEST_SEEDS_FROM, Estimate, paired_difference, proportion
from limner.evaluation.features import extract, open_extractor
from limner.evaluation.generate_batches import attribute_key, generate_batches, verdicts
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Runs, Sweep, all_above, over_seeds
from limner.metrics.fidelity import compare
from limner.pipeline import TextToImage, load
from limner.sampling.rerank import best
from limner.tasks import captions, scene_reader, scenes
from limner.tasks.rendering import render
from limner.tasks.scenes import TRANSFORMS, SceneObject
from limner.tasks.verify import satisfies

SEEDS, QUICK_SEEDS = tuple(range(TEST_SEEDS_FROM + 200, TEST_SEEDS_FROM + 204)), (0, 1)
EXTRACTOR = "lite0"  # the model's contrastive model ranks candidates, so its features would favor them


@cache
def pipeline() -> TextToImage:
    """Return the bundled model of scenes; each process loads it once."""
    return load("scenes")


def pixels(pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """Return pictures uint8 [H, W, 3] as uint8 [B, 3, H, W]."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


# ---------------------------------------------------------------------------- reranking


def best_of_weights(pool: int, n: int) -> Float[np.ndarray, " P"]:
    """Return the probability that each candidate of a pool, best first, is the best of `n` random ones of the pool:
    the candidate of rank j is, if the others are among the `pool` - 1 - j worse ones."""
    return np.array([math.comb(pool - 1 - j, n - 1) / math.comb(pool, n) for j in range(pool)])


def rerank_trial(*, seed: int, count: int, sizes: Sequence[int], repeats: int) -> Result:
    """Return the expected score and accuracy [K, B] of the best of N, and KID and FID [K] of the bests of `repeats`
    random choices of N candidates."""
    bundle, pool, rng = pipeline(), max(sizes), np.random.default_rng([seed, 5])
    models = bundle.dvae, bundle.prior, bundle.contrastive, bundle.tokenizer
    pipe = TextToImage(*models, {**bundle.info, "prior_score_weight": 0.0})  # the paper's score
    captioned = sample_captions(counts=(1, 2, 3, 4), n=2 * count, seed=seed)
    texts = [caption for caption, _ in captioned[:count]]
    scores, right, pictures = [], [], []
    for part, batch in generate_batches(pipe, texts, pool, seed):
        order = best(batch.scores, pool)
        rows = torch.arange(len(part))[:, None]
        scores.append(batch.scores[rows, order])
        pictures.append(batch.pictures[rows, order])
        right += [verdicts(x, lambda y, i=i: satisfies(y, texts[i])) for i, x in zip(part, pictures[-1], strict=True)]
    weights = [best_of_weights(pool, n) for n in sizes]
    extractor = open_extractor(EXTRACTOR, pipe)
    real = extract(extractor, [pixels([render(scene, pipe.size) for _, scene in captioned[count:]])])[0]
    picks = np.stack([rng.choice(pool, (repeats, count), p=w) for w in weights])
    needed, index = np.unique(picks + pool * np.arange(count), return_inverse=True)
    features = extract(extractor, [torch.cat(pictures).flatten(0, 1)[torch.from_numpy(needed)]])[0]
    distances = [
        [compare(features[torch.from_numpy(row)], real, "x") for row in rows] for rows in index.reshape(picks.shape)
    ]
    return {
        "clusters": [attribute_key(scene) for _, scene in captioned[:count]],
        "score": [(torch.cat(scores).double().numpy() @ w).tolist() for w in weights],
        "right": [(np.stack(right) @ w).tolist() for w in weights],
    } | {
        name: [float(np.mean([values[f"{name}[x]"].item() for values in row])) for row in distances]
        for name in ("kid", "fid")
    }


def reranking_helps(accuracy: Estimate, fidelity: Estimate, doublings: tuple[float, float]) -> bool | None:
    """Return True if the gains in accuracy and fidelity are above zero, and a doubling of N brings less accuracy beyond
    the first range of N than in it (`doublings`). None if a gain is not significant."""
    return False if doublings[1] >= doublings[0] else all_above([accuracy, fidelity])


@experiment(
    "Accuracy and fidelity rise with the number of reranked candidates up to 32, and then with diminishing returns",
    "Ramesh et al. 2021, §2.6, §3.1, Figures 6 and 9c",
)
def rerank_n(folder: Path, quick: bool) -> Finding:
    """Take the best of N from one pool of candidates for each caption, in expectation over choices of N of them."""
    sizes, middle, seeds, settings = (
        ((1, 2, 4), 1, QUICK_SEEDS, {"count": 12, "repeats": 1})
        if quick
        else ((1, 2, 4, 8, 16, 32, 64, 128), 5, SEEDS, {"count": 48, "repeats": 2})
    )
    runs = Sweep(folder, rerank_trial, {"scenes": {"sizes": sizes}}, seeds, **settings).runs["scenes"]
    right, ranked = (np.concatenate([*runs.values(key)], 1) for key in ("right", "score"))  # [K, S * B]
    clusters = runs.values("clusters").ravel().tolist()
    kid, fid = runs.values("kid"), runs.values("fid")  # [S, K]
    gains = (
        replace(paired_difference(right[middle], right[0], clusters), spec=".1%"),
        over_seeds(kid[:, 0] - kid[:, middle]),
    )
    first, beyond = (np.diff(right[[0, middle, -1]].mean(1)) / (middle, len(sizes) - 1 - middle)).tolist()
    columns = {
        "accuracy": [proportion(x, clusters) for x in right],
        "contrastive score": [f"{x.mean():.3f}" for x in ranked],
        "KID": [over_seeds(x) for x in kid.T],
        "FID": [over_seeds(x, ".1f") for x in fid.T],
    }
    return Finding(
        holds=reranking_helps(*gains, (first, beyond)),
        verdict=f"From N = 1 to {sizes[middle]}, accuracy rises by {gains[0]}, and KID falls by {gains[1]}. Each "
        f"doubling brings {first:+.2%} of accuracy up to there and {beyond:+.2%} beyond.",
        header=("N", *columns),
        rows=[(n, *(str(column[k]) for column in columns.values())) for k, n in enumerate(sizes)],
        curves={
            f"{name} over log2 N": {name: list(enumerate(values.tolist()))}
            for name, values in (("accuracy", right.mean(1)), ("KID", kid.mean(0)))
        },
        settings={"seeds": list(seeds), **settings, "pool": max(sizes), "features": EXTRACTOR},
    )


# ---------------------------------------------------------------------------- variable binding

OUTCOMES = ("right", "swapped", "on both", "another drawing")


def swap_words(caption: str, a: str, b: str) -> str:
    """Exchange two adjectives in a caption, with their articles."""
    text = " ".join({a: b, b: a}.get(word, word) for word in caption.split())
    return re.sub(r"\ban? (?=(\w))", lambda match: "an " if match[1] in "aeiou" else "a ", text)


def binding_outcome(objects: Sequence[SceneObject], attribute: str, named: Mapping[str, str]) -> str:
    """Return which of `OUTCOMES` a drawing shows, given the value that the caption names for each of two shapes."""
    if sorted(item.shape for item in objects) != sorted(named):
        return "another drawing"
    drawn = {item.shape: getattr(item, attribute) for item in objects}
    if drawn == named:
        return "right"
    (first, second), values = named, set(drawn.values())
    if (drawn[first], drawn[second]) == (named[second], named[first]):
        return "swapped"
    return "on both" if len(values) == 1 and values <= set(named.values()) else "another drawing"


def binding_trial(*, seed: int, attribute: str, count: int, candidates: int) -> Result:
    """Draw captions of two objects, and the same captions with the values of an attribute exchanged; return the
    outcome of each best drawing."""
    texts, wanted, clusters = list[str](), list[dict[str, str]](), list[str]()
    for caption, scene in sample_captions(counts=(2,), n=40 * count, seed=seed):
        named = {item.shape: getattr(item, attribute) for item in scene.objects}
        if len(set(named.values())) < 2 or (attribute == "fill" and "solid" in named.values()):
            continue  # captions may leave out "solid"
        texts += [caption, swap_words(caption, *named.values())]
        wanted += [named, dict(zip(named, reversed(named.values()), strict=True))]
        clusters += [attribute_key(scene)] * 2
        if len(texts) == 2 * count:
            break
    outcomes = []
    for part, batch in generate_batches(pipeline(), texts, candidates, seed):
        pictures = batch.pictures[torch.arange(len(part)), best(batch.scores, 1)[:, 0]]
        read = [scene_reader.read(picture).objects for picture in pictures.permute(0, 2, 3, 1).contiguous().numpy()]
        outcomes += [binding_outcome(objects, attribute, wanted[i]) for i, objects in zip(part, read, strict=True)]
    return {"outcomes": outcomes, "clusters": clusters}


def bound_share(runs: Runs) -> Estimate:
    """Return the share of drawings bound right among those bound right or with exchanged values."""
    pairs = [pair for result in runs.results for pair in zip(result["outcomes"], result["clusters"], strict=True)]
    decided = [(outcome == "right", cluster) for outcome, cluster in pairs if outcome in ("right", "swapped")]
    if not decided:
        return Estimate(value=0.0, spec=".1%")
    return proportion(np.array([right for right, _ in decided]), [key for _, key in decided])


@experiment(
    "Captions bind variables: an attribute is drawn on the object that the caption names",
    "Ramesh et al. 2021, §3.3, Figure 2c",
)
def binding(folder: Path, quick: bool) -> Finding:
    """Draw captions whose two objects have exchanged attributes, and count on which object each attribute is."""
    seeds, settings = (QUICK_SEEDS, {"count": 8, "candidates": 2}) if quick else (SEEDS, {"count": 40, "candidates": 8})
    sweep = Sweep(folder, binding_trial, {a: {"attribute": a} for a in ("color", "size", "fill")}, seeds, **settings)
    shares = {attribute: bound_share(runs) for attribute, runs in sweep.runs.items()}

    def share(runs: Runs, outcome: str) -> str:
        return str(proportion(runs.values("outcomes").ravel() == outcome, runs.values("clusters").ravel().tolist()))

    return sweep.finding(
        all_above(shares.values(), 0.5),  # one half: a model that ignores which object an attribute belongs to
        "Of the drawings with the named values on either object, these bind them right: "
        + ", ".join(f"{attribute} {value}" for attribute, value in shares.items())
        + "; chance is 50%.",
        ("attribute",),
        {outcome: lambda runs, outcome=outcome: share(runs, outcome) for outcome in OUTCOMES},
        {},
    )


# ---------------------------------------------------------------------------- image to image


def pair_trial(*, seed: int, pairs: int, candidates: int, own: bool) -> Result:
    """Draw lower halves below real upper halves, for captions that name the checked transform, or the next one of
    `TRANSFORMS`; return the verdict on the likeliest candidate of each."""
    pipe, sampled = pipeline(), sample_pairs(n=pairs, seed=seed)
    cases = pair_cases(pipe, sampled)
    if not own:
        following = dict(pairwise((*TRANSFORMS, TRANSFORMS[0])))
        for i, (_, pair) in enumerate(sampled):
            rng, transform = np.random.default_rng([seed, i, 6]), following[pair.transform]
            color = str(rng.choice(list(scenes.COLORS))) if transform == "recolored" else None
            other = replace(pair, transform=transform, color=color)
            cases[i] = cases[i]._replace(caption=captions.describe_pair(other, rng))
    settings = CompositionSettings(candidates=candidates, best_of=(candidates,), seed=seed)
    result = score(pipe, cases, settings, progress=None)[0]
    return {"right": [case["values"][f"best of {candidates}"] for case in result.cases],
            "kinds": [case["kind"] for case in result.cases],
            "clusters": [case["combination"] for case in result.cases]}  # fmt: skip


@experiment(
    "Given the upper half of a picture, the lower half shows the transform that the caption names",
    "Ramesh et al. 2021, §3.3, App. G, Figures 2d and 14",
)
def image_to_image(folder: Path, quick: bool) -> Finding:
    """Compare captions that name a transform with captions that name another one, below the same upper halves.

    The paper's model was not trained for this. A tenth of the training samples of the model here are pairs, of other
    combinations.
    """
    seeds, settings = (
        (QUICK_SEEDS, {"pairs": 16, "candidates": 2}) if quick else (SEEDS, {"pairs": 64, "candidates": 8})
    )
    sweep = Sweep(folder, pair_trial, {own: {"own": own} for own in (True, False)}, seeds, **settings)
    own, another = (sweep.runs[key].values("right").ravel() for key in (True, False))  # [S * B]
    kinds, clusters = (sweep.runs[True].values(key).ravel() for key in ("kinds", "clusters"))
    table = dict[str, tuple[Estimate, Estimate, Estimate]]()
    for name, at in {"all": kinds != "", **{transform: kinds == transform for transform in TRANSFORMS}}.items():
        right, wrong, keys = own[at], another[at], clusters[at].tolist()
        table[name] = proportion(right, keys), proportion(wrong, keys), paired_difference(right, wrong, keys)
    return Finding(
        holds=all_above(table[transform][2] for transform in TRANSFORMS),
        verdict=f"{table['all'][0]} of the lower halves show the named transform of the upper half; {table['all'][1]} "
        "do if the caption names another one. The model was trained with pairs.",
        header=("transform", "right", "right, if the caption names another", "difference"),
        rows=[(name, *map(str, estimates)) for name, estimates in table.items()],
        settings=sweep.settings,
    )
