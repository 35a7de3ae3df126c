"""Tables of votes whose majorities are known, and the file of votes."""

import sqlite3

import pytest

from limner.errors import UserError
from limner.evaluation.votes import CHECK, Vote, VoteStore, tables


def vote(
    voter: str, pair: int, choice: str, second: str = "b", seconds: float = 3.0, question: str = "realism"
) -> Vote:
    return Vote(voter, f"{pair}/{second}", "a", second, question, choice, seconds)


def careful(choices: dict[int, str]) -> list[Vote]:
    """Votes of five people that agree on each pair."""
    return [vote(f"voter {i}", pair, choice) for i in range(5) for pair, choice in choices.items()]


def test_the_majority_decides_a_pair():
    votes = careful(dict.fromkeys(range(8), "first") | {8: "second", 9: "equal"})
    votes += [vote("voter 9", pair, "second") for pair in range(3)]
    majorities, strengths, voters = tables(votes)
    row = majorities.rows["realism: a over b"]
    assert (row["won"].right, row["won"].total) == (8, 9) and row["won"].low < 8 / 9 < row["won"].high
    assert (row["decided"].value, row["pairs"].value, row["votes"].value) == (9, 10, 53)
    assert 0.3 < row["agreement (alpha)"].value < 1
    a, b = (strengths.rows[name]["realism"] for name in "ab")
    assert a.low > 0 > b.high and a.value == pytest.approx(-b.value)
    assert len(voters.rows) == 6 and "all voters" in majorities.table()


def test_two_choices_of_equal_number_do_not_decide_a_pair():
    votes = [vote("x", 0, "first"), vote("y", 0, "second"), vote("x", 1, "first"), vote("y", 1, "equal")]
    row = tables(votes)[0].rows["realism: a over b"]
    assert row["decided"].value == 0 and "won" not in row


def test_agreement_is_that_of_the_two_models():
    votes = careful(dict.fromkeys(range(8), "first") | {8: "second"})
    votes += [vote(f"voter {i}", pair, ("first", "second")[(i + pair) % 2], "c") for i in range(4) for pair in range(6)]
    rows = tables(votes)[0].rows
    assert (
        rows["realism: a over b"]["agreement (alpha)"].value == 1 > rows["realism: a over c"]["agreement (alpha)"].value
    )


@pytest.mark.parametrize(
    "bad",
    [
        [vote("bad", 100 + i, "second", CHECK) for i in range(4)],
        [vote("bad", i, "first", seconds=0.2) for i in range(10)],
        [vote("bad", i, "second") for i in range(12)],
    ],
)
def test_careless_voters_are_left_out_of_a_second_table(bad):
    votes = careful(dict.fromkeys(range(12), "first")) + bad
    results = tables(votes)
    assert "bad (careless)" in results[-1].rows and len(results[-1].rows) == 6
    assert "without 1 careless" in results[2].title
    assert results[2].rows["realism: a over b"]["votes"].value == 60
    assert CHECK not in results[0].table()


def test_a_careful_voter_who_misses_one_check_stays():
    votes = careful(dict.fromkeys(range(12), "first"))
    votes += [vote("voter 1", 100 + i, "first" if i else "equal", CHECK) for i in range(5)]
    results = tables(votes)
    assert len(results) == 3 and results[-1].rows["voter 1"]["checks right"].value == 4


def test_votes_survive_in_the_file_and_are_replaced_by_later_ones(tmp_path):
    path = tmp_path / "votes.sqlite"
    store = VoteStore(path)
    store.add(vote("x", 0, "first"))
    store.add(vote("x", 0, "second"))
    store.add(vote("x", 1, "first"))
    assert store.votes() == VoteStore.read(path) == [vote("x", 0, "second"), vote("x", 1, "first")]


def test_the_file_is_read_once(tmp_path):
    VoteStore(tmp_path / "votes.sqlite").add(vote("x", 0, "first"))
    store, statements = VoteStore(tmp_path / "votes.sqlite"), []
    store._db.set_trace_callback(statements.append)
    assert store.votes() == [vote("x", 0, "first")]
    store.add(vote("y", 0, "second"))
    assert len(store.votes()) == 2 and [s.split()[0] for s in statements] == ["INSERT"]


def test_other_files_are_one_sentence(tmp_path):
    (tmp_path / "text").write_text("no database" * 100)
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE votes (a)")
    other.close()
    store = VoteStore(tmp_path / "damaged")
    for i in range(400):
        store.add(vote("x", i, "first"))
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = (tmp_path / "damaged").read_bytes()
    (tmp_path / "damaged").write_bytes(data[: len(data) // 2] + b"\xff" * (len(data) // 2))
    for name in ("text", "other", "damaged"):
        with pytest.raises(UserError, match="is not a file of votes"):
            VoteStore.read(tmp_path / name)
    with pytest.raises(UserError, match="contains no votes"):
        tables([vote("x", 0, "first", CHECK)])
