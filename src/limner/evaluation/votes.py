"""Votes of people between pictures of models, pair by pair (Ramesh et al. 2021, §3.1 and App. F).

A voter sees the pictures of two models for a caption, and chooses one or neither, for each question. Some pairs are
checks: the second picture is a blurred copy of the first. A majority of voters decides a pair. `tables` gives
majorities, strengths of the models (Bradley & Terry), agreement, and the voters with their checks; majorities and
strengths once with all voters, and once without careless ones.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from limner.atomic_io import require_file
from limner.errors import UserError
from limner.evaluation.confidence import Estimate, proportion
from limner.evaluation.result import EvalResult
from limner.metrics.preferences import EQUAL, fit_strengths, krippendorff_alpha

__all__ = ["CHECK", "QUESTIONS", "Choice", "Vote", "VoteStore", "tables"]

Choice = Literal["first", "second", "equal"]
QUESTIONS = {"realism": "Which picture looks more realistic?", "caption": "Which picture shows the caption better?"}
CHECK = "blurred copy"  # in place of the second model of a check
_OUTCOMES: dict[Choice, int] = {"first": 0, "second": 1, "equal": EQUAL}
_MIN_CHECKS, _MIN_RIGHT = 3, 0.75  # of the checks of a careful voter
_MIN_SECONDS = 1.0  # median of a careful voter's votes
_MIN_SHARED, _MIN_AGREEMENT = 10, 0.4  # with the majority of other voters, on pairs that these decided


class Vote(NamedTuple):
    """A voter's choice for a question about a pair, with the seconds it took."""

    voter: str
    pair: str
    first: str
    second: str
    question: str
    choice: Choice
    seconds: float


class VoteStore:
    """Votes in an SQLite file, each safe on disk when `add` returns. The file is read once."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, and read it. Raises `UserError` if it is not a file of votes."""
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS votes (voter TEXT, pair TEXT, first TEXT, second TEXT, question TEXT, "
                "choice TEXT, seconds REAL, PRIMARY KEY (voter, pair, question))"
            )
            rows = self._db.execute(f"SELECT {', '.join(Vote._fields)} FROM votes ORDER BY pair, voter").fetchall()
        except sqlite3.Error as error:
            raise UserError(f"{path} is not a file of votes ({error}): name another file") from None
        votes = [Vote(*row) for row in rows]
        known = [vote for vote in votes if vote.question in QUESTIONS and vote.choice in _OUTCOMES]
        self._votes = {(vote.voter, vote.pair, vote.question): vote for vote in known}

    @classmethod
    def read(cls, path: Path) -> list[Vote]:
        """Return all votes of a file. Raises `UserError`."""
        require_file(path)
        return cls(path).votes()

    def add(self, vote: Vote) -> None:
        """Store a vote, in place of an earlier one of the voter for the same question."""
        self._db.execute(f"INSERT OR REPLACE INTO votes VALUES ({', '.join('?' * len(vote))})", vote)
        self._votes[vote.voter, vote.pair, vote.question] = vote

    def votes(self) -> list[Vote]:
        """Return all votes: those of the file in the order of pairs and voters, then those added."""
        return list(self._votes.values())


def tables(votes: Sequence[Vote]) -> list[EvalResult]:
    """Return majorities, strengths, agreement and voters. Raises `UserError` without votes."""
    real = [vote for vote in votes if vote.second != CHECK]
    if not real:
        raise UserError("the file contains no votes: collect some with `limner vote`")
    voters = _voters(votes)
    careless = {name for name, row in voters.items() if row["careless"].value}
    results = _results(real, "all voters")
    if careless and (careful := [vote for vote in real if vote.voter not in careless]):
        results += _results(careful, f"without {len(careless)} careless voters")
    rows = {name: {key: cell for key, cell in row.items() if key != "careless"} for name, row in voters.items()}
    named = {f"{name} (careless)" if name in careless else name: row for name, row in rows.items()}
    return [*results, EvalResult(title="voters", rows=named)]


