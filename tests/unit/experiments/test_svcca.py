"""SVCCA has the invariances of its definition; the recorder keeps what the model computes; the claim can fail."""

import pytest
import torch

from limner.experiments import load, sweep
from limner.experiments.svcca import SCENES, BlockRecorder, svcca_similarity
from limner.experiments.tiny_models import PRIOR, held_out, train_prior
from toy_sweeps import reproduce

ROWS, WIDTH = 2_000, 12


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def activations(seed, decay=0.8):
    """Columns with falling variances, rotated, with an offset."""
    scales = decay ** torch.arange(WIDTH, dtype=torch.float64)
    return normal(seed, ROWS, WIDTH) * scales @ torch.linalg.qr(normal(seed + 1, WIDTH, WIDTH))[0] + normal(9, WIDTH)


def related(seed):
    """Activations that share some of their variance with `activations(seed)`."""
    return activations(seed) @ normal(5, WIDTH, WIDTH) + 2 * activations(seed + 20)


def by_whitening(x, y, share):
    """The definition: principal components, covariances, inverse square roots."""

    def components(x):
        x = x - x.mean(0)
        variances, directions = torch.linalg.eigh(x.mT @ x)
        variances, directions = variances.flip(0), directions.flip(1)
        count = next(k for k in range(1, WIDTH + 1) if variances[:k].sum() >= share * variances.sum())
        return x @ directions[:, :count]

    def inverse_root(matrix):
        variances, directions = torch.linalg.eigh(matrix)
        return directions @ torch.diag(variances**-0.5) @ directions.mT

    x, y = components(x), components(y)
    assert share == 1 or x.shape[1] < WIDTH  # the reduction matters
    return torch.linalg.svdvals(inverse_root(x.mT @ x) @ (x.mT @ y) @ inverse_root(y.mT @ y)).mean().item()


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", range(3))
def test_the_similarity_is_that_of_whitened_principal_components(seed, share):
    x, y = activations(seed, 0.6), related(seed)
    assert svcca_similarity(x, y, share) == pytest.approx(by_whitening(x, y, share), abs=1e-9)
    assert svcca_similarity(x, y, share) == pytest.approx(svcca_similarity(y, x, share), abs=1e-9)


def test_rotation_scale_and_offset_do_not_matter():
    x, y = activations(0), related(0)
    rotated = -3 * x @ torch.linalg.qr(normal(7, WIDTH, WIDTH))[0] + 5
    assert svcca_similarity(rotated, y) == pytest.approx(svcca_similarity(x, y), abs=1e-9)
    assert 0.2 < svcca_similarity(x, y) < 0.9


def test_invertible_maps_matter_only_for_the_choice_of_directions():
    x, y, mixed = activations(0), related(0), activations(0) @ normal(8, WIDTH, WIDTH)
    assert svcca_similarity(mixed, y, 1.0) == pytest.approx(svcca_similarity(x, y, 1.0), abs=1e-9)
    squeezed = x @ torch.diag(torch.logspace(0, -4, WIDTH, dtype=torch.float64))
    assert abs(svcca_similarity(squeezed, y) - svcca_similarity(x, y)) > 0.01


def test_equal_activations_have_one_and_noise_little():
    x = activations(0)
    assert svcca_similarity(x, x) == pytest.approx(1, abs=1e-9)
    assert svcca_similarity(normal(1, ROWS, WIDTH), normal(2, ROWS, WIDTH)) < 2 * (WIDTH / ROWS) ** 0.5


def test_directions_with_little_variance_are_left_out():
    """A part that changes completely counts if it holds more than 1% of the variance."""
    x, noise = normal(0, ROWS, 4), normal(1, 2, ROWS, 4)
    for scale, similarity in ((0.01, 1.0), (1.0, 0.5)):
        pair = [torch.cat([x, scale * other], 1) for other in noise]
        assert svcca_similarity(*pair) == pytest.approx(similarity, abs=0.05)


def test_snapshots_hold_the_outputs_of_blocks_and_leave_training_unchanged():
    recorder = BlockRecorder(2)
    run, losses = train_prior(model=PRIOR, seed=0, steps=3, batch=4, hooks=lambda run: [recorder])
    recorder.record(run)
    assert len(recorder.snapshots) == 3 and all(len(snapshot) == PRIOR.depth for snapshot in recorder.snapshots)
    outputs: list[torch.Tensor] = []
    for block in run.model.blocks:
        block.register_forward_hook(lambda _, args, x: outputs.append(x))
    batch = held_out(SCENES)
    with torch.no_grad():
        _, logits = run.model(**batch)
        for x, kept in zip(outputs, recorder.snapshots[-1], strict=True):
            torch.testing.assert_close(run.model.outputs(x, batch["text"])[1].flatten(0, 1), kept)
        torch.testing.assert_close(run.model.head.image(recorder.snapshots[-1][-1]), logits.flatten(0, 1))
    assert not torch.equal(recorder.snapshots[0][0], recorder.snapshots[-1][0])
    assert train_prior(model=PRIOR, seed=0, steps=3, batch=4, hooks=lambda run: [])[1] == losses


def cell(*areas):
    """Blocks whose similarity is constant until the end."""
    return {"loss": [1.0] * 300, "similarity": [[0.1] * len(areas), *[list(areas)] * 3, [1.0] * len(areas)]}


@pytest.mark.parametrize(
    ("areas", "holds"),
    [
        ((0.9, 0.8, 0.8, 0.6, 0.5, 0.4), True),
        ((0.9, 0.8, 0.3, 0.3, 0.5, 0.4), True),
        ((0.4, 0.5, 0.6, 0.6, 0.7, 0.8), False),
    ],
)
def test_the_claim_holds_and_fails(areas, holds, monkeypatch, tmp_path):
    finding = reproduce("svcca", [cell(*areas)], monkeypatch, tmp_path)
    assert finding.holds is holds
    assert [row[0] for row in finding.rows] == [1, 2, 3, 4, 5, 6]
    assert [curve[-1] for curve in finding.curves["similarity with the final state, mean of seeds"].values()] == [
        (100, 1.0)
    ] * 6


def test_the_claim_is_undecided_if_seeds_disagree(monkeypatch, tmp_path):
    up, down = cell(0.9, 0.8, 0.8, 0.6, 0.5, 0.4), cell(0.4, 0.5, 0.6, 0.6, 0.8, 0.9)
    monkeypatch.setattr(sweep, "run_trials", lambda folder, trial, settings, workers: [up, down] * (len(settings) // 2))
    assert load("svcca").reproduce(tmp_path, False).holds is None
