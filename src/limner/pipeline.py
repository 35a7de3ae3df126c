"""From a caption to pictures: three models and a tokenizer as one thing that draws (§2.6).

    pipe = limner.load()                       # the bundled model, or a folder
    drawings = pipe("a small red circle", n=2, candidates=64, seed=0)
    drawings[0].save("circle.png")

The prior draws `candidates` token grids, the dVAE decodes them, the contrastive model scores them
against the caption, and the best `n` are returned (`sampling/rerank.py`). Candidate i of a caption depends
on the caption, the seed and i alone: drawing more candidates, or other captions beside it, changes none
(apart from float rounding, which may flip a choice between two equally likely tokens).

Weights are stored in 16 or 8 bits (`bundles.py`); drawing computes in bf16 where the hardware multiplies
it fast, else in single precision.

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
from limner.layers.cache import Int8Store, Store
from limner.layers.inference_linear import int8, prepacked
from limner.models.contrastive import Contrastive, ContrastiveConfig
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

_ROWS = 256  # candidates in one batch at most on a CPU; beyond, its caches no longer help
_CACHE_BYTES = 1 << 30  # of keys and values in one batch on a CPU
_GPU_ROWS = 1_024  # on a GPU, where a quarter of the free memory may hold them
_LIKELIHOOD = Range(0, 100)
_PICTURE_BYTES = 1 << 30  # of codes and activations when tokens become pictures

Watch = Callable[["Partial"], object]


@dataclass(frozen=True)
class Candidates:
    """All candidates of B captions, in the order of their numbers: what evaluations look at.

    Attributes:
        pictures: uint8 [B, N, 3, H, W].
        scores: float32 [B, N], the larger the better; see `Drawing.score`.
        tokens: int64 [B, N, S].
        sampler: the one they were drawn with, with the model's own settings filled in.
    """

    pictures: Tensor
    scores: Tensor
    tokens: Tensor
    sampler: Sampler


@dataclass(frozen=True)
class Partial:
    """The top rows of unfinished drawings, to show while the rest is drawn.

    Attributes:
        captions: numbers of the captions, b of them.
        candidates: numbers of their candidates, n of them.
        pictures: uint8 [b, n, 3, height so far, W]. Its last rows may still change a little, since the dVAE's
            decoder looks at what is below.
    """

    captions: Sequence[int]
    candidates: range
    pictures: Tensor


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How drawing is computed.

    Args:
        precision: by default bf16 where the hardware multiplies it fast, and fp32 elsewhere.
        int8_cache: keys and values in 8 bits, which halves the memory of each candidate (`layers/cache.py`).
        int8_weights: the prior's matrices in 8 bits, which halves its memory.
        compiled: faster, after half a minute and more for each number of candidates, the first time
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
    def store(self) -> type[Store]:
        return Int8Store if self.int8_cache else Store


class TextToImage:
    """Draws pictures from captions.

    Args:
        dvae, prior, contrastive, tokenizer: trained to work together.
        info: JSON values for the model card: "name", "recipe", "data", "scores", ...; "temperature"
            and "guidance" are the defaults of drawings, "likelihood" its weight in their scores (`Drawing.score`).

    Raises:
        UserError: the parts do not fit together.
    """

    def __init__(
        self,
        dvae: AnyDVAE,
        prior: Transformer,
        contrastive: Contrastive,
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
        self._drawing: tuple[TokenDecoder, Contrastive] | None = None
        self._free = 0  # bytes of a GPU's memory before the first drawing

    def _own(self, setting: str, default: float = 1.0) -> float:
        """What the model brings along."""
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
        """Move all three models; returns itself."""
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
        """Draw a caption, or around what is given: `pipe(caption, given=pipe.given(picture, keep="top:6"))`.

        Args:
            options: candidates, seed and sampler; `settings` replace some of them:
                `pipe(caption, candidates=8, temperature=0.9)`.
            n: how many drawings to return, the best of the candidates that differ, if so many do. At least n
                candidates are drawn.
            given: tokens of a picture that stay, from the method `given`.
            progress: called with the number of candidates drawn since the last call.
            watch: called with the `Partial` pictures of a batch of candidates after `every` rows of tokens.

        Raises:
            UserError: the caption is empty or a setting is out of range.
        """
        if not isinstance(caption, str):
            raise UserError(f"a caption is a text, not {caption!r}; draw_many takes several")
        return self.draw_many(
            [caption], options, n=n, given=given, progress=progress, watch=watch, every=every, **settings
        )[0]

    def given(self, image: Image.Image, keep: str | None = None, mask: Image.Image | None = None) -> Tensor:
        """The picture's tokens [1, S], `UNSET` where to draw (priming and inpainting, §2.6, Figure 14).

        Args:
            image: its central square is taken, in the model's size; on white where it is transparent, as is `mask`.
            keep: "top:N" keeps the top N rows of tokens.
            mask: instead of `keep`, a picture whose light parts are drawn anew: every token with a light pixel.

        Raises `UserError` where that leaves nothing to keep or to draw.
        """
        if (keep is None) == (mask is None):
            raise UserError("say what to keep, as top:N, or give a mask of what to draw anew: one of the two")
        size, (h, w) = self.dvae.config.size, self.dvae.config.grid
        pixels = torch.from_numpy(augment_none(np.array(to_rgb(image)), size)).permute(2, 0, 1)
        tokens = self.dvae.tokens(pixels[None].to(self.device))[0]
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
        """Draw several captions; `seed` is one for all or one for each, `given` holds the tokens that are
        fixed (`sampling.generate`). Otherwise as `__call__`."""
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
        """All `count` candidates of each caption, unranked, on the CPU."""
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
        """Tokens [b, n, rows * w] -> uint8 [b, n, 3, height, W]."""
        c = self.dvae.config
        codes, states = math.prod(c.grid) * c.vocab, c.size**2 * c.width
        each = 8 * codes + 4 * 4 * states  # int64, and some four fp32 tensors of the widest layer at once
        parts = tokens.flatten(0, 1).split(max(1, _PICTURE_BYTES // each))
        shown = torch.cat([self.dvae.pictures(part, (rows, c.grid[1])) for part in parts])
        return shown.unflatten(0, tokens.shape[:2])

    def _encode(self, captions: Sequence[str], length: int) -> Tensor:
        for caption in captions:
            try:
                caption.encode()
            except UnicodeEncodeError:
                raise UserError(f"the caption {caption!r} is not valid Unicode text: check its encoding") from None
        return self.tokenizer.encode(captions, length)

    def _rows(self) -> int:
        """Candidates in one batch: as many as there is memory for their keys and values."""
        c, dtype = self.prior.config, self.runtime.precision.dtype(self.device)
        like = torch.empty(1, c.heads, 0, c.width // c.heads, dtype=dtype, device="meta")
        stores = (self.runtime.store(like, 1, pattern.held) for pattern in c.patterns)
        each = 2 * sum(store.bytes_per_candidate for store in stores)
        most, room = _ROWS, _CACHE_BYTES
        if self.device.type == "cuda":
            self._free = self._free or torch.cuda.mem_get_info(self.device)[0]
            most, room = _GPU_ROWS, self._free // 4  # two recordings and a cache that is copied into one take three
        return max(1, min(most, room // each))

    @torch.inference_mode(False)  # the compiler is for ordinary tensors
    def _models(self) -> tuple[TokenDecoder, Contrastive]:
        """Prior and contrastive model in the format they draw in, made once; copies if that is not their own."""
        if self._drawing is None:
            prior, contrastive = self.prior, self.contrastive
            dtype = self.runtime.precision.dtype(self.device)
            if dtype == torch.bfloat16:
                contrastive = prepacked(copy.deepcopy(contrastive).to(dtype))
            if dtype == torch.bfloat16 or self.runtime.int8_weights:
                prior = copy.deepcopy(prior).to(dtype)
                if self.runtime.int8_weights:
                    prior = int8(prior)
                elif not self.runtime.compiled:  # the compiler lays the weights out itself
                    prior = prepacked(prior)
            self._drawing = build_decoder(prior, self.runtime.compiled), contrastive
        return self._drawing

    # ------------------------------------------------------------------------ bundles

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> Path:
        """Write a bundle, all or nothing; a bundle that is there already is replaced.

        With `torch.int8` as `dtype` the prior's and the contrastive model's matrices take half of what they take in
        half precision. Raises `UserError` if the folder holds something else.
        """
        models = {"dvae": self.dvae, "prior": self.prior, "contrastive": self.contrastive}
        info = {"limner": __version__, **self.info}
        self.info = bundles.write(Path(folder), models, self.tokenizer, info, dtype)
        return Path(folder)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: torch.device | str | None = None, **runtime: Any
    ) -> TextToImage:
        """Read a bundle onto `device` (by default a GPU if there is one); `runtime` are settings of `Runtime`.

        Raises `UserError` in one sentence for whatever is missing, damaged or contradictory.
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
    """A model that comes with the package, by name, or any bundle, by folder.

    `options` are `device` and the settings of `Runtime`, `compiled=True` say. Raises `UserError`.
    """
    return TextToImage.from_pretrained(pretrained.named(name_or_folder), **options)


def _seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """A seed for each of `count` captions, as Python's own numbers: those of numpy overflow. Raises `UserError`."""
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
    """(captions, candidate numbers) of each batch: captions of one seed share a batch while it has room."""
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


def _check_fit(
    dvae: AnyDVAEConfig, prior: TransformerConfig, contrastive: ContrastiveConfig, tokenizer: Tokenizer
) -> None:
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
