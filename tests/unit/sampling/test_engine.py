"""The engine: requests come and go, clients take turns, and an error or a cancelled request leaves the others alone."""

import pytest
import torch

from limner.errors import UserError
from limner.sampling import inference
from limner.sampling.engine import Job
from limner.sampling.generation_config import Sampler
from tiny import tiny_pipe

CAPTIONS = ["red circle", "blue square", "green star"]


@pytest.fixture
def pipe():
    return tiny_pipe()


def submit(pipe, caption: str, candidates: int = 2, **settings) -> Job:
    return pipe.engine.submit(pipe.request(caption, candidates, sampler=Sampler(), **{"seed": 0, **settings}))


def finish(pipe, jobs: list[Job]) -> None:
    for _ in range(10_000):
        if all(job.done for job in jobs):
            return
        pipe.engine.step()
    raise AssertionError("the jobs do not end")


def test_requests_that_join_between_steps_get_what_they_get_alone(pipe):
    jobs = []
    for i, caption in enumerate(CAPTIONS):
        jobs.append(submit(pipe, caption, 1 + i, seed=i))
        for _ in range(3):
            pipe.engine.step()
    finish(pipe, jobs)
    for i, (caption, job) in enumerate(zip(CAPTIONS, jobs, strict=True)):
        alone = pipe.candidates([caption], 1 + i, seed=i)
        assert torch.equal(job.tokens, alone.tokens[0]) and torch.equal(job.pictures, alone.pictures[0])
        torch.testing.assert_close(job.scores, alone.scores[0])


def test_clients_take_turns_when_more_wait_than_fit(pipe, monkeypatch):
    monkeypatch.setattr(inference, "MAX_CPU_BATCH", 2)
    many = [submit(pipe, CAPTIONS[0], 2, seed=i, client="a") for i in range(6)]
    one = submit(pipe, CAPTIONS[1], 2, client="b")
    order = []
    for _ in range(10_000):
        pipe.engine.step()
        order += [job for job in (*many, one) if job.done and job not in order]
        if len(order) == 7:
            break
    assert order == [many[0], one, *many[1:]]


def test_a_cancelled_request_leaves_and_the_others_stay_the_same(pipe):
    alone = pipe.candidates(CAPTIONS[1:2], 3, seed=5)
    jobs = [submit(pipe, caption, 3, seed=5) for caption in CAPTIONS]
    pipe.engine.step()
    pipe.engine.cancel(jobs[0])
    waiting = submit(pipe, CAPTIONS[0])
    pipe.engine.cancel(waiting)  # before it joined
    finish(pipe, jobs[1:])
    assert torch.equal(jobs[1].tokens, alone.tokens[0])
    assert not jobs[0].done and not waiting.done
    assert pipe.engine._batch.size == 0 and not pipe.engine._running and not pipe.engine._waiting


def test_an_exception_while_drawing_cancels_the_requests_of_the_call(pipe):
    def stop(drawn: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe(CAPTIONS[0], candidates=4, progress=stop)
    assert pipe.engine._batch.size == 0 and not pipe.engine._running
    assert len(pipe(CAPTIONS[0], candidates=4)) == 1


def test_scores_that_are_not_finite_are_the_error_of_their_request(pipe):
    with torch.no_grad():
        for weight in pipe.contrastive.parameters():
            weight.fill_(torch.nan)
    job = submit(pipe, CAPTIONS[0])
    finish(pipe, [job])
    assert isinstance(job.error, UserError) and "not finite" in str(job.error)
    with pytest.raises(UserError, match="not finite"):
        pipe(CAPTIONS[0], candidates=2)


def test_a_request_with_logits_that_are_not_finite_fails_alone(pipe):
    jobs = [submit(pipe, caption) for caption in CAPTIONS]
    pipe.engine.step()
    with torch.inference_mode():
        pipe.engine._running[1].generation.rows.finite.fill_(False)
    finish(pipe, jobs)
    assert [job.error is None for job in jobs] == [True, False, True]
    expected = pipe.candidates(CAPTIONS[2:], 2, seed=0)
    assert torch.equal(jobs[2].tokens, expected.tokens[0])


def test_only_the_first_candidates_have_previews(pipe, monkeypatch):
    monkeypatch.setattr(inference, "MAX_CPU_BATCH", 2)  # candidates 0 and 1, then 2 and 3, then 4
    seen = []

    def preview(numbers: range, pictures: torch.Tensor) -> None:
        seen.append(numbers)
        assert len(pictures) == len(numbers)

    finish(pipe, [submit(pipe, CAPTIONS[0], 5, on_preview=preview, preview_first=3)])
    assert set(seen) == {range(2), range(2, 3)}


def test_a_single_request_joins_many_rows_after_a_few_steps(pipe):
    many = submit(pipe, CAPTIONS[0], 16)
    pipe.engine.step()
    one, two = submit(pipe, CAPTIONS[1], 1), submit(pipe, CAPTIONS[2], 1)
    steps = 0
    while one.parts[0].generation is None:
        pipe.engine.step()
        steps += 1
    assert 1 < steps <= 5 and two.parts[0].generation is not None  # both have joined at the same time
    finish(pipe, [many, one, two])
