"""Paired differences between two models on the cases that both were evaluated on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from limner.errors import UserError
from limner.evaluation.confidence import Estimate, paired_difference, proportion
from limner.evaluation.result import EvalResult
from limner.json_files import read_json

__all__ = ["compare_files"]

_MAX_BYTES = 256 << 20  # of a file of results


def compare_files(first: Path, second: Path) -> EvalResult:
    """Return the differences of the second model to the first, from files of `save_results`.

    A case is a caption with its seed; its `values` are proportions by row of the table. Raises `UserError` if a file
    lacks such cases, or the files share no case.
    """
    (a, name_a), (b, name_b) = (_read(path) for path in (first, second))
    common = sorted(a.keys() & b.keys())
    if not common:
        raise UserError("the files share no caption with the same seed: evaluate both models with one --seed")
    clusters = [a[key]["combination"] for key in common]
    rows = dict[str, dict[str, Estimate]]()
    for row in a[common[0]]["values"]:
        if any(row not in cases[key]["values"] for cases in (a, b) for key in common):
            continue  # another number of candidates
        before, after = (np.array([cases[key]["values"][row] for key in common], float) for cases in (a, b))
        difference = paired_difference(after, before, clusters)
        rows[row] = {
            "difference": difference, "first": proportion(before, clusters), "second": proportion(after, clusters)
        }  # fmt: skip
    title = f"{name_b} (second) minus {name_a} (first), {len(common):,} captions of both"
    return EvalResult(title=title, rows=rows)


def _read(path: Path) -> tuple[dict[tuple[str, int], dict[str, Any]], str]:
    """Return the cases of a file by caption and seed, and the model's name."""
    content = read_json(path, _MAX_BYTES)
    cases = {}
    try:
        for case in content["results"][0]["cases"]:
            numbers = {str(row): float(value) for row, value in case["values"].items()}
            if not all(0 <= value <= 1 for value in numbers.values()):
                raise ValueError("a value is not a proportion")
            found = {"values": numbers, "combination": str(case["combination"])}
            cases[str(case["caption"]), int(case["seed"])] = found
        if not cases:
            raise ValueError("no case")
        return cases, str(content.get("model", path.stem))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        advice = "write it with `limner evaluate composition -o` or `pairs -o`"
        raise UserError(f"{path} is not a file of results that can be compared: {advice}") from None
