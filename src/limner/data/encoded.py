"""Pictures that become dVAE tokens as they are read, for training with augmentation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from limner.data.datasets import ImageCaptionDataset


class EncodedDataset:
    """An image data set whose pictures become dVAE tokens as they are read."""

    def __init__(self, images: ImageCaptionDataset, encode: Callable[[Tensor], Tensor]) -> None:
        self.images, self.encode = images, encode

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """{"text": Long [B, T], "image": Long [B, S], "index": Long [B]}"""
        batch = self.images.batch(indices, seeds)
        return {"text": batch["text"], "image": self.encode(batch["pixels"]), "index": batch["index"]}
