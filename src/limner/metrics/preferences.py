"""Statistics of votes between two pictures: strengths of models, and agreement of voters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

__all__ = ["EQUAL", "Strengths", "fit_strengths", "krippendorff_alpha"]

EQUAL = 2  # outcome of a comparison; 0 and 1 are the first and the second model
_PRIOR_PRECISION = 0.01  # of a normal prior on all parameters, which keeps them finite if a model wins every vote
_MAX_STEPS, _TOLERANCE = 100, 1e-10  # of Newton's method


class Strengths(NamedTuple):
    """Strengths of K models in nats, with mean 0, their standard errors, and the weight of ties.

    A model whose strength is larger by d wins e^d times as often.
    """

    values: Float[np.ndarray, " K"]
    errors: Float[np.ndarray, " K"]
    tie: float


def fit_strengths(pairs: Int[np.ndarray, "N 2"], outcomes: Int[np.ndarray, " N"], models: int) -> Strengths:
    """Fit strengths to N comparisons (Bradley & Terry 1952, with ties as in Davidson 1970).

    The first model wins with weight e^a, the second with e^b, and neither with e^(t + (a + b) / 2): a multinomial logit
    whose likelihood is concave, maximized by Newton's method.

    Args:
        pairs: indices of the two models of each comparison.
        outcomes: 0 if the first won, 1 if the second did, else `EQUAL`.
    """
    n, rows = len(pairs), np.arange(len(pairs))
    features = np.zeros((n, 3, models + 1))  # of the outcomes; the last column is the tie's weight
    features[rows, 0, pairs[:, 0]] = features[rows, 1, pairs[:, 1]] = 1
    features[rows, EQUAL, pairs[:, 0]] = features[rows, EQUAL, pairs[:, 1]] = 0.5
    features[:, EQUAL, -1] = 1
    parameters, prior = np.zeros(models + 1), _PRIOR_PRECISION * np.eye(models + 1)
    for _ in range(_MAX_STEPS):
        scores = features @ parameters
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        expected = np.einsum("no,nok->nk", p, features)
        gradient = (features[rows, outcomes] - expected).sum(0) - prior @ parameters
        information = np.einsum("no,nok,nol->kl", p, features, features) - expected.T @ expected + prior
        step = np.linalg.solve(information, gradient)
        parameters += step / max(1.0, np.abs(step).max())  # at most one nat
        if np.abs(step).max() < _TOLERANCE:
            break
    center = np.eye(models) - 1 / models
    covariance = center @ np.linalg.inv(information)[:models, :models] @ center
    return Strengths(center @ parameters[:models], np.sqrt(np.diag(covariance)), float(parameters[-1]))


def krippendorff_alpha(units: Sequence[Sequence[object]]) -> float:
    """Return the agreement on nominal values: 1 if all agree, 0 if they agree as often as by chance; NaN if all values
    are equal or no unit has two (Krippendorff 2011).

    Args:
        units: the values that each unit received, of any number of raters.
    """
    coincidences = defaultdict[tuple[object, object], float](float)
    for values in units:
        for pair in permutations(values, 2):
            coincidences[pair] += 1 / (len(values) - 1)
    totals = defaultdict[object, float](float)
    for (value, _), weight in coincidences.items():
        totals[value] += weight
    n = sum(totals.values())
    observed = sum(weight for (a, b), weight in coincidences.items() if a != b)
    expected = sum(totals[a] * totals[b] for a, b in permutations(totals, 2))
    return 1 - (n - 1) * observed / expected if expected else float("nan")
