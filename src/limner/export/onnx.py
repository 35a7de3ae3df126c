"""Export of a bundle to ONNX, for drawing without torch (`runtime/`).

The graphs contain operations only. Their weights are tensors in the bundle's own `.safetensors` files, which ONNX reads
as external data, so a bundle with graphs takes little more space than without. A weight in 16 or 8 bits is converted to
fp32 when a session starts.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim

from limner import bundles
from limner.atomic_io import atomic_folder, atomic_write_bytes, file_hash
from limner.bundles import SCALE_SUFFIX
from limner.errors import UserError
from limner.export.parts import Decode, Encode, Part, Prefill, Score, Step, WithWeights, prefix_of
from limner.json_files import parse_json, write_json
from limner.pretrained import find_bundle, resolve_name
from limner.retrieval import EXAMPLES
from limner.runtime import FILE, FORMAT, WEIGHTS
from limner.sampling.decoder import TokenDecoder

MAX_WINDOW = TokenDecoder.max_window
GRAPHS = 5


class Recording(NamedTuple):
    """A part, its file of weights, example inputs, and the variable sizes of these by axis."""

    part: Part
    weights: str
    examples: Sequence[Tensor]
    sizes: Sequence[dict[int, Dim]]


def export_onnx(bundle: str | Path, out: str | Path, progress: Callable[[int], object] | None = None) -> Path:
    """Write a bundle with ONNX files into `out`, which may be the bundle itself. Return the folder.

    Calls `progress` with 1 after each of the `GRAPHS` graphs. Raises `UserError` if the bundle is invalid, or if
    the packages `onnx` and `onnxscript` are missing.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401  (torch.onnx needs it)
    except ImportError:
        raise UserError("export to ONNX needs onnx and onnxscript: pip install 'limner[export]'") from None
    folder, out = find_bundle(resolve_name(bundle)), Path(out)
    models, _, _ = bundles.read(folder)
    bundles.check_replaceable(out, bundles.FORMAT, "a bundle")
    with atomic_folder(out) as fresh:
        for name in (*bundles.FILES, *([EXAMPLES] if (folder / EXAMPLES).exists() else [])):
            shutil.copyfile(folder / name, fresh / name)
        for name, recording in _recordings(models):
            atomic_write_bytes(fresh / f"{name}.onnx", _graph(recording, fresh).SerializeToString())
            if progress:
                progress(1)
        weights = {name: file_hash(fresh / name) for name in WEIGHTS}
        write_json(fresh / FILE, {"format": FORMAT, "onnx": onnx.__version__, "window": MAX_WINDOW, "weights": weights})
    return out


def _recordings(models: dict[str, Any]) -> Iterator[tuple[str, Recording]]:
    """Yield each file's name and recording. The number of rows and the tokens of a step are variable sizes."""
    dvae, prior, contrastive = models["dvae"], models["prior"], models["contrastive"]
    rows, window, size = Dim("rows"), Dim("window", max=MAX_WINDOW), dvae.config.size
    pictures = torch.zeros(3, 3, size, size, dtype=torch.uint8)
    tokens = torch.zeros(3, dvae.config.grid[0] * dvae.config.grid[1], dtype=torch.long)
    text, rerank_text = (torch.zeros(1, m.config.text_len, dtype=torch.long) for m in (prior, contrastive))
    if prior.config.condition_blocks:
        text = torch.cat([text, tokens[:1]], 1)
    with torch.no_grad():
        cache, _ = TokenDecoder(prior).prefill(text, MAX_WINDOW)
    prefix = prefix_of(cache)
    states = [x for layer in cache.expand(3).layers for x in (*layer.keys.parts, *layer.values.parts)]
    steps = (torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 1, dtype=torch.long), *prefix, *states)
    step_sizes = [{0: rows, 1: window}, {0: rows}, *({} for _ in prefix), *({1: rows} for _ in states)]
    yield "prefill", Recording(Prefill(prior, MAX_WINDOW), "prior", [text], [{}])
    yield "step", Recording(Step(prior, cache.layers), "prior", steps, step_sizes)
    yield "decode", Recording(Decode(dvae), "dvae", [tokens], [{0: rows}])
    yield "encode", Recording(Encode(dvae), "dvae", [pictures[:1]], [{}])
    yield "score", Recording(Score(contrastive), "contrastive", [rerank_text, pictures], [{}, {0: rows}])


def _graph(recording: Recording, folder: Path) -> Any:
    """Record a part as an ONNX model whose weights are in the folder's safetensors file."""
    part = recording.part
    weights = {key: value.float() for key, value in part.model.state_dict().items()}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            WithWeights(part), (weights, *recording.examples), strict=False,
            dynamic_shapes={"weights": {key: {} for key in weights}, "tensors": tuple(recording.sizes)},
        )  # fmt: skip
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported is not None
    model = exported.model_proto
    _rename(model.graph, [*weights, *part.inputs], part.outputs)
    _attach_weights(model.graph, set(weights), folder / f"{recording.weights}.safetensors")
    for node in model.graph.node:  # stack traces of this machine
        del node.metadata_props[:]
        node.doc_string = ""
    return model


def _rename(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    names = dict(zip((x.name for x in graph.input), inputs, strict=True))
    names |= dict(zip((x.name for x in graph.output), outputs, strict=True))
    for value in (*graph.input, *graph.output):
        value.name = names[value.name]
    del graph.value_info[:]
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, name) for name in side]


def _attach_weights(graph: Any, keys: set[str], path: Path) -> None:
    """Turn the inputs `keys` of a graph into external tensors and the operations that convert them to fp32."""
    from onnx import TensorProto, helper

    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        tensors = parse_json(file.read(begin - 8))
    formats = {
        "F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16, "I8": TensorProto.INT8
    }  # fmt: skip
    used = {name for node in graph.node for name in node.input}
    nodes = []

    def stored(key: str) -> str:
        """Add the tensor as it is stored; return its name in fp32."""
        entry, name = tensors[key], f"stored.{key}"
        start, stop = entry["data_offsets"]
        tensor = TensorProto(
            name=name, data_type=formats[entry["dtype"]], dims=entry["shape"], data_location=TensorProto.EXTERNAL
        )
        for field, value in (("location", path.name), ("offset", begin + start), ("length", stop - start)):
            tensor.external_data.add(key=field, value=str(value))
        graph.initializer.append(tensor)
        nodes.append(helper.make_node("Cast", [name], [f"fp32.{key}"], to=TensorProto.FLOAT))
        return f"fp32.{key}"

    for key in sorted(keys & used):
        fp32 = stored(key)
        if (scale_key := key + SCALE_SUFFIX) in tensors:
            scale = stored(scale_key)
            if "axis_1" not in {tensor.name for tensor in graph.initializer}:
                graph.initializer.append(helper.make_tensor("axis_1", TensorProto.INT64, [1], [1]))
            nodes.append(helper.make_node("Unsqueeze", [scale, "axis_1"], [f"column.{key}"]))
            nodes.append(helper.make_node("Mul", [fp32, f"column.{key}"], [key]))
        else:
            nodes[-1].output[:] = [key]
    inputs = [x for x in graph.input if x.name not in keys]
    del graph.input[:]
    graph.input.extend(inputs)
    operations = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *operations])
