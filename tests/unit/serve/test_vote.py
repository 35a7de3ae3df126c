"""The order of questions for voters, and pairs of folders."""

import io
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from limner.errors import UserError
from limner.evaluation.votes import CHECK, QUESTIONS, Vote, VoteStore
from limner.serve.vote import CHECK_EVERY, create_app, find_pairs, next_question


def folders(root: Path, models: str = "ab", pictures: int = 12) -> list[Path]:
    for m, model in enumerate(models):
        (root / model).mkdir()
        for i in range(pictures):
            info = PngInfo()
            info.add_text("caption", f"caption {i}")
            info.add_text("model", model)
            noise = np.random.default_rng([m, i]).integers(256, size=(24, 24, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / model / f"{i}.png", pnginfo=info)
    return [root / model for model in models]


def vote(client: TestClient, asked: dict, choice: str, voter: str = "Anna") -> dict:
    body = {"voter": voter, "pair": asked["pair"], "question": asked["question"], "choice": choice, "seconds": 2.0}
    answer = client.post("/vote", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def client(tmp_path):
    store = VoteStore(tmp_path / "votes.sqlite")
    pairs = find_pairs(folders(tmp_path))
    with TestClient(create_app(pairs, store, voters=2), base_url="http://localhost") as client:
        client.pairs, client.store = pairs, store
        yield client


def test_pairs_are_pictures_of_the_same_name_with_checks(tmp_path):
    pairs = find_pairs(folders(tmp_path, "abc", 12))
    real = [pair for pair in pairs if pair.second != CHECK]
    assert len(real) == 3 * 12 and len(pairs) - len(real) == -(-len(real) // CHECK_EVERY)
    assert {pair.caption for pair in real} == {f"caption {i}" for i in range(12)}
    assert 0 < sum(pair.first < pair.second for pair in real) < len(real)  # either model may be the first
    with pytest.raises(UserError, match="two folders"):
        find_pairs([tmp_path / "a"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no picture has the same name"):
        find_pairs([tmp_path / "a", tmp_path / "empty"])


def test_voters_answer_both_questions_of_each_pair_and_continue_later(client):
    asked, seen = client.post("/next", json={"voter": "Anna"}).json(), []
    for step in range(100):
        if "question" not in asked:
            break
        if step == 5:  # the page is opened again
            assert client.post("/next", json={"voter": "Anna"}).json() == asked
        seen.append((asked["pair"], asked["question"]))
        asked = vote(client, asked, ("first", "second", "equal")[step % 3])
    assert sorted(seen) == sorted((i, question) for i in range(len(client.pairs)) for question in QUESTIONS)
    assert all(a[0] == b[0] for a, b in zip(seen[::2], seen[1::2], strict=True))  # both in a row
    assert asked == {"done": len(client.pairs)} and len(client.store.votes()) == len(seen)


def test_a_pair_with_enough_voters_is_left_out_for_others(client):
    pairs = client.pairs
    votes = [
        Vote(voter, pair.name, pair.first, pair.second, question, "first", 1.0)
        for voter in ("x", "y") for pair in pairs[:5] for question in QUESTIONS
    ]  # fmt: skip
    asked = set()
    while not isinstance(question := next_question(pairs, votes, "z", 2), int):
        pair = pairs[question.pair]
        asked.add(question.pair)
        votes.append(Vote("z", pair.name, pair.first, pair.second, question.question, "equal", 1.0))
    assert asked == set(range(5, len(pairs)))


def test_orders_and_sides_differ_between_voters(client):
    asked = [client.post("/next", json={"voter": f"voter {i}"}).json() for i in range(20)]
    assert len({question["pair"] for question in asked}) > 5 and {q["left"] for q in asked} == {"first", "second"}


def test_pictures_do_not_tell_their_model(client):
    shown = client.get("/pictures/0/first")
    assert shown.headers["content-type"] == "image/png" and b"caption" not in shown.content
    original = np.asarray(Image.open(client.pairs[0].files[0]))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(shown.content))), original)
    check = next(i for i, pair in enumerate(client.pairs) if pair.second == CHECK)
    sharp, blurred = (
        np.asarray(Image.open(io.BytesIO(client.get(f"/pictures/{check}/{place}").content))).astype(float)
        for place in ("first", "second")
    )
    assert blurred.std() < 0.6 * sharp.std()


def test_bad_requests_are_one_sentence_and_change_nothing(client):
    good = {"voter": "Anna", "pair": 0, "question": "realism", "choice": "first", "seconds": 1.0}
    for change in (
        {"voter": ""}, {"voter": " "}, {"voter": "x" * 41}, {"pair": -1}, {"pair": 10**6}, {"pair": "0"},
        {"question": "other"}, {"choice": "left"}, {"seconds": -1.0}, {"seconds": None}, {"more": 1},
    ):  # fmt: skip
        answer = client.post("/vote", json={**good, **change})
        assert answer.status_code == 400 and answer.json()["error"]["message"], change
    assert client.get("/pictures/0/third").status_code == 400 and client.get("/pictures/99/first").status_code == 400
    assert client.post("/next", json={"voter": "Anna"}, headers={"host": "evil.example"}).status_code == 403
    assert client.store.votes() == []
