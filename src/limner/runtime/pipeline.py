"""Text-to-image pipeline of a bundle with ONNX files: the drawings of `limner.load`, without torch.

    pipe = limner.runtime.pipeline.OnnxPipeline("scenes")
    drawings = pipe("a small red circle", candidates=16, seed=0)

A process starts and draws in a fraction of the time that importing torch takes. Pictures equal those of the other
pipeline in fp32, apart from float rounding, which may flip a choice between two equally likely tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from limner.atomic_io import file_hash
from limner.drawing import Drawings
from limner.errors import UserError
from limner.json_files import read_mapping
from limner.pretrained import find_bundle, resolve_name
from limner.priming import add_given, follow, follow_example, prompt, square
from limner.progress import Advance
from limner.retrieval import Examples
from limner.runtime import FILE, FORMAT, WEIGHTS
from limner.runtime.sampling import UNSET, candidate_noise, generate
from limner.sampling.generation_config import GenerationConfig, ModelDefaults, Sampler
from limner.text import PAD
from limner.text.bpe import Tokenizer

__all__ = ["OnnxPipeline", "has_graphs"]

MAX_BATCH = 64  # candidates in one batch
MAX_GRAPH_BYTES = 64 << 20
MAX_SIZE = 1 << 12  # of a side, a grid or a caption


def has_graphs(name_or_folder: str | Path) -> bool:
    """Return True if the bundle has ONNX files. Raises `UserError` if there is no bundle."""
    return (find_bundle(resolve_name(name_or_folder)) / FILE).is_file()


class OnnxPipeline:
    """Pipeline of a bundle with ONNX files.

    Args:
        name_or_folder: a bundled model or a folder.

    Raises:
        UserError: the bundle or its ONNX files are missing, damaged, or do not belong together.
    """

    def __init__(self, name_or_folder: str | Path) -> None:
        self.folder = find_bundle(resolve_name(name_or_folder))
        if not (self.folder / FILE).is_file():
            raise UserError(f"{self.folder} lacks ONNX files: `limner export` writes a copy with them")
        config, graphs = read_mapping(self.folder / "config.json"), read_mapping(self.folder / FILE)
        if graphs.get("format") != FORMAT:
            raise UserError(f"{self.folder / FILE} has another format than {FORMAT!r}: export the bundle again")
        try:
            for name in WEIGHTS:
                if graphs["weights"][name] != file_hash(self.folder / name):
                    raise UserError(f"{self.folder / name} changed after the export to ONNX: export the bundle again")
            dvae, prior, contrastive = (config[name] for name in ("dvae", "prior", "contrastive"))
            self.info: dict[str, Any] = config.get("info", {})
            self.size, self.grid = _whole(dvae["size"]), (_whole(prior["grid"][0]), _whole(prior["grid"][1]))
            self.text_len, self.rerank_len = _whole(prior["text_len"]), _whole(contrastive["text_len"])
            self.max_window, self.can_follow = _whole(graphs["window"]), prior.get("condition_blocks", 0) > 0
            self._vocab = index(prior["image_vocab"])
            self.defaults = ModelDefaults.from_info(self.info)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder}: config.json or {FILE} is invalid: {error!r}") from None
        self.tokenizer = Tokenizer.load(self.folder / "tokenizer.json")
        self._sessions: dict[str, Any] = {}

    @cached_property
    def examples(self) -> Examples | None:
        """Training pictures to follow, which are read when first needed; see `TextToImage`."""
        return Examples.find(self.folder, self.grid[0] * self.grid[1], self._vocab)

    @property
    def name(self) -> str:
        return str(self.info.get("name") or "unnamed")

    def prime(self, image: Image.Image, keep_rows: int | None = None, mask: Image.Image | None = None) -> np.ndarray:
        """Return the tokens [S] of a picture, `UNSET` where to draw; see `TextToImage.prime`."""
        pixels, unset = prompt(image, self.size, self.grid, keep_rows, mask)
        (tokens,) = self.run("encode", pictures=pixels[None])
        return np.where(unset, UNSET, tokens[0])

    def like(self, image: Image.Image) -> np.ndarray:
        """Return prompt tokens [2 S] to follow a picture; see `TextToImage.like`."""
        return follow(self.run("encode", pictures=square(image, self.size)[None])[0][0])

    def __call__(
        self,
        caption: str,
        options: GenerationConfig = GenerationConfig(),
        *,
        n: int = 1,
        prompt_tokens: np.ndarray | None = None,
        progress: Advance | None = None,
        **settings: Any,
    ) -> Drawings:
        """Draw a caption, with tokens from `prime` or `like` if a picture is given; see `TextToImage.__call__`."""
        if not isinstance(caption, str):
            raise UserError(f"the caption must be a string, not {caption!r}: draw one caption at a time")
        options, count = options.resolve(n, self.defaults, settings)
        sampler = self.sampler(options)
        drawn = self.candidates(caption, count, options.seed, sampler, prompt_tokens, progress)
        return Drawings.best(*drawn[:3], n, caption=caption, seed=options.seed, model=self.name, settings=drawn[3])

    def sampler(self, options: Sampler) -> Sampler:
        """Return the settings with the model's own where they are unset."""
        return options.with_defaults(self.defaults.sampler)

    def candidates(
        self,
        caption: str,
        count: int,
        seed: int,
        sampler: Sampler,
        prompt_tokens: np.ndarray | None = None,
        progress: Advance | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Return N pictures uint8 [N, 3, H, W], scores [N], tokens [N, S] and their metadata. Raises `UserError`."""
        length, follows = self.grid[0] * self.grid[1], None
        if prompt_tokens is None:
            prompt_tokens, follows = follow_example(
                self.examples, caption, lambda x: int(self._cosines(caption, self.run("decode", tokens=x)[0]).argmax())
            )
        text = self.tokenizer.encode_array([caption], self.text_len)[0]
        text, kept = add_given(text, prompt_tokens, length, self.can_follow)
        given = np.full(length, UNSET) if kept is None else kept
        prior = _OnnxPrior(self, text[None])
        empty = _OnnxPrior(self, np.full_like(text[None], PAD)) if sampler.guided else None
        tokens, scores = np.empty((count, length), np.int64), np.empty(count)
        pictures = np.empty((count, 3, self.size, self.size), np.uint8)
        for begin in range(0, count, MAX_BATCH):
            rows = slice(begin, min(begin + MAX_BATCH, count))
            noise = candidate_noise(seed, range(rows.start, rows.stop), length)
            tokens[rows], scores[rows] = generate(prior, empty, sampler, noise, given, self.grid[1], progress)
            (decoded,) = self.run("decode", tokens=tokens[rows])
            if decoded.shape[1:] != pictures.shape[1:]:
                raise UserError("the ONNX files do not fit the bundle, export it again: pictures have another size")
            pictures[rows] = decoded
        if kept is None:
            scores = self._cosines(caption, pictures) + self.defaults.prior_score_weight * scores
        return pictures, scores, tokens, {**sampler.to_metadata(), "follows": follows}

    def _cosines(self, caption: str, pictures: np.ndarray) -> np.ndarray:
        """Return the cosines of pictures and caption, [N]. Raises `UserError`."""
        rerank_text = self.tokenizer.encode_array([caption], self.rerank_len)
        (cosines,) = self.run("score", text=rerank_text, pictures=pictures)
        if not np.isfinite(cosines).all():
            raise UserError("the scores of the contrastive model are not finite: its weights are damaged")
        return cosines

    def run(self, graph: str, **inputs: np.ndarray) -> list[np.ndarray]:
        """Run a graph of the bundle. Raises `UserError` if the graph does not fit the bundle's configuration."""
        return _run(self.session(graph), inputs)

    def session(self, graph: str) -> Any:
        """Return the session of a graph, which is loaded once."""
        if graph not in self._sessions:
            import onnxruntime

            path = self.folder / f"{graph}.onnx"
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3  # errors
            options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS") or 0)  # which `openmp.py` sets
            try:
                if path.stat().st_size > MAX_GRAPH_BYTES:
                    raise UserError(f"{path} is larger than {MAX_GRAPH_BYTES >> 20} MiB: export the bundle again")
                session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            except FileNotFoundError:
                raise UserError(f"{path} is missing: export the bundle again") from None
            except Exception as error:  # onnxruntime's classes share no base
                reason = str(error).splitlines()[0][:200]
                raise UserError(f"{path} is damaged, export the bundle again: {reason}") from None
            self._sessions[graph] = session
        return self._sessions[graph]


def _run(session: Any, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run a session. Raises `UserError` if the graph does not take these inputs."""
    try:
        return session.run(None, inputs)
    except Exception as error:  # onnxruntime's classes share no base
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"the ONNX files do not fit the bundle, export it again: {reason}") from None


def _whole(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise UserError(f"config.json has a size of {value!r}: a size must be a whole number from 1 to {MAX_SIZE}")
    return value


class _OnnxPrior:
    """The prior after a caption [1, T], with keys and values of the candidates."""

    def __init__(self, pipeline: OnnxPipeline, text: np.ndarray) -> None:
        self.max_window, self._session = pipeline.max_window, pipeline.session("step")
        logits, *prefix = pipeline.run("prefill", text=text)
        self._first = logits[0]
        self._prefix = {f"prefix_{i}": x for i, x in enumerate(prefix)}
        self._states: dict[str, np.ndarray] = {}

    def start(self, rows: int) -> np.ndarray:
        shapes = {x.name: x.shape for x in self._session.get_inputs() if x.name.startswith("states_")}
        self._states = {name: np.zeros((lanes, rows, *rest), np.float32) for name, (lanes, _, *rest) in shapes.items()}
        return self._first

    def step(self, tokens: np.ndarray, position: np.ndarray) -> np.ndarray:
        inputs: Mapping[str, np.ndarray] = {"tokens": tokens, "position": position, **self._prefix, **self._states}
        logits, *states = _run(self._session, inputs)
        self._states = dict(zip(self._states, states, strict=True))
        return logits

    def select(self, rows: np.ndarray) -> None:
        self._states = {name: x[:, rows] for name, x in self._states.items()}
