"""Export of a bundle to one HTML file that draws in a browser, without a server and without a network.

The file has the bundle's ONNX graphs and weights, ONNX Runtime Web (WebAssembly, one thread), and `page_model.js`,
which samples as `runtime/` does: the same tokens for the same seed. `page.js` is the user interface.

Binary files are compressed by gzip and written with 7 bits per character of ASCII, which is 18% longer than the bytes
(base 64: 33%): UTF-8 needs two bytes for the 4 of the 128 characters that HTML does not keep. The even and odd bytes of
weights are separated before: the odd ones of fp16 have sign and exponent, which compress well.
"""

from __future__ import annotations

import html
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from limner.atomic_io import atomic_write_text
from limner.data.attribution import merge_attributions
from limner.drawing import xmp_packet
from limner.errors import UserError
from limner.export.onnx import GRAPHS, export_onnx
from limner.json_files import parse_json, to_json
from limner.pretrained import ASSETS, find_bundle, resolve_name
from limner.retrieval import Examples
from limner.runtime import FILE, WEIGHTS
from limner.runtime.pipeline import OnnxPipeline
from limner.version import __version__

WEB = "onnxruntime-web"
GLUE, WASM = "dist/ort.wasm.bundle.min.mjs", "dist/ort-wasm-simd-threaded.wasm"
FILES = ("tokenizer.json", "prefill.onnx", "step.onnx", "decode.onnx", "score.onnx", *WEIGHTS)  # of the bundle
PARTS = GRAPHS + len(FILES) + 5
INLINED = ("head.html", "page.css", "page_sampling.js", "page_examples.js", "page_model.js", "page.js")
MAX_FILE_BYTES, MAX_ARCHIVE_BYTES = 64 << 20, 1 << 30  # of a file of the npm package, of the package
MAX_WEIGHT_BYTES = 256 << 20  # browsers limit the length of a text
_GET_WEB = f"`npm pack {WEB}@1.30` downloads it, then pass --{WEB} {WEB}-1.30.0.tgz"
_NOT_KEPT = {ord("\0"): "À", ord("\n"): "Á", ord("\r"): "Â", ord("<"): "Ã"}  # in the text of an element


def export_page(
    bundle: str | Path, out: Path, runtime: Mapping[str, bytes], progress: Callable[[int], object] = lambda n: None
) -> Path:
    """Write a bundle as an HTML file. Return its path.

    Args:
        runtime: files of the npm package onnxruntime-web, from `read_web`.
        progress: called with the number of graphs and files, of `PARTS`, that were recorded or compressed.

    Raises `UserError` if the bundle is invalid or too large.
    """
    folder = find_bundle(resolve_name(bundle))
    with tempfile.TemporaryDirectory() as temporary:
        exported = folder
        if (folder / FILE).is_file():
            progress(GRAPHS)
        else:
            exported = export_onnx(folder, Path(temporary, "bundle"), progress)
        pipe = OnnxPipeline(exported)
        if (size := sum((exported / name).stat().st_size for name in WEIGHTS)) > MAX_WEIGHT_BYTES:
            raise UserError(f"{folder} has {size >> 20} MiB of weights: a page holds at most {MAX_WEIGHT_BYTES >> 20}")
        files = {name: (exported / name).read_bytes() for name in FILES}
    license_name = pipe.info.get("license") or ("Apache-2.0" if folder.parent == ASSETS else None)
    config = {
        "name": pipe.name, "about": pipe.info.get("about"), "license": license_name,
        "attribution": merge_attributions(pipe.info.get("attribution")), "limner": __version__,
        "onnxruntime": str(parse_json(runtime["package.json"]).get("version")),
        "size": pipe.size, "grid": pipe.grid, "text_len": pipe.text_len, "rerank_len": pipe.rerank_len,
        "window": pipe.max_window, "can_follow": pipe.can_follow,
        "prior_score_weight": pipe.defaults.prior_score_weight,
        "sampler": pipe.defaults.sampler.to_metadata(), "xmp": xmp_packet("\ue000", pipe.name).split("\ue000"),
    }  # fmt: skip
    examples = pipe.examples or Examples(np.empty((0, 0), int), [], [])
    if examples.tokens.max(initial=0) >= 1 << 16:
        raise UserError(f"{folder} has examples with more than {1 << 16:,} image tokens: a page holds at most as many")
    phrases = {"subjects": examples.subjects, "styles": examples.styles}
    files |= {"examples.json": to_json(phrases).encode(), "examples.bin": examples.tokens.astype("<u2").tobytes()}
    files |= {"config.json": to_json(config).encode(), "ort.mjs": runtime[GLUE], "ort.wasm": runtime[WASM]}
    page, *parts = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.html", *INLINED))
    texts = {"title": html.escape(pipe.name), "files": "\n".join(_elements(files, progress))}
    for name, text in (*zip(INLINED, parts, strict=True), *texts.items()):
        page = page.replace(f"[[{name}]]", text)
    atomic_write_text(out, page)
    return out


def _elements(files: Mapping[str, bytes], progress: Callable[[int], object]) -> Iterator[str]:
    """Yield an HTML element for each file."""
    for name, data in files.items():
        separated = data[::2] + data[1::2] if name in WEIGHTS else data
        gzip = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16, 9, zlib.Z_FILTERED if name in WEIGHTS else 0)
        bits = np.unpackbits(np.frombuffer(gzip.compress(separated) + gzip.flush(), np.uint8))
        codes = np.packbits(np.pad(bits, (0, -len(bits) % 7)).reshape(-1, 7), axis=1) >> 1
        text = codes.tobytes().decode("ascii").translate(_NOT_KEPT)
        yield f'<script type="text/plain" id="{name}">{text}</script>'
        progress(1)


def read_web(path: Path | None) -> dict[str, bytes]:
    """Read the needed files of onnxruntime-web from its folder or .tgz file. Raises `UserError`."""
    if path is None or not path.exists():
        raise UserError(f"{path or 'a page'} {'does not exist' if path else f'needs {WEB}'}: {_GET_WEB}")
    files: dict[str, bytes] = {}
    try:
        for name, size, read in _members(path):
            if size > MAX_FILE_BYTES:
                raise UserError(f"{path}: {name} is larger than {MAX_FILE_BYTES >> 20} MiB: {_GET_WEB}")
            files[name] = read()
        if files.keys() == {"package.json", GLUE, WASM} and parse_json(files["package.json"])["name"] == WEB:
            return files
    except (OSError, EOFError, KeyError, TypeError, ValueError, tarfile.TarError, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}): {_GET_WEB}") from None
    raise UserError(f"{path} is not a package of {WEB} with {GLUE} and {WASM}: {_GET_WEB}")


def _members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Yield name, size and a function that reads, for each needed file of a folder or a .tgz file."""
    names = ("package.json", GLUE, WASM)
    if path.is_dir():
        yield from ((n, (path / n).stat().st_size, (path / n).read_bytes) for n in names if (path / n).is_file())
        return
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            if member.offset_data > MAX_ARCHIVE_BYTES:
                raise ValueError(f"more than {MAX_ARCHIVE_BYTES >> 20} MiB")
            file = archive.extractfile(member) if member.isreg() else None
            if file and (name := member.name.removeprefix("package/")) in names:
                yield name, member.size, file.read
