"""A stored reference for the detectors: outputs of torchvision's models on weights that both sides compute.

torchvision cannot be installed together with the project. `torchvision_detectors.json` was written with the Python
sources of torchvision 0.29.1, unpacked from its wheel, on torch 2.13.0:

    python tests/reference/torchvision_detectors.py FOLDER

FOLDER contains the package `torchvision`. Its only compiled operator that the detectors call is non-maximum
suppression; `suppress_one_by_one` replaces it. A tensor's weights depend on its name alone.
"""

import hashlib
import importlib.machinery
import json
import sys
import types
from functools import partial
from pathlib import Path

import numpy as np
import torch

STORED = Path(__file__).with_suffix(".json")
CLASSES = 5
SIZES = {"ssd300": 300, "ssdlite320": 320}
BOXES = torch.tensor([[10.0, 20, 100, 150], [50, 60, 250, 290], [200, 10, 220, 30]])
LABELS = torch.tensor([3, 1, 5])


def seeded(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Weights of a layer: normal with the variance of He et al., or values near 1 and 0 for normalization."""
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    if name.endswith("num_batches_tracked"):
        return torch.zeros(shape, dtype=torch.int64)
    if len(shape) == 4:
        scale = (2 / np.prod(shape[1:])) ** 0.5
        if name == "backbone.features.0.weight":  # SSD300's input is on the scale 0 .. 255
            scale /= 100
        return torch.from_numpy(rng.standard_normal(shape, np.float32) * np.float32(scale))
    if name.endswith("scale_weight"):
        return torch.from_numpy(rng.uniform(15, 25, shape).astype(np.float32))
    low, high = (-0.1, 0.1) if name.endswith(("bias", "running_mean")) else (0.8, 1.2)
    return torch.from_numpy(rng.uniform(low, high, shape).astype(np.float32))


def fill(model: torch.nn.Module) -> None:
    """Load the seeded weights."""
    model.load_state_dict({name: seeded(name, tuple(x.shape)) for name, x in model.state_dict().items()})


def picture(size: int) -> torch.Tensor:
    """uint8 [1, 3, size, size]"""
    return torch.from_numpy(np.random.default_rng(size).integers(0, 256, (1, 3, size, size), np.uint8))


def names_digest(model: torch.nn.Module) -> str:
    """A hash of the names and shapes of all tensors."""
    lines = sorted(f"{name} {list(x.shape)}" for name, x in model.state_dict().items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def summary(values: torch.Tensor) -> dict[str, object]:
    """Shape, mean, deviation and 24 values at even distances."""
    flat = values.detach().double().flatten()
    at = torch.linspace(0, len(flat) - 1, 24).long()
    shape, numbers = list(values.shape), [round(x, 6) for x in flat[at].tolist()]
    return {"shape": shape, "mean": flat.mean().item(), "std": flat.std().item(), "values": numbers}


def suppress_one_by_one(boxes: torch.Tensor, scores: torch.Tensor, max_iou: float) -> torch.Tensor:
    """Indices of the boxes that non-maximum suppression keeps, by descending score: one pair at a time."""
    kept: list[int] = []
    for i in scores.argsort(descending=True, stable=True).tolist():
        if all(iou_of(boxes[i].tolist(), boxes[j].tolist()) <= max_iou for j in kept):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64)


def iou_of(a: list[float], b: list[float]) -> float:
    """The intersection over union of two boxes."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union else 0.0


def import_torchvision(folder: str):
    """Return the builders of torchvision's two models, from sources without compiled operators."""
    for name in ("torchvision", "torchvision.extension"):
        sys.modules[name] = types.ModuleType(name)
    package, extension = sys.modules["torchvision"], sys.modules["torchvision.extension"]
    package.__path__ = [f"{folder}/torchvision"]
    package.__spec__ = importlib.machinery.ModuleSpec("torchvision", None, is_package=True)
    package._is_tracing = lambda: False
    extension._assert_has_ops = lambda: None
    extension._has_ops = lambda: False
    sys.path.insert(0, folder)
    from torchvision.models.detection import ssd, ssdlite
    from torchvision.ops import boxes

    boxes.nms = suppress_one_by_one
    return {"ssd300": ssd.ssd300_vgg16, "ssdlite320": ssdlite.ssdlite320_mobilenet_v3_large}


def keep(outputs: dict[str, object], name: str, module: torch.nn.Module, inputs: object, output: object) -> None:
    """Store the output of a module."""
    outputs[name] = output


@torch.no_grad()
def main(folder: str) -> None:
    """Write the reference."""
    stored = {}
    for name, build in import_torchvision(folder).items():
        published = build(weights=None, weights_backbone=None, num_classes=91)
        model = build(weights=None, weights_backbone=None, num_classes=CLASSES + 1).eval()
        fill(model)
        outputs = {}
        model.head.register_forward_hook(partial(keep, outputs, "heads"))
        model.anchor_generator.register_forward_hook(partial(keep, outputs, "boxes"))
        found = model([picture(SIZES[name])[0].float() / 255])[0]
        heads, boxes = outputs["heads"], outputs["boxes"]
        matches = [model.proposal_matcher(sys.modules["torchvision.ops.boxes"].box_iou(BOXES, boxes[0]))]
        losses = model.compute_loss([{"boxes": BOXES, "labels": LABELS}], heads, boxes, matches)
        stored[name] = {
            "parameters": sum(x.numel() for x in published.parameters()),
            "names": names_digest(published),
            "default_boxes": summary(boxes[0]),
            "offsets": summary(heads["bbox_regression"]),
            "logits": summary(heads["cls_logits"]),
            "matched": int((matches[0] >= 0).sum()),
            "loss": {key: value.item() for key, value in losses.items()},
            "detections": len(found["boxes"]),
            **{key: [[round(v, 5) for v in row] for row in found[key][:8, None].flatten(1).tolist()] for key in found},
        }
    STORED.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
