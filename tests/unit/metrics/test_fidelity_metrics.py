"""Distances of features, against closed forms, plain definitions and torchmetrics."""

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import poly_mmd

from limner.errors import UserError
from limner.metrics.features import Features
from limner.metrics.fidelity import METRICS, compare
from limner.metrics.frechet import frechet_distance
from limner.metrics.inception_score import InceptionScore
from limner.metrics.kernel import kernel
from limner.metrics.manifold import NEIGHBORS
from limner.metrics.moments import Moments


def sample(n, d, seed, shift=0.0):
    """Correlated features."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5
    return torch.randn(n, d, generator=generator, dtype=torch.float64) @ mixing + shift


def values(drawn, real, weights=None):
    found = compare(drawn, real, "x", weights)
    return {name.removesuffix("[x]"): value for name, value in found.items()}


def test_the_frechet_distance_is_that_of_torchmetrics_on_the_same_features():
    class Identity(nn.Module):
        num_features = 48

        def forward(self, x):
            return x

    x, y = sample(300, 48, 0), sample(500, 48, 1, 0.3)
    metric = FrechetInceptionDistance(feature=Identity(), normalize=True, input_img_size=(48,))
    metric.set_dtype(torch.float64)
    metric.update(x, real=False)
    metric.update(y, real=True)
    theirs = metric.compute()
    assert theirs.dtype == torch.float64
    assert frechet_distance(Moments.of(x), Moments.of(y)) == pytest.approx(theirs.item(), rel=1e-8)
    assert values(Features(x), Features(y))["fid"].item() == pytest.approx(theirs.item(), rel=1e-8)


def test_the_frechet_distance_of_gaussians_is_the_closed_form():
    def gaussian(mean, deviations, rotation):
        return Moments(101, mean, 100 * rotation @ torch.diag(deviations**2) @ rotation.T)

    rotation = torch.linalg.qr(sample(20, 20, 0)).Q
    a, b = torch.rand(2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    m, n = sample(2, 20, 2)
    # commuting covariances: |m - n|^2 + sum (a - b)^2
    expected = float((m - n).square().sum() + (a - b).square().sum())
    assert frechet_distance(gaussian(m, a, rotation), gaussian(n, b, rotation)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("n", [12, 40, 400])
def test_a_set_has_the_distance_0_of_itself(n):
    x = 10 * sample(n, 64, n)  # of lower rank, too
    assert 0 <= frechet_distance(Moments.of(x), Moments.of(x)) < 1e-6
    found = values(Features(x), Features(x))
    assert 0 <= found["fid"].item() < 1e-6
    assert found["precision"] == found["recall"] == found["coverage"] == 1


def test_the_frechet_distance_is_symmetric_and_its_bias_falls_with_pictures():
    x, y = sample(900, 16, 3), sample(80, 16, 4, 0.5)
    assert frechet_distance(Moments.of(x), Moments.of(y)) == pytest.approx(
        frechet_distance(Moments.of(y), Moments.of(x)), rel=1e-9
    )
    floors = [frechet_distance(Moments.of(x[:n]), Moments.of(x[450 : 450 + n])) for n in (50, 450)]
    assert floors[0] > 4 * floors[1] > 0


def test_the_extrapolated_distance_of_gaussians_has_less_bias():
    """Two distributions whose distance is 32 x 0.5^2 = 8; the reference is large."""
    real = Features(torch.randn(40_000, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5)
    metrics, found = {name: METRICS[name] for name in ("fid", "fid-infinity")}, {"fid": [], "fid-infinity": []}
    statistics = METRICS["fid"].statistics
    for seed in range(40):
        drawn = Features(torch.randn(300, 32, generator=torch.Generator().manual_seed(1 + seed), dtype=torch.float64))
        for name, metric in metrics.items():
            found[name].append(metric.values(statistics(drawn, real), torch.ones(1, 300))[name].item())
    bias = {name: np.mean(values) - 8 for name, values in found.items()}
    error = {name: np.std(values) / len(values) ** 0.5 for name, values in found.items()}
    assert bias["fid"] > 3 * error["fid"] and abs(bias["fid-infinity"]) < 3 * error["fid-infinity"]
    assert abs(bias["fid-infinity"]) < bias["fid"] / 5
    few = Features(real.values[:127])
    assert metrics["fid-infinity"].values(statistics(few, real), torch.ones(1, 127)) == {}


def test_streamed_and_merged_moments_are_those_of_all_features():
    x = sample(1_000, 8, 5, shift=1e4).float()  # far from 0, where raw moments lose their digits
    whole = Moments.of(x)
    parts = Moments.of(iter(x.split(170))) + Moments.of(sample(10, 8, 6))
    assert whole.count == 1_000 and parts.count == 1_010
    np.testing.assert_allclose(whole.covariance, np.cov(x.double().numpy().T), rtol=1e-9)
    both = np.concatenate([x.double().numpy(), sample(10, 8, 6).numpy()])
    np.testing.assert_allclose(parts.covariance, np.cov(both.T), rtol=1e-9)
    np.testing.assert_allclose(parts.mean, both.mean(0), rtol=1e-12)


def test_statistics_of_a_file_replace_real_features(tmp_path):
    x, y, path = sample(60, 8, 16), sample(500, 8, 17, 0.3).numpy(), tmp_path / "statistics.npz"
    np.savez(path, mu=y.mean(0), sigma=np.cov(y.T))
    found = compare(Features(x), Moments.from_file(path), "x")
    assert list(found) == ["fid[x]", "fid-infinity[x]"]
    assert found["fid[x]"].item() == pytest.approx(frechet_distance(Moments.of(x), Moments.of(torch.from_numpy(y))))
    with pytest.raises(UserError, match="drawings have 7 features and real pictures 8"):
        compare(Features(x[:, :7]), Moments.from_file(path), "x")


WRONG_STATISTICS = {
    "no sigma": {"mu": np.zeros(3)},
    "other sizes": {"mu": np.zeros(3), "sigma": np.eye(4)},
    "a number": {"mu": np.zeros(()), "sigma": np.zeros(())},
    "nothing": {"mu": np.zeros(0), "sigma": np.zeros((0, 0))},
    "not finite": {"mu": np.full(3, np.nan), "sigma": np.eye(3)},
    "not symmetric": {"mu": np.zeros(2), "sigma": np.array([[1.0, 2], [0, 1]])},
    "a pickle": {"mu": np.array([{}], object), "sigma": np.eye(1)},
    "texts": {"mu": np.array(["a"]), "sigma": np.eye(1)},
}


@pytest.mark.parametrize("name", [*WRONG_STATISTICS, "cut", "other bytes", "too large"])
def test_a_file_without_statistics_raises_a_sentence(name, tmp_path, monkeypatch):
    path = tmp_path / "statistics.npz"
    np.savez(path, **WRONG_STATISTICS.get(name, {"mu": np.zeros(3), "sigma": np.eye(3)}))
    if name == "cut":
        path.write_bytes(path.read_bytes()[:200])
    elif name == "other bytes":
        path.write_bytes(b"\x80\x04N.")  # a pickle without an archive
    elif name == "too large":
        monkeypatch.setattr("limner.metrics.moments.MAX_FILE_BYTES", 100)
    with pytest.raises(UserError, match=r"does not hold statistics of features, mu \[D\] and sigma \[D, D\]"):
        Moments.from_file(path)


def kernel_distance(x, y):
    metric = METRICS["kid"]
    return metric.values(metric.statistics(Features(x), Features(y)), torch.ones(1, len(x)))["kid"].item()


def test_the_kernel_distance_is_that_of_torchmetrics_over_all_pairs():
    x, y = sample(60, 24, 7), sample(60, 24, 8, 0.2)
    assert kernel_distance(x, y) == pytest.approx(poly_mmd(x, y).item(), rel=1e-8)


def test_the_kernel_distance_is_unbiased_at_few_pictures():
    parts = sample(4_000, 32, 9).split(20)
    found = [kernel_distance(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    mean, error = np.mean(found), np.std(found) / len(found) ** 0.5
    assert min(found) < 0 and abs(mean) < 3 * error


def test_inception_scores_of_certain_and_of_uniform_classes():
    certain = torch.eye(10).repeat(10, 1) * 100  # each split of ten has each class once
    assert values(Features(certain, certain), Features(certain))["is"].item() == pytest.approx(10, rel=1e-6)
    uniform = torch.zeros(100, 10)
    assert values(Features(certain, uniform), Features(certain))["is"].item() == pytest.approx(1)
    assert "is" not in values(Features(certain), Features(certain))


def test_an_inception_score_is_the_mean_of_ten_splits():
    logits = 2 * sample(205, 7, 10)
    p = logits.softmax(1).numpy()
    scores = []
    for i in range(10):  # as in the authors' code
        part = p[i * len(p) // 10 : (i + 1) * len(p) // 10]
        scores.append(np.exp((part * (np.log(part) - np.log(part.mean(0)))).sum(1).mean()))
    metric = InceptionScore()
    found = metric.values(metric.statistics(Features(logits, logits), Features(logits)), torch.ones(1, 205))
    assert found["is"].item() == pytest.approx(np.mean(scores), rel=1e-9)


def test_precision_recall_density_and_coverage_are_their_definitions():
    x, y = sample(70, 6, 11), sample(90, 6, 11, 0.4)[20:]

    def radius(points, i):
        return sorted(np.linalg.norm(points - points[i], axis=1))[NEIGHBORS]

    a, b = x.numpy(), y.numpy()
    inside = np.array([[np.linalg.norm(p - b[j]) <= radius(b, j) for j in range(len(b))] for p in a])
    recalled = [any(np.linalg.norm(q - a[i]) <= radius(a, i) for i in range(len(a))) for q in b]
    found = values(Features(x), Features(y))
    assert found["precision"].item() == pytest.approx(inside.any(1).mean())
    assert found["recall"].item() == pytest.approx(np.mean(recalled))
    assert found["density"].item() == pytest.approx(inside.sum() / NEIGHBORS / len(a))
    assert found["coverage"].item() == pytest.approx(inside.any(0).mean())
    assert 0 < found["precision"].item() < 1 and 0 < found["coverage"].item() < 1


def test_weights_count_drawings_as_often_as_they_say():
    x, y = sample(30, 50, 12), sample(40, 50, 13)
    weights = torch.from_numpy(np.random.default_rng(0).multinomial(30, np.full(30, 1 / 30), 3)).float()
    drawn, real = Features(x, x), Features(y, y)
    found = values(drawn, real, weights)
    for i, row in enumerate(weights.long()):
        repeated = x.repeat_interleave(row, 0)
        assert found["fid"][i].item() == pytest.approx(frechet_distance(Moments.of(repeated), Moments.of(y)), rel=1e-8)
        assert found["precision"][i] == pytest.approx(
            np.average(precisions(drawn, real), weights=row.numpy()), rel=1e-9
        )
        pairs = kernel(x, x) * row[:, None] * row
        pairs.fill_diagonal_(0)
        among = pairs.sum() / (row.sum() ** 2 - (row**2).sum())
        expected = among + off_diagonal_mean(kernel(y, y)) - 2 * kernel(repeated, y).mean()
        assert found["kid"][i].item() == pytest.approx(expected.item(), rel=1e-9)


def precisions(drawn, real):
    """0 or 1 of each drawing."""
    metric = METRICS["manifold"]
    return metric.values(metric.statistics(drawn, real), torch.eye(len(drawn.values)))["precision"].numpy()


def off_diagonal_mean(k):
    return (k.sum() - k.diagonal().sum()) / (len(k) * (len(k) - 1))


def test_equal_pictures_have_the_distance_0_despite_rounding():
    x = sample(12, 40, 14, 5.0).repeat(6, 1)  # six copies: the radii are 0
    found = values(Features(x), Features(x.flip(0)))
    assert found["precision"] == found["coverage"] == found["recall"] == 1


def test_features_that_cannot_be_compared_raise_a_sentence():
    x = sample(20, 8, 15)
    spoiled = x.clone()
    spoiled[3, 4] = torch.nan
    for drawn, real, says in (
        (x[:0], x, "0 drawings are too few to compare: give at least 10"),
        (x, x[:9], "9 real pictures are too few to compare: give at least 10"),
        (spoiled, x, "the features x of the drawings are not finite"),
        (x, x[:, :7], "drawings have 8 features and real pictures 7: use one extractor for both"),
    ):
        with pytest.raises(UserError, match=says):
            values(Features(drawn), Features(real))
    for broken, says in ((x[:0], "is empty"), (spoiled, "not finite")):
        with pytest.raises(UserError, match=says):
            Moments.of(broken)
    with pytest.raises(UserError, match="one set has 8 features and the other 7"):
        frechet_distance(Moments.of(x), Moments.of(x[:, :7]))
