"""Recording by a hook of the training loop."""

import pytest
import torch
from torch import nn

from limner.errors import UserError
from limner.numerics.precision import Fp32
from limner.profiling.analysis import analyze
from limner.profiling.recording import ProfileRecorder, parse_steps
from limner.profiling.trace import read_traces
from limner.profiling.url import Url, path_or_url
from limner.training.config import TrainConfig
from limner.training.loop import train
from limner.training.train_state import TrainState


class Numbers:
    """A stream of random rows."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(self.position))}

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def shard(self, rank, world):
        pass


def objective(model, batch, step, generator):
    return model(batch["x"]).square().mean(), {}


def run(folder, steps, hooks=()):
    torch.manual_seed(0)
    state = TrainState(
        nn.Linear(16, 16), objective, TrainConfig(steps=steps, log_every=1, accumulate=2, precision=Fp32())
    )
    train(state, Numbers(), folder, hooks=hooks)
    return [p.detach().clone() for p in state.model.parameters()]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    weights = run(folder / "run", 6, [ProfileRecorder(folder / "profile", 2, 4, stacks=True)])
    return folder, weights, read_traces([folder / "profile"])[0]


def test_the_steps_and_their_spans_are_recorded(recorded):
    _, _, trace = recorded
    assert [step.number for step in trace.steps] == [3, 4]  # as the log counts them
    spans = [e.name for e in trace.events if e.name.startswith("limner:")]
    per_step = ["input", *["forward", "backward"] * 2, "reduction", "update"]
    assert spans == [f"limner:{name}" for name in per_step * 2]


def test_the_report_names_lines_and_parts_of_the_step(recorded):
    report = analyze([recorded[2]])
    linear = next(row for row in report["operators"] if row["name"] == "aten::linear")
    assert linear["calls"] == 4 and "test_recording.py:" in linear["source"]
    assert {holder["phase"] for holder in report["memory"][0]["holders"]} <= {
        "input", "forward", "backward", "reduction", "update", "other"
    }  # fmt: skip
    assert report["memory"][0]["peak"] == report["memory"][0]["before"] + report["memory"][0]["live"] > 0


def test_recording_does_not_change_the_weights(recorded, tmp_path):
    assert all(map(torch.equal, recorded[1], run(tmp_path, 6)))


def test_a_run_that_ends_early_writes_the_steps_so_far(tmp_path):
    run(tmp_path / "run", 3, [ProfileRecorder(tmp_path / "profile", 2, 9)])
    assert [step.number for step in read_traces([tmp_path / "profile"])[0].steps] == [3]


def test_a_trace_at_a_url_has_the_steps(tmp_path):
    run(tmp_path, 4, [ProfileRecorder(path_or_url("memory://recorded/prior"), 2, 4)])
    (trace,) = read_traces(["memory://recorded/prior"])
    assert str(trace.path) == "memory://recorded/prior/rank0.json.gz"
    assert [step.number for step in trace.steps] == [3, 4]


def test_training_continues_if_a_url_cannot_be_written(recorded, tmp_path):
    with pytest.warns(
        UserWarning, match=r"the trace of rank 0 is lost: gone://prior/rank0\.json\.gz cannot be written"
    ):
        weights = run(tmp_path, 6, [ProfileRecorder(Url("gone://prior", None, "prior"), 2, 4)])
    assert all(map(torch.equal, recorded[1], weights))


def test_a_run_without_the_steps_warns(tmp_path):
    with pytest.warns(UserWarning, match="no step from 5 to 7"):
        run(tmp_path / "run", 3, [ProfileRecorder(tmp_path / "profile", 5, 7)])
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("text", ["", "3", "0:2", "5:5", "5:4", "1:999", "1:2:3", "a:b", "-1:3", "٣:٥"])
def test_invalid_steps_are_one_sentence(text):
    with pytest.raises(UserError, match="give two steps such as 10:13"):
        parse_steps(text)
    assert parse_steps("10:13") == (10, 13)
