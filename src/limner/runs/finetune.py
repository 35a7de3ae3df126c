"""Finetuning of a bundle's prior on a few pictures, with as little forgetting as possible.

    RUN/tokens/   RUN/ordinary.safetensors   RUN/prior/   RUN/bundle/   RUN/adapter/ (of LoRA)

A prior that trains on five pictures alone learns them in fifty steps, and draws other captions worse with each step. So
half of each batch are *ordinary samples*: pictures that the start bundle draws, at temperature 1, for captions similar
to its training captions. This works without the old training data. The pictures are samples of the start's own
distribution, so the rise of their cross-entropy estimates the Kullback-Leibler divergence of the finetuned prior from
the start: *forgetting*. A bundle with examples to follow (`retrieval.py`) rehearses these, its training pictures,
instead of drawings. New pictures follow them as well, and become examples of the finetuned bundle and of the adapter.

Only image tokens have a loss: predicting captions is of no use in drawing, and a new word would dominate the gradient.

The cross-entropies of the new pictures and of ordinary samples that do not train are measured every few steps, in nats
per token. Of 20 new pictures or more, one in ten does not train and is measured instead of those that do. The step with
the lowest sum of both is kept, and training stops after `PATIENCE` measurements without a lower one. The run trains
neither the dVAE nor the contrastive model. A method of `finetune_methods.py` says which parameters of the prior train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from limner import pretrained
from limner.atomic_io import exclusive_lock, file_hash
from limner.data.attribution import attribution, merge_attributions
from limner.data.datasets import CaptionEncoding, ImageCaptionDataset, TokenDataset
from limner.data.open_source import open_source
from limner.data.sample import Source, Subset, group_by_split
from limner.data.stream import Stream
from limner.data.token_cache import encode_tokens, weights_hash
from limner.errors import UserError
from limner.evaluation.reconstruction import psnr
from limner.evaluation.validation import held_out_metrics
from limner.objectives.autoregressive import Autoregressive
from limner.pipeline import TextToImage
from limner.progress import Progress, progress
from limner.retrieval import Examples
from limner.runs.finetune_methods import FinetuneConfig
from limner.runs.ordinary_samples import draw_ordinary, following, ordinary_captions, rehearsal
from limner.training.hooks import Hook
from limner.training.loop import train
from limner.training.train_module import Batch
from limner.training.train_state import Evaluate, TrainState

SCORED_SAMPLES = 64  # ordinary samples that measure forgetting; the others train
PATIENCE = 3  # measurements without improvement after which training stops
FORGETTING = 0.05  # relative rise of the cross-entropy of ordinary samples that counts as forgetting
_MANY, _HELD_OUT = 20, 10  # new pictures of which one in ten measures what is learned
_EVALUATION_BATCH = 64
_MAX_RECONSTRUCTIONS = 64
_INFO_OF_START = ("name", "created", "limner", "scores", "attribution")  # that does not hold for the finetuned bundle


class BestStep(Hook):
    """Scores every evaluation, keeps the weights of the best step, and ends training when none follows.

    The score of a step is the sum of both cross-entropies, of new and of ordinary pictures.

    Attributes:
        scores: (step, cross-entropy of new pictures, of ordinary ones) of each evaluation, in nats per token.
        best: trained parameters of the best step, as one vector.
    """

    saved = ("scores", "best")

    def __init__(self, run: TrainState, evaluate: Evaluate, bar: Progress) -> None:
        self.evaluate, self.bar, self.parameters = evaluate, bar, run.parameters
        self.scores: list[Sequence[float]] = []
        self.best = parameters_to_vector(run.parameters).detach().clone()

    @property
    def best_row(self) -> Sequence[float]:
        return min(self.scores, key=lambda row: row[1] + row[2])

    @property
    def done(self) -> bool:
        return bool(self.scores) and len(self.scores) - self.scores.index(self.best_row) > PATIENCE

    def before_step(self, run: TrainState) -> None:
        if not self.scores:
            self.after_eval(run, run.evaluate(self.evaluate))

    def after_eval(self, run: TrainState, metrics: Mapping[str, float]) -> None:
        self.scores.append((run.step, metrics["new"], metrics["ordinary"]))
        if self.best_row is self.scores[-1]:
            self.best.copy_(parameters_to_vector(self.parameters))
        self.bar.note(f"step {run.step}: new {metrics['new']:.4f}, ordinary {metrics['ordinary']:.4f} nats per token")

    def restore(self) -> None:
        """Put the weights of the best step into the model."""
        vector_to_parameters(self.best, self.parameters)

    def summary(self) -> str:
        """Return when the new pictures were learned, from when on others were forgotten, and the best step's scores."""
        (_, new_start, ordinary_start), (best_step, new, ordinary) = self.scores[0], self.best_row
        learned = next(step for step, value, _ in self.scores if value <= new + (new_start - new) / 10)
        forgotten = [value > ordinary_start * (1 + FORGETTING) for _, _, value in self.scores]
        since = len(forgotten) - [*forgotten[::-1], False].index(False)
        when = f"forgetting from step {self.scores[since][0]}" if since < len(forgotten) else "no forgetting"
        return (
            f"learned at step {learned}, {when}; kept step {best_step}: new pictures {new_start:.4f} -> {new:.4f}, "
            f"ordinary ones {ordinary_start:.4f} -> {ordinary:.4f} nats per token"
        )


