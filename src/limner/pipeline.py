"""Text-to-image pipeline: prior, dVAE, contrastive model and tokenizer (§2.6).

    pipe = limner.load()                       # the bundled model, or a folder
    drawings = pipe("a small red circle", n=2, candidates=64, seed=0)
    drawings[0].save("circle.png")

The prior samples `candidates` token grids, the dVAE decodes them, the contrastive model scores the pictures against the
caption (`sampling/engine.py`), and the pipeline returns the best `n` (`sampling/rerank.py`). If the bundle has training
pictures of the caption's subject, the prior follows one (`retrieval.py`). Candidate i of a caption depends only on the
caption, the seed and i. Other candidates and captions in the batch do not change it, apart from float rounding, which
may flip a choice between two equally likely tokens.

Shapes: B captions, N candidates, T text positions, S image positions, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from limner import adapters, bundles, pretrained
from limner.drawing import Drawings
from limner.errors import UserError
from limner.models.contrastive import CLIP
from limner.models.image_tokenizer import ImageTokenizer
from limner.models.transformer import Transformer
from limner.priming import add_given, follow, follow_example, prompt, square
from limner.progress import Advance
from limner.reranker import load_clip
from limner.retrieval import Examples
from limner.sampling.engine import Candidates, Engine, OnPreview, Preview, Request, caption_seeds
from limner.sampling.generate import UNSET
from limner.sampling.generation_config import GenerationConfig, ModelDefaults, Sampler
from limner.sampling.inference import InferenceConfig, InferenceModels
from limner.text.bpe import Tokenizer
from limner.text.clip_bpe import CLIPTokenizer
from limner.version import __version__

__all__ = ["TextToImage", "load"]


class TextToImage:
    """Text-to-image pipeline.

    Args:
        dvae, prior, contrastive, tokenizer: models that were trained together.
        info: JSON values for the model card: "name", "recipe", "data", "scores", ...; defaults "temperature",
            "guidance" and "candidates"; "prior_score_weight" of the prior's log-probability in `Drawing.score`.
        examples: training pictures to follow; without them, set to None, the prior draws from captions alone.

    Raises:
        UserError: the models do not fit together, or `info` is invalid.
    """

    def __init__(
        self,
        dvae: ImageTokenizer,
        prior: Transformer,
        contrastive: CLIP,
        tokenizer: Tokenizer,
        info: Mapping[str, Any] | None = None,
        inference_config: InferenceConfig = InferenceConfig(),
        examples: Examples | None = None,
    ) -> None:
        self.dvae, self.prior, self.contrastive = dvae.eval(), prior.eval(), contrastive.eval()
        self.tokenizer, self.info, self.inference_config = tokenizer, dict(info or {}), inference_config
        self.rerank_tokenizer: Tokenizer | CLIPTokenizer = tokenizer
        self.examples = examples
        self.defaults = ModelDefaults.from_info(self.info)
        bundles.check_fit(dvae.config, prior.config, contrastive.config, tokenizer)
        self._engine: Engine | None = None

    @property
    def name(self) -> str:
        return str(self.info.get("name") or "unnamed")

    @property
    def size(self) -> int:
        """Side of a picture in pixels."""
        return self.dvae.config.size

    @property
    def device(self) -> torch.device:
        return self.prior.head.image.weight.device

    def to(self, device: torch.device | str) -> TextToImage:
        """Move all three models to a device. Return the pipeline."""
        for model in (self.dvae, self.prior, self.contrastive):
            model.to(device)
        self._engine = None
        return self

    def __call__(
        self,
        caption: str,
        options: GenerationConfig = GenerationConfig(),
        *,
        n: int = 1,
        prompt_tokens: Tensor | None = None,
        progress: Advance | None = None,
        on_preview: OnPreview | None = None,
        preview_every: int = 2,
        **settings: Any,
    ) -> Drawings:
        """Draw a caption, or complete a picture: `pipe(caption, prompt_tokens=pipe.prime(picture, 6))`.

        Args:
            options: candidates, seed and sampler; `settings` override fields:
                `pipe(caption, candidates=8, temperature=0.9)`.
            n: number of drawings to return, distinct ones first. At least n candidates are drawn.
            prompt_tokens: fixed tokens of a picture, from `prime`, or a picture to follow, from `like`.
            progress: called with the number of candidates drawn since the last call.
            on_preview: called with a `Preview` of a batch of candidates after every `preview_every` rows of tokens.

        Raises:
            UserError: the caption is empty or a setting is out of range.
        """
        if not isinstance(caption, str):
            raise UserError(f"the caption must be a string, not {caption!r}: draw several captions with draw_many")
        return self.draw_many(
            [caption], options, n=n, prompt_tokens=prompt_tokens, progress=progress, on_preview=on_preview,
            preview_every=preview_every, **settings,
        )[0]  # fmt: skip

    def prime(self, image: Image.Image, keep_rows: int | None = None, mask: Image.Image | None = None) -> Tensor:
        """Return the tokens [1, S] of a picture, `UNSET` where to draw (priming, §3.3, Figure 14; inpainting).

        Args:
            image: cropped to its central square and resized; white behind transparent pixels, as for `mask`.
            keep_rows: number of rows of tokens to keep, from the top.
            mask: alternative to `keep_rows`, a picture whose light pixels mark the tokens to redraw.

        Raises:
            UserError: both or neither of `keep_rows` and `mask` are given, or one is invalid.
        """
        pixels, unset = prompt(image, self.dvae.config.size, self.dvae.config.grid, keep_rows, mask)
        tokens = self.dvae.tokenize(torch.from_numpy(pixels)[None].to(self.device))
        return tokens.masked_fill(torch.from_numpy(unset).to(self.device), UNSET)

    def like(self, image: Image.Image) -> Tensor:
        """Return prompt tokens [1, 2 S] that ask for a picture like this one, but as the caption says."""
        tokens = self.dvae.tokenize(torch.from_numpy(square(image, self.size))[None].to(self.device))
        return torch.from_numpy(follow(tokens[0].cpu().numpy()))[None]

    def draw_many(
        self,
        captions: Sequence[str],
        options: GenerationConfig = GenerationConfig(),
        *,
        n: int = 1,
        seed: int | Sequence[int] | None = None,
        prompt_tokens: Tensor | None = None,
        progress: Advance | None = None,
        on_preview: OnPreview | None = None,
        preview_every: int = 2,
        **settings: Any,
    ) -> list[Drawings]:
        """Draw several captions; see `__call__`.

        `seed` is one for all captions or one each; `prompt_tokens` holds fixed tokens [B, S] (`sampling.generate`).
        """
        if isinstance(captions, str):
            raise UserError("draw_many takes a list of captions, not a string: put the caption into brackets")
        options, count = options.resolve(n, self.defaults, settings)
        if not captions:
            return []
        seeds = caption_seeds(options.seed if seed is None else seed, len(captions))
        result = self.candidates(
            captions, count, seed=seeds, sampler=options, prompt_tokens=prompt_tokens, progress=progress,
            on_preview=on_preview, preview_every=preview_every,
        )  # fmt: skip
        return [
            Drawings.best(
                result.pictures[row].numpy(), result.scores[row].numpy(), result.tokens[row].numpy(), n,
                caption=caption, seed=seeds[row], model=self.name, settings=result.settings[row],
            )
            for row, caption in enumerate(captions)
        ]  # fmt: skip

    def candidates(
        self,
        captions: Sequence[str],
        count: int,
        *,
        seed: int | Sequence[int] = 0,
        sampler: Sampler = Sampler(),
        prompt_tokens: Tensor | None = None,
        progress: Advance | None = None,
        on_preview: OnPreview | None = None,
        preview_every: int = 2,
    ) -> Candidates:
        """Draw `count` candidates of each of one or more captions; return them unranked, on the CPU.

        Raises `UserError`.
        """
        if count < 1:
            raise UserError(f"the number of candidates must be at least 1, not {count}")
        if preview_every < 1:
            raise UserError(f"preview_every, a number of rows of tokens, must be at least 1, not {preview_every}")
        prompts = [None] * len(captions) if prompt_tokens is None else prompt_tokens
        jobs = []
        for i, (caption, own_seed) in enumerate(zip(captions, caption_seeds(seed, len(captions)), strict=True)):

            def preview(candidates: range, pictures: Tensor, i: int = i) -> None:
                if on_preview:
                    on_preview(Preview(i, candidates, pictures))

            request = self.request(
                caption, count, seed=own_seed, sampler=sampler, prompt_tokens=prompts[i],
                on_preview=preview if on_preview else None, preview_every=preview_every,
            )  # fmt: skip
            jobs.append(self.engine.submit(request))
        self.engine.run(jobs, progress)
        parts = {x: torch.stack([getattr(job, x) for job in jobs]) for x in ("pictures", "scores", "tokens")}
        return Candidates(**parts, settings=[job.request.settings for job in jobs])

    def request(self, caption: str, count: int, *, sampler: Sampler, **settings: Any) -> Request:
        """Return a request of `count` candidates for the engine; `settings` are those of `Request`.

        Raises `UserError` if the caption is empty or not valid Unicode, or if the model cannot take a given picture.
        """
        config, prompt_tokens = self.prior.config, settings.pop("prompt_tokens", None)
        text = self.tokenizer.encode_array([caption], config.text_len)[0]
        rerank_text = self.rerank_tokenizer.encode([caption], self.contrastive.config.text_len)[0]
        examples = self.examples if prompt_tokens is None else None
        given, follows = follow_example(examples, caption, lambda x: self.engine.models.closest(rerank_text, x))
        given = given if prompt_tokens is None else prompt_tokens.cpu().numpy()
        text, given = add_given(text, given, prod(config.grid), config.condition_blocks > 0)
        return Request(
            text=torch.from_numpy(text), rerank_text=rerank_text, candidates=count,
            sampler=sampler.with_defaults(self.defaults.sampler), follows=follows,
            prompt_tokens=None if given is None else torch.from_numpy(given), **settings,
        )  # fmt: skip

    @property
    def engine(self) -> Engine:
        """The models in the number formats of inference, converted once for each device."""
        if self._engine is None:
            models = self.dvae, self.prior, self.contrastive, self.defaults.prior_score_weight
            self._engine = Engine(InferenceModels(*models, self.inference_config))
        return self._engine

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> Path:
        """Write a bundle atomically, replacing an existing one. Return the folder.

        With `dtype` `torch.int8`, the matrices of the prior and the contrastive model take half the space of half
        precision. Raises `UserError` if the folder has other content or a weight is not finite.
        """
        models = {"dvae": self.dvae, "prior": self.prior, "contrastive": self.contrastive}
        bundles.check_fit(self.dvae.config, self.prior.config, self.contrastive.config, self.tokenizer)
        info = {"limner": __version__, **self.info}
        self.info = bundles.write(Path(folder), models, self.tokenizer, info, dtype, self.examples)
        return Path(folder)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        device: torch.device | str | None = None,
        adapter: str | Path | None = None,
        rerank: str | Path | None = None,
        **settings: Any,
    ) -> TextToImage:
        """Read a bundle onto `device` (by default a GPU if available); `settings` are those of `InferenceConfig`.

        `adapter` is the folder of a LoRA adapter of this bundle, which is merged into the prior; its pictures join the
        bundle's. `rerank` is a CLIP model of `limner convert clip`: its cosine alone is the score. Raises `UserError`
        if a part of the bundle, the adapter or the CLIP model is missing, damaged or inconsistent.
        """
        folder = pretrained.find_bundle(folder)
        models, tokenizer, info = bundles.read(folder)
        if adapter is not None:
            adapters.merge(models["prior"], adapter, folder / "prior.safetensors")
        try:
            pipe = cls(**models, tokenizer=tokenizer, info=info, inference_config=InferenceConfig(**settings))
            shape = prod(pipe.prior.config.grid), pipe.prior.config.image_vocab
            pipe.examples = Examples.find(folder, *shape, None if adapter is None else Path(adapter))
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
        if rerank is not None:
            pipe.contrastive, pipe.rerank_tokenizer, *_ = load_clip(rerank)
            pipe.defaults = pipe.defaults._replace(prior_score_weight=0.0)
        return pipe.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def load(name_or_folder: str | Path = pretrained.DEFAULT, **options: Any) -> TextToImage:
    """Load a bundled model, by name, or any bundle, by folder.

    `options` are `device`, `adapter`, `rerank` and settings of `InferenceConfig`. Raises `UserError` if the model, the
    adapter or the CLIP model is missing or invalid.
    """
    return TextToImage.from_pretrained(pretrained.resolve_name(name_or_folder), **options)
