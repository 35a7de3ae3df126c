"""The whole method on small scenes: an image tokenizer, a prior, CLIP, and drawings that are checked.

python examples/train_from_scratch.py runs/scratch

All weights are random at first. On two cores the program takes about five minutes. It exits with code 1 if fewer than
70% of the drawings show everything that their captions say. The same command continues an interrupted run.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from limner.data.datasets import CaptionEncoding, ImageCaptionDataset, TokenDataset
from limner.data.open_source import open_source
from limner.data.stream import Stream
from limner.data.token_cache import encode_tokens, weights_hash
from limner.evaluation.composition import sample_captions
from limner.models.contrastive import CLIPConfig
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.objectives.reconstruction_loss import ReconstructionLoss
from limner.optim.optimizers import AdamWConfig, MuonConfig
from limner.optim.schedules import Cosine
from limner.pipeline import TextToImage
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from limner.tasks.verify import satisfies
from limner.text.bpe import Tokenizer
from limner.training.config import TrainConfig
from limner.training.loop import train
from limner.training.train_state import TrainState

OUT, SIZE, CODES, LENGTH, CANDIDATES, TARGET = Path(sys.argv[1]), 48, 512, 16, 8, 0.7


def fit(name, model, objective, dataset, steps, batch, optimizer, **settings):
    """Train a model in OUT/name, and return it ready for use."""
    common = {"optimizer": optimizer, "clip_norm": 1.0, "warmup_steps": 50, "schedule": Cosine(end=0.02)}
    config = TrainConfig(steps=steps, batch_size=batch, **common, **settings)
    result = train(TrainState(model, objective, config), Stream(dataset, batch), OUT / name)
    print(name, {key: round(value, 3) for key, value in result.metrics.items()})
    return model.eval()


# Data: scenes of one object on a background, with captions such as "a small striped red cross on a pink background".
if not (OUT / "data/dataset.json").exists():
    write_scenes(OUT / "data", SceneDataSettings(count=8_000, objects=(1, 0, 0, 0), pairs=0, held_out=0))
source = open_source(str(OUT / "data"))
tokenizer = Tokenizer.train((caption for i in range(len(source)) for caption in source.captions(i)), CODES)
images = ImageCaptionDataset(source, SIZE, text=CaptionEncoding(tokenizer=tokenizer, length=LENGTH), cache_bytes=2**30)
text = {"text_vocab": tokenizer.vocab_size, "text_len": LENGTH}
torch.manual_seed(0)

# 1. Image tokenizer: codes are k-means centers of 4 x 4 patches, and the decoder learns to join them.
dvae = PatchDVAEConfig(size=SIZE, vocab=CODES, width=64, blocks=2).build()
dvae.fit_codebook(images.batch(np.arange(2_000), np.arange(2_000))["pixels"], torch.Generator().manual_seed(0))
fit("dvae", dvae, ReconstructionLoss(), images, 200, 16, AdamWConfig(lr=2e-3))

# 2. Prior: a transformer over the tokens of a caption and of its picture.
cache = encode_tokens(source, dvae.tokenize, key=weights_hash(dvae), size=SIZE, cache_dir=OUT / "tokens")
tokens = TokenDataset(cache.tokens, cache.captions, images.text)
prior = TransformerConfig(**text, image_vocab=CODES, grid=dvae.config.grid, width=96, depth=6, heads=4).build()
fit("prior", prior, Autoregressive(), tokens, 1100, 16, MuonConfig(fallback_adamw=AdamWConfig(lr=5e-3)), ema_decay=0.99)

# 3. CLIP: how well a picture fits a caption.
small_pictures = {"ln_pre": False, "sinusoids": True}
clip = CLIPConfig(**text, **small_pictures, size=SIZE, patch=8, width=96, depth=4, heads=4, embedding=128).build()
fit("clip", clip, HardNegativeLoss(), images, 200, 128, MuonConfig(fallback_adamw=AdamWConfig(lr=1e-3)))

# 4. Draw new captions, keep the best candidate of each, and let a program without learned parts check it.
pipe = TextToImage(dvae, prior, clip, tokenizer, {"prior_score_weight": 2.0})  # the score adds the prior's likelihood
asked = [caption for caption, _ in sample_captions("train", counts=(1,), n=64)]
best = [drawings[0] for drawings in pipe.draw_many(asked, candidates=CANDIDATES)]
right = sum(satisfies(np.asarray(drawing.image), drawing.caption) for drawing in best)
best[0].save(OUT / "drawing.png")
print(f"{right} of {len(asked)} drawings show what their captions say; the target is {TARGET:.0%}")
sys.exit(right < TARGET * len(asked))