def _results(votes: Sequence[Vote], who: str) -> list[EvalResult]:
    majorities, strengths, by_question = {}, {}, _group(votes, lambda vote: vote.question)
    for question in filter(by_question.get, QUESTIONS):
        asked = by_question[question]
        for names, group in _by_models(asked):
            majorities[f"{question}: {names[0]} over {names[1]}"] = _majority(group, names[0])
        models = sorted({name for vote in asked for name in (vote.first, vote.second)})
        pairs = np.array([[models.index(vote.first), models.index(vote.second)] for vote in asked])
        fitted = fit_strengths(pairs, np.array([_OUTCOMES[vote.choice] for vote in asked]), len(models))
        for name, value, error in zip(models, fitted.values, fitted.errors, strict=True):
            low, high = value - 1.96 * error, value + 1.96 * error
            strengths.setdefault(name, {})[question] = Estimate(value=value, spec="+.2f", low=low, high=high)
    return [
        EvalResult(title=f"pairs by the majority of their votes, {who}", rows=majorities),
        EvalResult(title=f"strengths of models, log-odds, {who}", rows=strengths),
    ]


def _majority(votes: Sequence[Vote], model: str) -> dict[str, Estimate]:
    """Return the share of decided pairs that `model` won, if there are any; a pair without a majority is undecided."""
    wins, groups = [], _group(votes, lambda vote: vote.pair).items()
    pairs = {p: ["equal" if v.choice == "equal" else getattr(v, v.choice) for v in group] for p, group in groups}
    for choices in pairs.values():
        counts = Counter({"equal": 0, **Counter(choices)})
        (best, most), *others = counts.most_common()
        if best != "equal" and all(count < most for _, count in others):
            wins.append(float(best == model))
    share = {"won": proportion(np.array(wins), [str(i) for i in range(len(wins))])} if wins else {}
    return {
        **share,
        "decided": Estimate(value=len(wins), spec=",.0f"),
        "pairs": Estimate(value=len(pairs), spec=",.0f"),
        "votes": Estimate(value=len(votes), spec=",.0f"),
        "agreement (alpha)": Estimate(value=krippendorff_alpha(list(pairs.values()))),
    }


def _voters(votes: Sequence[Vote]) -> dict[str, dict[str, Estimate]]:
    """Return each voter's checks. "careless" is 1 for voters that miss checks, vote too fast or at random."""
    rows = {}
    by_question = _group(votes, lambda vote: vote.question)
    by_pair = {question: _group(group, lambda vote: vote.pair) for question, group in by_question.items()}
    for name, own in sorted(_group(votes, lambda vote: vote.voter).items()):
        checks = [vote.choice == "first" for vote in own if vote.second == CHECK and vote.question == "realism"]
        agreed = []
        for vote in own:
            others = Counter(v.choice for v in by_pair[vote.question][vote.pair] if v.voter != name)
            ranked = others.most_common(2)
            if vote.second != CHECK and ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]):
                agreed.append(vote.choice == ranked[0][0])
        seconds = median(vote.seconds for vote in own)
        careless = (
            (len(checks) >= _MIN_CHECKS and np.mean(checks) < _MIN_RIGHT)
            or seconds < _MIN_SECONDS
            or (len(agreed) >= _MIN_SHARED and np.mean(agreed) < _MIN_AGREEMENT)
        )
        rows[name] = {
            "votes": Estimate(value=len(own), spec=",.0f"),
            "seconds": Estimate(value=seconds, spec=".1f"),
            "checks right": Estimate(value=sum(checks), spec=".0f", total=len(checks)),
            "careless": Estimate(value=float(careless)),
        }
        if agreed:
            rows[name]["with the majority of others"] = Estimate(value=float(np.mean(agreed)), spec=".0%")
    return rows


def _by_models(votes: Sequence[Vote]) -> Iterable[tuple[tuple[str, str], list[Vote]]]:
    models = sorted({name for vote in votes for name in (vote.first, vote.second)})
    for names in combinations(models, 2):
        if group := [vote for vote in votes if {vote.first, vote.second} == set(names)]:
            yield names, group


def _group(votes: Iterable[Vote], key) -> dict[str, list[Vote]]:
    groups = defaultdict[str, list[Vote]](list)
    for vote in votes:
        groups[key(vote)].append(vote)
    return groups
