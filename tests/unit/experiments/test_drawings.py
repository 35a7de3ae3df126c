"""Criteria of the findings on drawings and detectors: each holds for a right model, and fails for a wrong one."""

from itertools import combinations

import numpy as np
import pytest
import torch

from limner.experiments import detectors, drawings, fidelity, sweep
from limner.experiments.detectors import accumulate, samples, steps_of_ssd, steps_of_ssdlite, undo_initialization
from limner.experiments.drawings import best_of_weights, binding_outcome, pixels, swap_words
from limner.experiments.fidelity import CHANGES, KINDS
from limner.models.detector import DetectorConfig
from limner.runs.detector import PRESETS
from limner.tasks import captions, scenes
from limner.tasks.scenes import TRANSFORMS, SceneObject


@pytest.fixture
def reproduce(monkeypatch, tmp_path):
    """Return the finding of an experiment from results of its quick trials that a function of the settings invents."""

    def of(experiment, result):
        monkeypatch.setattr(sweep, "run_trials", lambda folder, trial, settings, workers: [result(s) for s in settings])
        return experiment.reproduce(tmp_path, True)

    return of


def test_the_best_of_n_is_the_mean_over_all_choices_of_n():
    values = np.random.default_rng(0).random(7)  # of a pool, best first
    for n in (1, 2, 5, 7):
        expected = np.mean([values[min(chosen)] for chosen in combinations(range(7), n)])
        assert best_of_weights(7, n) @ values == pytest.approx(expected)


@pytest.mark.parametrize(
    ("accuracy", "kid", "holds"),
    [
        ((0.2, 0.7, 0.8), (0.02, 0.01, 0.01), True),
        ((0.2, 0.2, 0.2), (0.02, 0.01, 0.01), False),  # a score that does not know which drawing is right
        ((0.7, 0.5, 0.3), (0.02, 0.01, 0.01), False),  # a reversed score
        ((0.2, 0.7, 0.8), (0.01, 0.01, 0.01), None),  # drawings no closer to real pictures, as far as trials show
        ((0.2, 0.7, 0.8), (0.01, 0.02, 0.03), False),
        ((0.2, 0.4, 0.8), (0.02, 0.01, 0.01), False),  # gains that do not diminish
    ],
)
def test_reranking_helps_only_if_accuracy_and_fidelity_rise_and_then_less(reproduce, accuracy, kid, holds):
    def result(settings):
        noise = np.random.default_rng(settings["seed"])
        right = np.clip(np.array(accuracy)[:, None] + noise.normal(0, 0.02, (1, 12)), 0, 1)
        return {
            "right": right.tolist(), "score": right.tolist(), "clusters": [str(i) for i in range(12)],
            "kid": (np.array(kid) + noise.normal(0, 1e-5, 3) * [1, -1, 1]).tolist(), "fid": [1.0, 1.0, 1.0],
        }  # fmt: skip

    assert reproduce(drawings.rerank_n, result).holds is holds


def item(shape, color, size="small"):
    return SceneObject(shape=shape, color=color, size=size, fill="solid", x=0, y=0)


@pytest.mark.parametrize(
    ("drawn", "outcome"),
    [
        ([("circle", "red"), ("square", "blue")], "right"),
        ([("square", "blue"), ("circle", "red")], "right"),
        ([("circle", "blue"), ("square", "red")], "swapped"),
        ([("circle", "red"), ("square", "red")], "on both"),
        ([("circle", "green"), ("square", "green")], "another drawing"),
        ([("circle", "red"), ("square", "green")], "another drawing"),
        ([("circle", "red"), ("circle", "blue")], "another drawing"),
        ([("circle", "red")], "another drawing"),
    ],
)
def test_outcomes_of_binding(drawn, outcome):
    objects = [item(*look) for look in drawn]
    assert binding_outcome(objects, "color", {"circle": "red", "square": "blue"}) == outcome


def test_swapped_captions_name_exchanged_values():
    for i in range(200):
        rng = np.random.default_rng(i)
        scene = scenes.sample_scene(rng, count=2, identical=0)
        caption = captions.describe(scene, rng)
        before = captions.parse(caption)
        first, second = (look[2] for look in before.attributes)
        after = captions.parse(swap_words(caption, first, second))
        assert [look[2] for look in after.attributes] == [second, first]
        assert (after.relation, after.background) == (before.relation, before.background)
    assert swap_words("a red circle and an orange square", "red", "orange") == "an orange circle and a red square"


@pytest.mark.parametrize(
    ("outcomes", "holds"),
    [
        (["right"] * 14 + ["swapped"] * 2, True),
        (["right", "swapped"] * 8, None),  # a model that ignores which object an attribute belongs to
        (["right"] * 2 + ["swapped"] * 14, False),
        (["on both"] * 16, None),
        (["right"] + ["another drawing"] * 15, None),  # too few
    ],
)
def test_a_model_binds_only_if_it_swaps_rarely(reproduce, outcomes, holds):
    finding = reproduce(
        drawings.binding, lambda settings: {"outcomes": outcomes, "clusters": [str(i) for i in range(16)]}
    )
    assert finding.holds is holds and len(finding.rows) == 3


