"""Model card of a bundle."""

from collections.abc import Mapping
from typing import Any

from limner.data.attribution import KEYS, merge_attributions
from limner.json_files import to_json
from limner.text.bpe import Tokenizer

__all__ = ["model_card"]


def model_card(models: Mapping[str, Any], tokenizer: Tokenizer, info: Mapping[str, Any]) -> str:
    """Return the model card of a bundle: architecture, data, attribution, scores, recipe and limits."""
    dvae, prior = models["dvae"].config, models["prior"].config
    h, w = dvae.grid
    lines = [
        f"# {info.get('name', 'A bundle of limner')}",
        "",
        str(info.get("about") or "A text-to-image model trained with limner: dVAE, transformer prior, reranker."),
        "",
        f"- pictures: {dvae.size} x {dvae.size} pixels, {h} x {w} tokens of {dvae.vocab} codes",
        f"- captions: at most {prior.text_len} tokens of {tokenizer.vocab_size}, lowercased",
    ]
    names = {"dvae": "dVAE", "prior": "prior", "contrastive": "contrastive model"}
    for part, title in names.items():
        count = sum(p.numel() for p in models[part].parameters())
        lines.append(f"- {title}: {count / 1e6:.2f} M parameters")
    for key in ("data", "samples", "created", "limner", "license"):
        if key in info:
            lines.append(f"- {key}: {info[key]}")
    if examples := info.get("examples"):
        lines.append(f"- training pictures in the bundle: {examples:,}, one of which is followed if a caption names it")
    lines += [
        "", "## Use", "", "```python", "import limner", "",
        'limner.load("THIS/FOLDER")("a caption", n=4, candidates=64, seed=0).save("drawing.png")', "```",
    ]  # fmt: skip
    if rows := merge_attributions(info.get("attribution")):
        lines += ["", "## Attribution", "", "The training pictures are by:", "", *map(_credit, rows)]
    for key, title in (("scores", "Scores"), ("recipe", "Recipe")):
        if info.get(key):
            text = to_json(info[key], indent=2, ensure_ascii=False)
            lines += ["", f"## {title}", "", "```json", text, "```"]
    lines += [
        "", "## Limits", "",
        "The model draws only what its training data shows; other captions give meaningless pictures. The metadata of",
        "each PNG states that a model drew it.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _credit(row: Mapping[str, Any]) -> str:
    credited = ", ".join(row[key] for key in KEYS if key in row)
    return f"- {credited or 'others'}: {row['pictures']:,} pictures"