class MixedStream:
    """Batches of several streams, joined."""

    def __init__(self, *streams: Stream) -> None:
        self.streams = streams

    def __next__(self) -> Batch:
        batches = [next(stream) for stream in self.streams]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"streams": [stream.state_dict() for stream in self.streams]}

    def load_state_dict(self, state: Any) -> None:
        for stream, part in zip(self.streams, state["streams"], strict=True):
            stream.load_state_dict(part)


def finetune(
    start: str | Path, data: str | Path, out: Path, config: FinetuneConfig, ordinary: str | None = None
) -> BestStep:
    """Train the prior of the bundle `start` on `data` by a method; write `out/bundle`, and for LoRA `out/adapter`.

    Repeating the call after an interruption continues the run. `ordinary` names the captions of ordinary samples: a
    text file with one per line, or training data; None takes those of the bundled model `scenes`. Returns the scores.

    Raises `UserError` if the bundle, the data or the captions are unusable, or the run in `out` has other settings.
    """
    folder = pretrained.find_bundle(pretrained.resolve_name(start))
    source = open_source(str(data))
    source = group_by_split(source).get("train") or Subset(source, [])
    if len(source) == 0:
        raise UserError(f"the split 'train' of {data} is empty: check the key 'split' of its metadata")
    pipe = TextToImage.from_pretrained(folder)
    if pipe.examples and ordinary is not None:
        raise UserError(f"the ordinary samples of {folder} are its own training pictures: leave out --ordinary")
    captions = None if pipe.examples else ordinary_captions(folder, ordinary)
    with exclusive_lock(out):
        new = _encode(pipe, source, out)
        samples = _samples(pipe, new, captions, out, config.seed)
        best = _train(pipe, file_hash(folder / "prior.safetensors"), samples, out, config)
        learned = None
        if pipe.examples:
            learned = Examples.from_captions(new.tokens, [first for first, *_ in new.captions])
            pipe.examples = pipe.examples.joined(learned)
        tuned = config.finish(pipe, str(start), folder, out, learned)
        rows = merge_attributions(tuned.info.get("attribution"), attribution(source))
        kept = {key: value for key, value in tuned.info.items() if key not in _INFO_OF_START}
        about = {"start": str(start), "data": Path(data).name, "samples": len(source), **config.info}
        tuned.info = {**kept, **about, **({"attribution": rows} if rows else {})}
        tuned.save_pretrained(out / "bundle")
    return best


@dataclass(frozen=True)
class _Samples:
    """New and ordinary samples that train, and those that measure what is learned and forgotten."""

    new: TokenDataset
    ordinary: TokenDataset
    measured_new: TokenDataset
    measured_ordinary: TokenDataset


