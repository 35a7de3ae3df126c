"""Text-to-image pipeline: prior, dVAE, contrastive model and tokenizer (§2.6).

    pipe = limner.load()                       # the bundled model, or a folder
    drawings = pipe("a small red circle", n=2, candidates=64, seed=0)
    drawings[0].save("circle.png")

The prior samples `candidates` token grids, the dVAE decodes them, the contrastive model scores the pictures against
the caption, and the pipeline returns the best `n` (`sampling/rerank.py`). Candidate i of a caption depends only on the
caption, the seed and i. More candidates or other captions in the batch do not change it, apart from float rounding,
which may flip a choice between two equally likely tokens.

Weights are stored in 16 or 8 bits (`bundles.py`). Drawing computes in bf16 on hardware with fast bf16 products, else in
single precision.

Shapes: B captions, N candidates, T text positions, S image positions, H x W pixels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from limner import bundles, pretrained
from limner.data.augment import augment_none
from limner.data.image_decode import to_rgb
from limner.drawing import Drawing, Drawings
from limner.errors import UserError
from limner.layers.cache import Int8KVStore, KVStore
from limner.layers.inference_linear import pack_linears, quantize_linears
from limner.models.contrastive import CLIP, CLIPConfig
from limner.models.patch_dvae import AnyDVAE, AnyDVAEConfig
from limner.models.transformer import Transformer, TransformerConfig
from limner.numerics.precision import Auto, Precision
from limner.progress import Advance
from limner.sampling.cuda_graph import TokenDecoder, build_decoder
from limner.sampling.generate import UNSET, generate
from limner.sampling.generation_config import GenerationConfig, Sampler
from limner.sampling.rerank import best, distinct_first, scores
from limner.text.bpe import Tokenizer
from limner.validation import SEEDS, OutOfRange, Range, short
from limner.version import __version__

_ROWS = 256  # maximum of candidates in one batch on a CPU; larger batches exceed its caches
_CACHE_BYTES = 1 << 30  # maximum of keys and values in one batch on a CPU
_GPU_ROWS = 1_024  # the same on a GPU, within a quarter of the free memory
_LIKELIHOOD = Range(0, 100)
_PICTURE_BYTES = 1 << 30  # maximum of codes and activations in the dVAE's decoder

Watch = Callable[["Partial"], object]


@dataclass(frozen=True)
class Candidates:
    """All candidates of B captions, in the order of their numbers.

    Attributes:
        pictures: uint8 [B, N, 3, H, W].
        scores: float32 [B, N], higher is better; see `Drawing.score`.
        tokens: int64 [B, N, S].
        sampler: settings of the sampler, with the model's defaults filled in.
    """

    pictures: Tensor
    scores: Tensor
    tokens: Tensor
    sampler: Sampler


@dataclass(frozen=True)
class Partial:
    """The top rows of unfinished drawings, as previews.

    Attributes:
        captions: indices of b captions.
        candidates: indices of n candidates.
        pictures: uint8 [b, n, 3, current height, W]. The last rows may still change slightly, since the dVAE's
            decoder also depends on the rows below.
    """

    captions: Sequence[int]
    candidates: range
    pictures: Tensor


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Settings of computation.

    Args:
        precision: by default bf16 on hardware with fast bf16 products, else fp32.
        int8_cache: store keys and values in 8 bits, which halves the memory per candidate (`layers/cache.py`).
        int8_weights: store the prior's matrices in 8 bits, which halves its memory.
        compiled: faster, after half a minute or more of compilation for each number of candidates
            (`sampling/aot_inductor.py`).
    """

    precision: Precision = field(default_factory=Auto)
    int8_cache: bool = False
    int8_weights: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.precision, Precision):
            raise UserError(
                f"precision is Auto(), Bf16(), Fp16() or Fp32() of limner.numerics.precision, not {self.precision!r}"
            )

    @property
    def store(self) -> type[KVStore]:
        return Int8KVStore if self.int8_cache else KVStore