@pytest.mark.parametrize(("another", "holds"), [(0.0, True), (1.0, None)])
def test_lower_halves_must_follow_the_caption(reproduce, another, holds):
    """A model that draws the same transform below each upper half is right for any caption."""

    def result(settings):
        right = 1.0 if settings["own"] else another
        return {"right": [right] * 16, "kinds": [*TRANSFORMS] * 4, "clusters": [str(i) for i in range(16)]}

    assert reproduce(drawings.image_to_image, result).holds is holds


@pytest.mark.parametrize(("blurred", "holds"), [(0.001, True), (0.006, None), (0.008, False)])
def test_a_blur_must_favor_drawings(reproduce, blurred, holds):
    """Drawings at a distance of 0.012 without blur, other pictures at 0.02, and at half of it with blur."""

    def result(settings):
        noise = 1 + 0.01 * settings["seed"] % 0.02
        pairs = {"drawings": (0.012, blurred), "reconstructions": (0.01, 0.001), "one object too many": (0.02, 0.01)}
        values = {name: [x * noise for x in pair] for name, pair in {**pairs, "real pictures": (1e-4, 1e-4)}.items()}
        return {"kid": values, "fid": values}

    assert reproduce(fidelity.fid_blur, result).holds is holds


@pytest.mark.parametrize(
    ("misses", "changes", "holds"),
    [(0, (1e-4, -1e-4), True), (2, (1e-4, -1e-4), False), (0, (1e-2, 1.01e-2), False)],
)
def test_copies_must_be_found_and_distances_keep(reproduce, misses, changes, holds):
    def result(settings):
        found = [False] * misses + [True] * (21 - misses)
        change = changes[settings["seed"] % 2]
        return {
            "found": {"aligned pixels": found, "contrastive model": [False] * 21},
            "kid": [0.01, 0.01 + change], "fid": [1.0, 1.0],
        }  # fmt: skip

    finding = reproduce(fidelity.overlap, result)
    assert finding.holds is holds
    assert [row[0] for row in finding.rows] == ["all", *CHANGES] and len(KINDS) == 21


@pytest.mark.parametrize(("drop", "holds"), [(None, True), (("ssdlite48", 12), False)])
def test_each_step_of_a_breakdown_must_help(reproduce, drop, holds):
    """A score that grows with what a step changes, but for one step."""

    def result(settings):
        ours = settings["initialized"], not settings["general_boxes"], settings["name"] == "ssdlite"
        value = 0.1 * sum(ours) + 0.01 * settings["steps"] + 10 * settings["lr"] + 1e-5 * settings["seed"]
        value += 0.001 * (settings["name"] != "none")
        score = 0.0 if drop == (settings["layout"], settings["steps"]) else value
        return {"loss": [1.0, 0.5], "mAP": score, "mAP@50": score}

    finding = reproduce(detectors.detector, result)
    assert finding.holds is holds and len(finding.rows) == 11


def test_the_last_step_has_the_settings_of_the_presets():
    for steps, layout in ((steps_of_ssd(4), "ssd48"), (steps_of_ssdlite(4), "ssdlite48")):
        preset, *_, last = PRESETS[layout].training, *accumulate(steps).values()
        assert last["lr"] == preset.optimizer.lr and last["schedule"] == preset.schedule
        assert last["layout"] == layout and last["initialized"] and not last["general_boxes"]


@pytest.mark.parametrize("layout", ["ssd48", "ssdlite48"])
def test_the_baseline_standardizes_inputs(layout):
    """The first layer sees pixels of mean 0 and variance 1 if they have ImageNet's mean and deviation."""
    model, seen = DetectorConfig(layout=layout, classes=5).build().eval(), []
    undo_initialization(model)
    first = next(module for module in model.backbone.modules() if isinstance(module, torch.nn.Conv2d))
    first.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    pixels = torch.rand(1, 3, 48, 48) * 255
    model.backbone(pixels)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (pixels / 255 - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, torch.nn.ReLU6) for module in model.modules())


def test_augmented_samples_keep_their_boxes_inside():
    data = samples("ssd", 12, 4, 0)
    assert data["pixels"].shape == (12, 3, 48, 48)
    boxes = data["boxes"][data["labels"] > 0]
    assert len(boxes) and (boxes >= 0).all() and (boxes <= 48).all() and (boxes[:, 2:] > boxes[:, :2]).all()


def test_pictures_become_one_tensor():
    pictures = [np.full((4, 4, 3), level, np.uint8) for level in (1, 2)]
    assert pixels(pictures).shape == (2, 3, 4, 4)