def _samples(
    pipe: TextToImage, new: TokenDataset, captions: list[str] | None, out: Path, seed: int
) -> _Samples:  # fmt: skip
    """Return the samples; ordinary ones are drawings of `captions`, or the pipeline's examples if these are None."""
    count = len(new) // _HELD_OUT if len(new) >= _MANY else 0
    order = np.random.default_rng(seed).permutation(len(new))
    parts = [
        (new.tokens[rows], [new.captions[int(row)] for row in rows])
        for rows in (np.sort(order[count:]), np.sort(order[: count or None]))
    ]
    if captions is None:
        assert pipe.examples is not None
        trained, measured = (
            following(pipe, *part, pipe.examples, training) for part, training in zip(parts, (True, False), strict=True)
        )
        ordinary, measured_ordinary = rehearsal(pipe, pipe.examples, SCORED_SAMPLES)
        return _Samples(trained, ordinary, measured, measured_ordinary)
    trained, measured = (_dataset(pipe, *part) for part in parts)
    drawn = draw_ordinary(pipe, captions, out / "ordinary.safetensors", seed)
    ordinary, measured_ordinary = (
        _dataset(pipe, drawn[rows], [(caption,) for caption in captions[rows]])
        for rows in (slice(SCORED_SAMPLES, None), slice(SCORED_SAMPLES))
    )
    return _Samples(trained, ordinary, measured, measured_ordinary)


def _dataset(pipe: TextToImage, tokens: Tensor | np.ndarray, captions: Sequence[Sequence[str]]) -> TokenDataset:
    length = pipe.prior.config.text_len
    return TokenDataset(tokens, captions, CaptionEncoding(tokenizer=pipe.tokenizer, length=length))


def _encode(pipe: TextToImage, source: Source, out: Path) -> TokenDataset:
    """Return the tokens and captions of the new pictures; say how well the dVAE reconstructs them."""

    def encode(pixels: Tensor) -> Tensor:
        return pipe.dvae.tokenize(pixels.to(pipe.device)).cpu()

    size = pipe.size
    with progress("encoding pictures", len(source), unit="image") as bar:
        cache = encode_tokens(
            source, encode, key=weights_hash(pipe.dvae), size=size, cache_dir=out / "tokens", progress=bar.advance
        )
        shown = cache.indices[:_MAX_RECONSTRUCTIONS]
        pixels = ImageCaptionDataset(source, size).load(shown)[1].to(pipe.device)
        quality = psnr(pixels, pipe.dvae.decode_tokens(pipe.dvae.tokenize(pixels)))
        bar.note(f"the dVAE does not train; it reconstructs the new pictures with {quality.mean():.1f} dB")
    return _dataset(pipe, cache.tokens, cache.captions)


def _train(pipe: TextToImage, start_hash: str, samples: _Samples, out: Path, config: FinetuneConfig) -> BestStep:
    """Train the pipeline's prior, which then has the weights of the best step."""
    objective, prior = Autoregressive(text_weight=0.0, logit_operands="autocast"), pipe.prior
    measures = {
        name: held_out_metrics(objective, part, _EVALUATION_BATCH, pipe.device)
        for name, part in (("new", samples.measured_new), ("ordinary", samples.measured_ordinary))
    }

    def evaluate(model: Any, step: int) -> Mapping[str, float]:
        return {name: measure(model, step)["image"] for name, measure in measures.items()}

    config.prepare(prior)
    streams = [Stream(samples.new, config.batch_size - config.ordinary_samples, config.seed)]
    if config.ordinary_samples:
        streams.append(Stream(samples.ordinary, config.ordinary_samples, config.seed))
    record = {**config.record, "model": prior.config, "objective": objective, "start": start_hash}
    with progress("finetuning", config.steps) as bar:
        run = TrainState(prior, objective, config.training, pipe.device)
        best = BestStep(run, evaluate, bar)
        hooks = [*config.hooks(run, out, [samples.new, samples.ordinary]), best]
        train(run, MixedStream(*streams), out / "prior", evaluate=evaluate, record=record, hooks=hooks, bar=bar)
    best.restore()
    return best