class TextToImage:
    """Text-to-image pipeline.

    Args:
        dvae, prior, contrastive, tokenizer: models that were trained together.
        info: JSON values for the model card: "name", "recipe", "data", "scores", ...; "temperature" and "guidance" are
            defaults of sampling, "likelihood" is the weight of the likelihood in `Drawing.score`.

    Raises:
        UserError: the models do not fit together, or `info` is invalid.
    """

    def __init__(
        self,
        dvae: AnyDVAE,
        prior: Transformer,
        contrastive: CLIP,
        tokenizer: Tokenizer,
        info: Mapping[str, Any] | None = None,
        runtime: Runtime = Runtime(),
    ) -> None:
        self.dvae, self.prior, self.contrastive = dvae.eval(), prior.eval(), contrastive.eval()
        self.tokenizer, self.info, self.runtime = tokenizer, dict(info or {}), runtime
        try:
            self.sampler = Sampler(temperature=self._own("temperature"), guidance=self._own("guidance"))
            self.likelihood = self._own("likelihood", 0.0)
            _LIKELIHOOD.check("likelihood", self.likelihood)
        except OutOfRange as error:
            raise UserError(f"the model's own {error}: correct its config.json") from None
        _check_fit(dvae.config, prior.config, contrastive.config, tokenizer)
        self._drawing: tuple[TokenDecoder, CLIP] | None = None
        self._free = 0  # free bytes of GPU memory before the first drawing

    def _own(self, setting: str, default: float = 1.0) -> float:
        """Return a number of `info`. Raises `UserError` if it has another type."""
        value = self.info.get(setting, default)
        if type(value) not in (int, float):
            raise UserError(f"the model's own {setting} is a number, not {value!r}: correct its config.json")
        return value

    @property
    def name(self) -> str:
        return str(self.info.get("name") or "unnamed")

    @property
    def device(self) -> torch.device:
        return self.prior.head.image.weight.device

    def to(self, device: torch.device | str) -> TextToImage:
        """Move all three models to a device. Return the pipeline."""
        for model in (self.dvae, self.prior, self.contrastive):
            model.to(device)
        self._drawing, self._free = None, 0
        return self

    def __call__(
        self,
        caption: str,
        options: GenerationConfig = GenerationConfig(),
        *,
        n: int = 1,
        given: Tensor | None = None,
        progress: Advance | None = None,
        watch: Watch | None = None,
        every: int = 2,
        **settings: Any,
    ) -> Drawings:
        """Draw a caption, or complete a picture: `pipe(caption, given=pipe.given(picture, keep="top:6"))`.

        Args:
            options: candidates, seed and sampler; `settings` override fields:
                `pipe(caption, candidates=8, temperature=0.9)`.
            n: number of drawings to return, distinct ones first. At least n candidates are drawn.
            given: fixed tokens of a picture, from the method `given`.
            progress: called with the number of candidates drawn since the last call.
            watch: called with the `Partial` pictures of a batch of candidates after every `every` rows of tokens.

        Raises:
            UserError: the caption is empty or a setting is out of range.
        """
        if not isinstance(caption, str):
            raise UserError(f"a caption is a text, not {caption!r}; draw_many takes several")
        return self.draw_many(
            [caption], options, n=n, given=given, progress=progress, watch=watch, every=every, **settings
        )[0]

    def given(self, image: Image.Image, keep: str | None = None, mask: Image.Image | None = None) -> Tensor:
        """Return the tokens [1, S] of a picture, `UNSET` where to draw (priming and inpainting, §2.6, Figure 14).

        Args:
            image: cropped to its central square and resized; white behind transparent pixels, as for `mask`.
            keep: "top:N" keeps the top N rows of tokens.
            mask: alternative to `keep`, a picture whose light pixels mark the tokens to redraw.

        Raises:
            UserError: both or neither of `keep` and `mask` are given, or one is invalid.
        """
        if (keep is None) == (mask is None):
            raise UserError("say what to keep, as top:N, or give a mask of what to draw anew: one of the two")
        size, (h, w) = self.dvae.config.size, self.dvae.config.grid
        pixels = torch.from_numpy(augment_none(np.array(to_rgb(image)), size)).permute(2, 0, 1)
        tokens = self.dvae.tokenize(pixels[None].to(self.device))[0]
        free = torch.ones(h, w, dtype=torch.bool)
        if keep is not None:
            rows = {f"top:{n}": n for n in range(1, h)}
            if keep not in rows:
                raise UserError(f"keep is top:N with N from 1 to {h - 1} of the {h} rows of tokens, not {short(keep)}")
            free[: rows[keep]] = False
        elif mask is not None:
            light = torch.from_numpy(augment_none(np.array(to_rgb(mask)), size)).float().mean(-1)
            free = light.view(h, size // h, w, size // w).amax((1, 3)) > 127
            if not free.any():
                raise UserError("the mask has no light part: make white what should be drawn anew")
        return torch.where(free.flatten().to(tokens.device), UNSET, tokens)[None]

    def draw_many(
        self,
        captions: Sequence[str],
        options: GenerationConfig = GenerationConfig(),
        *,
        n: int = 1,
        seed: int | Sequence[int] | None = None,
        given: Tensor | None = None,
        progress: Advance | None = None,
        watch: Watch | None = None,
        every: int = 2,
        **settings: Any,
    ) -> list[Drawings]:
        """Draw several captions; see `__call__`.

        `seed` is one for all captions or one each; `given` holds fixed tokens [B, S] (`sampling.generate`).
        """
        if isinstance(captions, str):
            raise UserError("draw_many takes a list of captions, not one: put it into brackets")
        if n < 1:
            raise UserError(f"n is the number of drawings: at least 1, not {n}")
        try:
            options = replace(options, **settings)
        except ValueError as error:
            raise UserError(str(error)) from None
        seeds = _seeds(options.seed if seed is None else seed, len(captions))
        made = self.candidates(
            captions, max(n, options.candidates), seed=seeds, sampler=options, given=given, progress=progress,
            watch=watch, every=every,
        )  # fmt: skip
        order = distinct_first(best(made.scores, made.scores.shape[1]), made.tokens)[:, :n]
        return [
            Drawings(
                [
                    Drawing(
                        image=Image.fromarray(made.pictures[row, i].permute(1, 2, 0).numpy()),
                        caption=caption,
                        score=float(made.scores[row, i]),
                        seed=seeds[row],
                        candidate=int(i) + 1,
                        model=self.name,
                        settings=made.sampler.to_metadata(),
                    )
                    for i in order[row].tolist()
                ]
            )
            for row, caption in enumerate(captions)
        ]

    @torch.inference_mode()
    def candidates(
        self,
        captions: Sequence[str],
        count: int,
        *,
        seed: int | Sequence[int] = 0,
        sampler: Sampler = Sampler(),
        given: Tensor | None = None,
        progress: Advance | None = None,
        watch: Watch | None = None,
        every: int = 2,
    ) -> Candidates:
        """Draw `count` candidates of each caption; return them unranked, on the CPU. Raises `UserError`."""
        if count < 1:
            raise UserError(f"candidates is the number of drawings to choose from: at least 1, not {count}")
        if every < 1:
            raise UserError(f"every is a number of rows of tokens: at least 1, not {every}")
        sampler = sampler.with_defaults(self.sampler)
        seeds = _seeds(seed, len(captions))
        text = self._encode(captions, self.prior.config.text_len)
        judged = text
        if self.contrastive.config.text_len != self.prior.config.text_len:
            judged = self._encode(captions, self.contrastive.config.text_len)
        height, width = self.dvae.config.grid
        length = height * width
        side, device = self.dvae.config.size, self.device
        b = len(captions)
        tokens = torch.empty(b, count, length, dtype=torch.long)
        pictures = torch.empty(b, count, 3, side, side, dtype=torch.uint8)
        score = torch.empty(b, count)
        prior, contrastive = self._models()
        around = given is not None and bool((given != UNSET).any())
        drawn_tokens = told = 0
        for rows, part in _batches(seeds, count, self._rows()):
            size = len(rows) * len(part)

            def report(positions: int, size: int = size) -> None:
                nonlocal drawn_tokens, told
                drawn_tokens += positions * size
                if progress and (more := drawn_tokens // length - told):
                    told += more
                    progress(more)

            def look(found: Tensor, h: int, rows: list[int] = rows, part: range = part) -> None:
                if watch and h % every == 0:
                    watch(Partial(rows, part, self._shown(found[..., : h * width], h)))

            made = generate(
                prior, text[rows].to(device), part, sampler, seed=seeds[rows[0]],
                prompt_tokens=None if given is None else given[rows].to(device), store=self.runtime.store,
                progress=report, on_preview=look if watch else None,
            )  # fmt: skip
            shown = self._shown(made.tokens, height)
            where = slice(part.start, part.stop)
            found = made.log_likelihood
            if not around:
                found = scores(contrastive, judged[rows].to(device), shown).float() + self.likelihood * found
            score[rows, where] = found.cpu()
            tokens[rows, where], pictures[rows, where] = made.tokens.cpu(), shown.cpu()
        return Candidates(pictures, score, tokens, sampler)

    def _shown(self, tokens: Tensor, rows: int) -> Tensor:
        """Decode tokens [b, n, rows * w] into pictures, uint8 [b, n, 3, height, W]."""
        c = self.dvae.config
        codes, states = math.prod(c.grid) * c.vocab, c.size**2 * c.width
        each = 8 * codes + 4 * 4 * states  # int64 codes, and about four fp32 tensors of the widest layer
        parts = tokens.flatten(0, 1).split(max(1, _PICTURE_BYTES // each))
        shown = torch.cat([self.dvae.decode_tokens(part, (rows, c.grid[1])) for part in parts])
        return shown.unflatten(0, tokens.shape[:2])

    def _encode(self, captions: Sequence[str], length: int) -> Tensor:
        for caption in captions:
            try:
                caption.encode()
            except UnicodeEncodeError:
                raise UserError(f"the caption {caption!r} is not valid Unicode text: check its encoding") from None
        return self.tokenizer.encode(captions, length)

    def _rows(self) -> int:
        """Return the number of candidates per batch, limited by the memory of keys and values."""
        c, dtype = self.prior.config, self.runtime.precision.dtype(self.device)
        like = torch.empty(1, c.heads, 0, c.width // c.heads, dtype=dtype, device="meta")
        stores = (self.runtime.store(like, 1, pattern.cache_slots) for pattern in c.patterns)
        each = 2 * sum(store.bytes_per_candidate for store in stores)
        most, room = _ROWS, _CACHE_BYTES
        if self.device.type == "cuda":
            self._free = self._free or torch.cuda.mem_get_info(self.device)[0]
            most, room = _GPU_ROWS, self._free // 4  # two CUDA graphs, plus a cache copied into one, take three
        return max(1, min(most, room // each))

    @torch.inference_mode(False)  # the compiler does not support inference tensors
    def _models(self) -> tuple[TokenDecoder, CLIP]:
        """Return decoder and contrastive model in the format of drawing, built once."""
        if self._drawing is None:
            prior, contrastive = self.prior, self.contrastive
            dtype = self.runtime.precision.dtype(self.device)
            if dtype == torch.bfloat16:
                contrastive = pack_linears(copy.deepcopy(contrastive).to(dtype))
            if dtype == torch.bfloat16 or self.runtime.int8_weights:
                prior = copy.deepcopy(prior).to(dtype)
                if self.runtime.int8_weights:
                    prior = quantize_linears(prior)
                elif not self.runtime.compiled:  # the compiler chooses the layout of weights
                    prior = pack_linears(prior)
            self._drawing = build_decoder(prior, self.runtime.compiled), contrastive
        return self._drawing

    # ------------------------------------------------------------------------ bundles

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> Path:
        """Write a bundle atomically, replacing an existing one. Return the folder.

        With `dtype` `torch.int8`, the matrices of the prior and the contrastive model take half the space of half
        precision. Raises `UserError` if the folder has other content or a weight is not finite.
        """
        models = {"dvae": self.dvae, "prior": self.prior, "contrastive": self.contrastive}
        info = {"limner": __version__, **self.info}
        self.info = bundles.write(Path(folder), models, self.tokenizer, info, dtype)
        return Path(folder)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: torch.device | str | None = None, **runtime: Any
    ) -> TextToImage:
        """Read a bundle onto `device` (by default a GPU if available); `runtime` are settings of `Runtime`.

        Raises `UserError` if a part of the bundle is missing, damaged or inconsistent.
        """
        folder = pretrained.find(folder)
        models, tokenizer, info = bundles.read(folder)
        try:
            pipe = cls(**models, tokenizer=tokenizer, info=info, runtime=Runtime(**runtime))
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return pipe.to(device)


def load(name_or_folder: str | Path = pretrained.DEFAULT, **options: Any) -> TextToImage:
    """Load a bundled model, by name, or any bundle, by folder.

    `options` are `device` and settings of `Runtime`. Raises `UserError` if the model is missing or invalid.
    """
    return TextToImage.from_pretrained(pretrained.named(name_or_folder), **options)


def _seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """Return a seed per caption, as Python integers, since numpy's overflow. Raises `UserError` for an invalid seed."""
    seeds = [seed] * count if isinstance(seed, (int, np.integer)) else list(seed)
    if len(seeds) != count:
        raise ValueError(f"{len(seeds)} seeds for {count} captions")
    try:
        for one in seeds:
            SEEDS.check("seed", one, whole=True)
    except OutOfRange as error:
        raise UserError(str(error)) from None
    return [int(one) for one in seeds]


def _batches(seeds: Sequence[int], count: int, rows: int) -> list[tuple[list[int], range]]:
    """Return (caption indices, candidate indices) of each batch; captions with equal seeds share batches."""
    step = min(count, rows)
    parts = [range(i, min(i + step, count)) for i in range(0, count, step)]
    together = max(1, rows // step)
    by_seed: dict[int, list[int]] = {}
    for row, seed in enumerate(seeds):
        by_seed.setdefault(seed, []).append(row)
    return [
        (group[i : i + together], part)
        for group in by_seed.values()
        for i in range(0, len(group), together)
        for part in parts
    ]


def _check_fit(dvae: AnyDVAEConfig, prior: TransformerConfig, contrastive: CLIPConfig, tokenizer: Tokenizer) -> None:
    pairs = (
        ("grid of the prior", tuple(prior.grid), "grid of the dVAE", tuple(dvae.grid)),
        ("image vocabulary of the prior", prior.image_vocab, "codebook of the dVAE", dvae.vocab),
        ("picture of the contrastive model", contrastive.size, "picture of the dVAE", dvae.size),
        ("text vocabulary of the prior", prior.text_vocab, "tokenizer", tokenizer.vocab_size),
        ("text vocabulary of the contrastive model", contrastive.text_vocab, "tokenizer", tokenizer.vocab_size),
    )
    for left, a, right, b in pairs:
        if a != b:
            raise UserError(f"these models do not belong together: the {left} has size {a}, the {right} {b}")
