"""Scenes as training data of a detector, and back."""

import numpy as np
import torch

from limner.models.detector import Detections
from limner.tasks.rendering import render
from limner.tasks.scene_boxes import SceneBoxes, scene_from_detections, true_boxes
from limner.tasks.scenes import BACKGROUNDS, sample_dense_scene, sample_scene
from limner.tasks.verify import scenes_match


def detections(scene, size=48):
    boxes, labels, attributes = map(torch.from_numpy, true_boxes(scene, size))
    return Detections(boxes, labels, torch.linspace(1, 0.6, len(labels)), attributes)


def test_nothing_is_drawn_outside_the_boxes():
    for seed in range(10):
        scene = sample_dense_scene(np.random.default_rng(seed))
        picture = render(scene, 96)
        for left, top, right, bottom in true_boxes(scene, 96)[0].astype(int):
            assert (picture[top:bottom, left:right] != BACKGROUNDS[scene.background]).any()
            picture[top:bottom, left:right] = BACKGROUNDS[scene.background]
        assert (picture == BACKGROUNDS[scene.background]).all()


def test_true_boxes_give_the_scene():
    for seed in range(20):
        scene = sample_scene(np.random.default_rng(seed), split="held-out" if seed % 2 else "train")
        assert scenes_match(scene_from_detections(detections(scene), render(scene)), scene)


def test_unlikely_and_overlapping_detections_are_left_out():
    scene = sample_scene(np.random.default_rng(0), count=3)
    found = detections(scene)
    again = Detections(*(torch.cat([part, part]) for part in found))
    again.labels[3:] = again.labels[3:] % 5 + 1  # the same boxes as other shapes, with lower scores
    again.scores[3:] -= 0.05
    assert scenes_match(scene_from_detections(again, render(scene)), scene)
    found.scores[2] = 0.4
    assert len(scene_from_detections(found, render(scene)).objects) == 2


def test_batches_depend_on_seeds_alone_and_show_no_held_out_scene():
    seeds = np.arange(40, dtype=np.uint64)
    batch = SceneBoxes(48).batch(np.arange(40), seeds)
    part = SceneBoxes(48).batch(np.array([9]), seeds[7:8])
    n = int((part["labels"] > 0).sum())
    assert torch.equal(part["pixels"][0], batch["pixels"][7])
    for name in ("boxes", "labels", "attributes"):
        assert torch.equal(part[name][0, :n], batch[name][7, :n])
    assert (batch["labels"] > 0).sum(1).max() > 4  # also dense scenes
    for row in range(40):
        found = Detections(batch["boxes"][row], batch["labels"][row], torch.ones(1), batch["attributes"][row])
        keep = batch["labels"][row] > 0
        found = Detections(found.boxes[keep], found.labels[keep], torch.ones(int(keep.sum())), found.attributes[keep])
        picture = batch["pixels"][row].permute(1, 2, 0).numpy()
        assert scene_from_detections(found, picture).split == "train"
