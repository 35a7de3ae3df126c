"""Exported bundles draw the same pictures without torch, and damaged ones raise one sentence."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from limner.cli import main
from limner.errors import UserError
from limner.export.onnx import GRAPHS, export_onnx
from limner.numerics.precision import Fp32
from limner.pipeline import TextToImage
from limner.runtime.pipeline import OnnxPipeline, has_graphs
from limner.sampling.generation_config import Sampler
from tiny import WORDS, examples, tiny_pipe


@pytest.fixture(scope="module", params=[pytest.param("fp16, paper's dVAE", marks=pytest.mark.slow), "int8, patches"])
def exported(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("exported")
    int8 = request.param.startswith("int8")
    pipe = tiny_pipe(1, patches=int8, condition_blocks=int(int8))
    if int8:
        pipe.examples = examples(pipe)
    pipe.save_pretrained(folder / "tiny", torch.int8 if int8 else torch.float16)
    graphs = []
    export_onnx(folder / "tiny", folder / "onnx", graphs.append)
    assert sum(graphs) == GRAPHS
    return folder / "onnx"


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(guidance=2.0, temperature=0.7, top_p=0.9)], ids=str)
def test_tokens_scores_and_pictures_are_those_of_torch(exported, sampler):
    pipe, onnx = TextToImage.from_pretrained(exported, precision=Fp32()), OnnxPipeline(exported)
    for caption in WORDS:
        expected = pipe.candidates([caption], 7, seed=4, sampler=sampler)
        pictures, scores, tokens, settings = onnx.candidates(caption, 7, 4, onnx.sampler(sampler))
        assert settings == expected.settings[0]
        np.testing.assert_array_equal(tokens, expected.tokens[0].numpy())
        np.testing.assert_allclose(scores, expected.scores[0].numpy(), atol=1e-5)
        assert np.abs(pictures.astype(int) - expected.pictures[0].numpy().astype(int)).max() <= 1  # rounding


@pytest.mark.parametrize("exported", ["int8, patches"], indirect=True)
def test_pictures_to_follow_are_those_of_torch(exported):
    pipe, onnx = TextToImage.from_pretrained(exported, precision=Fp32()), OnnxPipeline(exported)
    image, drawn = pipe(WORDS[1], candidates=1)[0].image, []
    for example in (True, False):
        if not example:
            pipe.examples = onnx.examples = None
        followed = None if example else pipe.like(image)
        expected = pipe.candidates([WORDS[0]], 3, seed=5, prompt_tokens=followed)
        prompt = None if example else onnx.like(image)
        _, scores, tokens, settings = onnx.candidates(WORDS[0], 3, 5, onnx.sampler(Sampler()), prompt)
        assert (settings["follows"] is not None) == example
        assert settings == expected.settings[0]
        np.testing.assert_array_equal(tokens, expected.tokens[0].numpy())
        np.testing.assert_allclose(scores, expected.scores[0].numpy(), atol=1e-5)
        drawn.append(tokens)
    assert not np.array_equal(*drawn)


@pytest.mark.parametrize(
    ("caption", "settings"),
    [
        (["a", "b"], {}), ("", {}), ("\ud800", {}), (WORDS[0], {"n": 0}), (WORDS[0], {"candidates": 0}),
        (WORDS[0], {"seed": -1}), (WORDS[0], {"temperature": "hot"}), (WORDS[0], {"top_p": 2.0}),
    ],
)  # fmt: skip
def test_mistakes_have_the_sentence_of_torch(exported, caption, settings):
    sentences = []
    for pipe in (TextToImage.from_pretrained(exported), OnnxPipeline(exported)):
        with pytest.raises(UserError) as raised:
            pipe(caption, **settings)
        sentences.append(str(raised.value).partition(": draw ")[0])
    assert sentences[0] == sentences[1]


def test_edited_pictures_are_those_of_torch(exported):
    pipe, onnx = TextToImage.from_pretrained(exported, precision=Fp32()), OnnxPipeline(exported)
    image = pipe(WORDS[1], candidates=1)[0].image
    given = onnx.prime(image, 3)
    np.testing.assert_array_equal(given, pipe.prime(image, 3)[0].numpy())
    edited, expected = (
        onnx(WORDS[0], candidates=4, prompt_tokens=given),
        pipe(WORDS[0], candidates=4, prompt_tokens=pipe.prime(image, 3)),
    )
    assert edited[0].candidate == expected[0].candidate
    assert edited[0].score == pytest.approx(expected[0].score, abs=1e-5)


def test_the_command_draws_and_edits_without_torch(exported, tmp_path):
    program = (
        "import sys, limner.cli as cli\n"
        "for words in sys.argv[1].split(';'):\n"
        "    assert cli.main(words.split('|')) == 0\n"
        "print(sorted(name for name in ('torch', 'jaxtyping', 'safetensors') if name in sys.modules))"
    )
    draw = ["draw", "two green crosses", "--model", str(exported), "-o", "a.png", "--candidates", "3"]
    edit = ["edit", "a.png", "two crosses", "--keep-rows", "2", "--model", str(exported), "-o", "b.png"]
    done = subprocess.run(
        [sys.executable, "-c", program, ";".join("|".join(words) for words in (draw, edit))],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "a.png").stat().st_size > 0
    assert (tmp_path / "b.png").stat().st_size > 0


def test_commands_that_need_torch_say_how_to_install_it(tmp_path):
    plain = tiny_pipe(1).save_pretrained(tmp_path / "plain")
    program = (
        "import sys\nsys.modules['torch'] = None\nimport limner, limner.cli as cli\n"
        "try:\n    limner.load\nexcept ImportError as error:\n    print(error)\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    for words in (["draw", "a circle", "--model", str(plain)], ["demo"], ["bench"]):
        done = subprocess.run([sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert done.stderr == "limner: this command needs the package torch: pip install 'limner[torch]'\n"
        assert done.stdout.startswith("limner.load needs torch: pip install 'limner[torch]'")


def test_engine_chooses_the_library(exported, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = tiny_pipe(1).save_pretrained(tmp_path / "plain")
    assert has_graphs(exported)
    assert not has_graphs(plain)
    assert main(["draw", "a circle", "--model", str(plain), "--engine", "onnx"]) == 2
    assert "lacks ONNX files: `limner export` writes a copy with them" in capsys.readouterr().err
    for engine in ("torch", "onnx"):
        assert main(["draw", "a circle", "--model", str(exported), "--engine", engine, "-o", f"{engine}.png"]) == 0
    scores = [line.split("score ")[1] for line in capsys.readouterr().out.splitlines()]
    assert len(scores) == 2


@pytest.mark.slow
def test_the_command_compares_drawings(tmp_path, capsys):
    source = tiny_pipe(2, patches=True).save_pretrained(tmp_path / "tiny")
    assert main(["export", str(source), "-o", str(source)]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 drawings equal those of torch in fp32, and 100.0% of tokens" in out
    assert has_graphs(source)


@pytest.mark.parametrize("exported", ["int8, patches"], indirect=True)
def test_a_vocabulary_that_is_no_number_is_one_sentence(exported, tmp_path):
    copy = damaged(exported, tmp_path / "copy", setting("config.json", "prior", "image_vocab", value="many"))
    with pytest.raises(UserError, match="config.json or onnx.json is invalid"):
        OnnxPipeline(copy)


def damaged(folder, copy, change):
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change(copy)
    return copy


def replaced(name, function):
    def change(folder):
        (folder / name).write_bytes(function((folder / name).read_bytes()))

    return change


def setting(name, *path, value):
    def function(raw):
        document = inner = json.loads(raw)
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return json.dumps(document).encode()

    return replaced(name, function)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("prior.safetensors", lambda raw: raw[:-1] + b"\1"), "prior.safetensors changed after the export"),
        (replaced("step.onnx", lambda raw: raw[:1_000]), "step.onnx is damaged, export the bundle again"),
        (lambda folder: (folder / "decode.onnx").unlink(), "decode.onnx is missing"),
        (setting("onnx.json", "format", value="limner-onnx-0"), "has another format"),
        (setting("onnx.json", "window", value=10**400), "must be a whole number from 1 to"),
        (setting("onnx.json", "weights", value=[]), "invalid"),
        (setting("config.json", "dvae", "size", value=48), "do not fit the bundle"),
        (setting("config.json", "prior", "grid", value=[6]), "invalid"),
        (setting("config.json", "prior", "text_len", value=10**9), "must be a whole number"),
        (setting("config.json", "info", "temperature", value="hot"), "temperature must be a number"),
    ],
)
def test_damaged_bundles_are_one_sentence(exported, tmp_path, change, message):
    folder = damaged(exported, tmp_path / "damaged", change)
    with pytest.raises(UserError, match=message):
        OnnxPipeline(folder)(WORDS[0], candidates=2)


def test_a_graph_reads_no_file_outside_the_bundle(exported, tmp_path):
    import onnx

    secret = tmp_path / "secret"
    secret.write_bytes(b"\0" * 65_536)
    folder = damaged(exported, tmp_path / "hostile", lambda folder: None)
    for location in (str(secret), "../secret"):
        model = onnx.load(folder / "prefill.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        onnx.save(model, folder / "prefill.onnx")
        with pytest.raises(UserError, match="prefill.onnx is damaged"):
            OnnxPipeline(folder)(WORDS[0], candidates=1)
