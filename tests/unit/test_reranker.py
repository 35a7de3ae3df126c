"""A published CLIP model from conversion to use: classification, drawings, features."""

import json

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from limner.bundles import load_model
from limner.cli import main
from limner.data.image_encode import image_bytes
from limner.errors import UserError
from limner.evaluation.features import open_extractor
from limner.pipeline import load
from limner.reranker import is_clip, load_clip
from published_clip import hugging_face, random_clip, write_merges, write_weights
from tiny import WORDS, tiny_pipe


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with published files, a converted model, a bundle and pictures of two classes."""
    folder = tmp_path_factory.mktemp("clip")
    write_weights(folder / "weights.safetensors")
    write_merges(folder / "merges.txt")
    words = ["convert", "clip", *(str(folder / name) for name in ("weights.safetensors", "merges.txt", "clip"))]
    assert main([*words, "--activation", "quick-gelu"]) == 0
    tiny_pipe().save_pretrained(folder / "tiny")
    rng = np.random.default_rng(0)
    for name in ("cat/a.png", "cat/b.png", "dog/a.png"):
        (folder / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "pictures" / name).write_bytes(image_bytes(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)))
    (folder / "pictures/dog/broken.jpg").write_text("no picture")
    return folder


def published_image(pixels):
    return random_clip().encode_image(torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None])


def published_text(reranker, text):
    return random_clip().encode_text(reranker.tokenizer.encode([text], 77).clamp_min(0))


def test_a_converted_model_is_stored_without_rounding(files):
    reranker = load_clip(files / "clip")
    text = reranker.tokenizer.encode(["a photo of a cat", "dogs"], 77)
    torch.testing.assert_close(
        reranker.model.encode_text(text), random_clip().encode_text(text.clamp_min(0)), atol=1e-6, rtol=0
    )
    assert (reranker.name, reranker.augment, is_clip(files / "clip")) == ("clip", "bicubic", True)
    with safe_open(files / "clip/contrastive.safetensors", "pt") as stored:
        assert stored.get_slice("text.weight").get_dtype() == "F32"
    state = {name: value.half() for name, value in hugging_face(random_clip().state_dict()).items()}
    save_file({name: value.contiguous() for name, value in state.items()}, files / "half.safetensors")
    words = ["convert", "clip", *(str(files / name) for name in ("half.safetensors", "merges.txt", "half"))]
    assert main([*words, "--activation", "gelu"]) == 0
    kinds = {name: value.dtype for name, value in load_file(files / "half/contrastive.safetensors").items()}
    assert kinds["text.weight"] == torch.float16 and kinds["patches.weight"] == torch.float32
    assert not load_model(files / "half", "contrastive").config.quick_gelu


def test_class_folders_are_classified_as_by_the_published_model(files, capsys):
    (files / "prompts.txt").write_text("a photo of a {}\n{}\n")
    (files / "classes.txt").write_text("cat\tred cat\ndog\nbird\n")
    options = ["--prompts", str(files / "prompts.txt"), "--classes", str(files / "classes.txt")]
    line = ["evaluate", "zero-shot", str(files / "clip"), "--data", str(files / "pictures"), *options]
    assert main([*line, "-o", str(files / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "3 pictures, 3 classes, 2 prompts each, skipped broken image: 1" in printed
    (result,) = json.loads((files / "out.json").read_text())["results"]
    assert "resized to 32 pixels by Pillow's bicubic filter" in result["settings"]["preprocessing"]

    reranker, right, classes = load_clip(files / "clip"), 0, []
    for name in ("red cat", "dog", "bird"):
        both = [published_text(reranker, text) for text in (f"a photo of a {name}", name)]
        classes.append(torch.nn.functional.normalize(sum(both) / 2, dim=-1))
    for file, label in (("cat/a.png", 0), ("cat/b.png", 0), ("dog/a.png", 1)):
        image = Image.open(files / "pictures" / file).resize((40, 32), Image.Resampling.BICUBIC).crop((4, 0, 36, 32))
        right += int((published_image(image) @ torch.cat(classes).mT).argmax()) == label
    assert result["rows"]["top 1"]["accuracy"]["right"] == right


def test_drawings_are_ranked_by_the_published_model(files, tmp_path):
    pipe = load(files / "tiny", rerank=files / "clip", device="cpu")
    drawings = pipe(WORDS[0], n=4, candidates=4)
    reranker = load_clip(files / "clip")
    text = published_text(reranker, WORDS[0])
    for drawing in drawings:
        image = drawing.image.resize((32, 32), Image.Resampling.BICUBIC)
        assert drawing.score == pytest.approx(float(published_image(image) @ text[0]), abs=2e-3)
    assert [d.score for d in drawings] == sorted((d.score for d in drawings), reverse=True)
    plain = {d.candidate: d for d in load(files / "tiny", device="cpu")(WORDS[0], n=4, candidates=4)}
    for drawing in drawings:
        assert plain[drawing.candidate].image.tobytes() == drawing.image.tobytes()
    with pytest.raises(UserError, match="the models do not match"):
        pipe.save_pretrained(tmp_path / "saved")


def test_the_likelihood_under_the_prior_does_not_count(files, tmp_path):
    pipe = tiny_pipe()
    pipe.info["prior_score_weight"] = 100.0
    pipe.save_pretrained(tmp_path / "weighted")
    assert load(tmp_path / "weighted").defaults.prior_score_weight == 100
    scores = [
        load(folder, rerank=files / "clip", device="cpu")(WORDS[0], candidates=2)[0].score
        for folder in (files / "tiny", tmp_path / "weighted")
    ]
    assert scores[0] == scores[1]


def test_draw_takes_another_clip_model(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["draw", WORDS[0], "--model", str(files / "tiny"), "--candidates", "2", "--rerank", str(files / "clip")]
    assert main([*line, "-o", "a.png"]) == 0 and (tmp_path / "a.png").exists()
    assert main([*line, "--engine", "onnx"]) == 2
    assert main([*line[:-1], str(files / "tiny")]) == 2
    sentences = capsys.readouterr().err
    assert "ONNX files cannot take an adapter or another CLIP model" in sentences
    assert "tiny is not a published CLIP model: name a folder that `limner convert clip` wrote" in sentences


def test_a_server_ranks_by_the_published_model(files, monkeypatch):
    apps = []
    monkeypatch.setattr("limner.cli.serve.run_server", lambda app, host, port: apps.append(app))
    assert main(["serve", "--model", str(files / "tiny"), "--rerank", str(files / "clip")]) == 0
    with TestClient(apps[0], base_url="http://localhost") as client:
        body = {"prompt": WORDS[0], "n": 4, "candidates": 4, "seed": 0}
        answer = client.post("/v1/images/generations", json=body).json()
    own = load(files / "tiny", rerank=files / "clip", device="cpu")(WORDS[0], n=4, candidates=4)
    assert [picture["candidate"] for picture in answer["data"]] == [drawing.candidate for drawing in own]
    assert [picture["score"] for picture in answer["data"]] == pytest.approx(own.scores)
    assert main(["serve", "--model", str(files / "tiny"), "--rerank", str(files / "tiny")]) == 2


def test_features_are_those_of_the_published_model(files):
    pipe = tiny_pipe()
    extractor = open_extractor(f"clip:{files / 'clip'}", pipe)
    pixels = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    assert extractor.name == "clip:clip/32" and extractor.version != open_extractor("clip", pipe).version
    for features, picture in zip(extractor.features(pixels).values, pixels, strict=True):
        image = Image.fromarray(picture.permute(1, 2, 0).numpy()).resize((32, 32), Image.Resampling.BICUBIC)
        torch.testing.assert_close(features, published_image(image)[0], atol=2e-3, rtol=0)


def test_wrong_arguments_get_one_sentence(files, tmp_path, capsys):
    write_merges(tmp_path / "short.txt", 85)
    clip, weights, merges = (str(files / name) for name in ("clip", "weights.safetensors", "merges.txt"))
    new, gelu = str(tmp_path / "new"), ["--activation", "gelu"]
    (tmp_path / "prompt.txt").write_text("a photo\n")
    for arguments, says in (
        (["convert", "clip", weights, str(tmp_path / "short.txt"), new, *gelu], "short.txt has 599 tokens"),
        (["convert", "clip", weights, weights, new, *gelu], "is not a tokenizer of CLIP"),
        (["convert", "clip", merges, merges, new, *gelu], "is not a .safetensors file"),
        (["convert", "clip", weights, merges, new], "--activation"),
        (["evaluate", "zero-shot", clip], "add --data"),
        (["evaluate", "zero-shot", "scenes", "--classes", merges], "--classes names the classes of a data set"),
        (["evaluate", "zero-shot", clip, "--prompts", str(tmp_path / "prompt.txt")], "must have one {}"),
        (["evaluate", "zero-shot", clip, "--data", str(tmp_path / "none")], "does not exist"),
    ):
        assert main(arguments) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line and len(line) < 400, (arguments, line)
    assert not (tmp_path / "new").exists()


def test_a_damaged_folder_is_reported(files, tmp_path):
    for name in ("config.json", "contrastive.safetensors"):
        (tmp_path / name).write_bytes((files / "clip" / name).read_bytes())
    with pytest.raises(UserError, match=r"tokenizer.json"):
        load_clip(tmp_path)
    load_clip(files / "clip").tokenizer.save(tmp_path / "tokenizer.json")
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["model"]["merges"].pop()
    data["model"]["vocab"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="its model has 600 tokens, its tokenizer 599: convert the weights again"):
        load_clip(tmp_path)
