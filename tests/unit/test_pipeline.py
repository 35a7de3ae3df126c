"""Drawing is reproducible, files say where they come from, and a bad bundle is one sentence."""

import io
import json
import os
import shutil
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import limner
from limner import bundles, pretrained
from limner.cli import main
from limner.drawing import SOURCE_TYPE, Drawings
from limner.errors import UserError
from limner.numerics.precision import Auto, Bf16
from limner.pipeline import TextToImage, load
from limner.sampling import inference
from limner.sampling.decoder import TokenDecoder
from limner.sampling.generation_config import GenerationConfig, Sampler
from limner.sampling.inference import InferenceConfig
from tiny import WORDS, tiny_pipe

CAPTION = WORDS[0]


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipe()


@pytest.fixture(scope="module")
def saved(pipe, tmp_path_factory):
    return pipe.save_pretrained(tmp_path_factory.mktemp("bundles") / "tiny")


@pytest.fixture
def bundle(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def pixels(drawings):
    return np.stack([np.asarray(image) for image in drawings.images])


# ---------------------------------------------------------------------------- drawing


def test_the_same_seed_gives_the_same_pictures_best_first(pipe):
    first = pipe(CAPTION, n=4, candidates=8, seed=3)
    again = pipe(CAPTION, n=4, candidates=8, seed=3)
    assert np.array_equal(pixels(first), pixels(again))
    assert first.scores == sorted(first.scores, reverse=True)
    assert [d.candidate for d in first] == [d.candidate for d in again]
    assert first[0].image.size == (24, 24)
    assert (first.caption, first.seed) == (CAPTION, 3)
    assert not np.array_equal(pixels(first), pixels(pipe(CAPTION, n=4, candidates=8, seed=4)))


ROUNDING = 0.05 if Auto().dtype(torch.device("cpu")) == torch.bfloat16 else 1e-5  # nats, of the format it draws in


def likelihoods(pipe, text, tokens):
    """Log-probabilities of tokens [1, N, S] under the prior, in nats per token, by teacher forcing."""
    with torch.inference_mode():
        logits = pipe.prior(text.expand(tokens.shape[1], -1), tokens[0])[1]
    return logits.log_softmax(-1).gather(-1, tokens[0, ..., None]).mean((-2, -1))[None]


def test_the_score_weighs_the_prior_as_the_bundle_says(pipe):
    parts = pipe.dvae, pipe.prior, pipe.contrastive, pipe.tokenizer
    both = TextToImage(*parts, {**pipe.info, "prior_score_weight": 2})
    alone, together = (one.candidates([CAPTION], 6, seed=1) for one in (pipe, both))
    text = pipe.tokenizer.encode([CAPTION], pipe.prior.config.text_len)
    found = likelihoods(pipe, text, alone.tokens)
    assert found.std() > ROUNDING
    torch.testing.assert_close(together.scores - alone.scores, 2 * found, atol=2 * ROUNDING, rtol=0)
    assert torch.equal(together.tokens, alone.tokens)


def picture(pipe):
    return pipe(CAPTION, candidates=1, seed=1).images[0]


def test_an_edit_keeps_the_rows_that_were_asked_for(pipe):
    image = picture(pipe)
    own = pipe.dvae.tokenize(torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None])[0].view(6, 6)
    for keep_rows, mask in ((4, None), (None, Image.new("L", (24, 24)))):
        if mask:
            mask.paste(255, (9, 8, 15, 12))  # of tokens 4 x 4, it touches columns 2 and 3 of row 2
        prompt = pipe.prime(image, keep_rows, mask).view(6, 6)
        free = torch.zeros(6, 6, dtype=torch.bool)
        free[(slice(4, None), slice(None)) if keep_rows else (2, slice(2, 4))] = True
        assert torch.equal(prompt, torch.where(free, -1, own))
        edited = pipe(CAPTION, prompt_tokens=pipe.prime(image, keep_rows, mask), n=2, candidates=3, seed=1)
        assert len(edited) == 2
        made = pipe.candidates([CAPTION], 3, seed=1, prompt_tokens=prompt.view(1, -1))
        text = pipe.tokenizer.encode([CAPTION], pipe.prior.config.text_len)
        torch.testing.assert_close(made.scores, likelihoods(pipe, text, made.tokens), atol=ROUNDING, rtol=0)
        assert edited[0].score == made.scores.max()
        tokens = made.tokens.view(3, 6, 6)
        assert torch.equal(tokens[:, ~free], own[~free].expand(3, -1))
        assert len(tokens[:, free].unique(dim=0)) > 1
    clear, white = Image.new("RGBA", (24, 24)), Image.new("RGB", (24, 24), "white")
    deep = Image.fromarray(np.full((24, 24), 100 << 8, np.uint16))
    for same, as_this in ((clear, white), (deep, Image.new("RGB", (24, 24), (100, 100, 100)))):
        assert torch.equal(pipe.prime(same, 3), pipe.prime(as_this, 3))
    nothing = pipe.prime(image, mask=clear)
    assert bool((nothing == -1).all())
    assert torch.equal(
        pipe.candidates([CAPTION], 3, prompt_tokens=nothing).scores, pipe.candidates([CAPTION], 3).scores
    )
    larger = image.resize((120, 96), Image.Resampling.NEAREST)  # any size, any format
    assert pipe(CAPTION, prompt_tokens=pipe.prime(larger.convert("RGBA"), 3), candidates=1).images[0].size == (24, 24)


@pytest.mark.parametrize(
    ("keep_rows", "mask", "says"),
    [
        (6, None, "from 1 to 5"), (0, None, "from 1 to 5"), (10**30, None, "from 1 to 5"), (None, None, "one of"),
        (None, Image.new("L", (24, 24)), "dark everywhere"), (1, Image.new("L", (24, 24), 255), "one of"),
    ],
)  # fmt: skip
def test_an_edit_that_cannot_be_says_why(pipe, keep_rows, mask, says):
    with pytest.raises(UserError, match=says):
        pipe.prime(picture(pipe), keep_rows, mask)


def test_guidance_changes_drawings_and_is_checked(pipe):
    plain, guided = (pipe(CAPTION, n=2, candidates=2, guidance=g) for g in (1.0, 4.0))
    assert not np.array_equal(pixels(plain), pixels(guided))
    assert guided[0].settings["guidance"] == 4.0
    with pytest.raises(UserError, match="guidance"):
        pipe(CAPTION, guidance=-1)


def test_a_model_brings_its_own_temperature_and_guidance(pipe):
    parts = pipe.dvae, pipe.prior, pipe.contrastive, pipe.tokenizer
    cold = TextToImage(*parts, {**pipe.info, "temperature": 0.3, "guidance": 2})
    own, given = cold(CAPTION, n=2, candidates=2), pipe(CAPTION, n=2, candidates=2, temperature=0.3, guidance=2)
    assert np.array_equal(pixels(own), pixels(given)) and own[0].settings == given[0].settings
    assert own[0].settings["temperature"] == 0.3 and pipe(CAPTION, candidates=1)[0].settings["temperature"] == 1
    warm = cold(CAPTION, n=2, candidates=2, temperature=1, guidance=1)
    assert np.array_equal(pixels(warm), pixels(pipe(CAPTION, n=2, candidates=2)))


def test_a_model_brings_its_own_number_of_candidates(pipe, tmp_path, monkeypatch, capsys):
    def count(pipe, **settings):
        counts = []
        pipe(CAPTION, **settings, progress=counts.append)
        return sum(counts)

    five = TextToImage(pipe.dvae, pipe.prior, pipe.contrastive, pipe.tokenizer, {**pipe.info, "candidates": 5})
    assert (count(five), count(five, candidates=2), count(five, n=6)) == (5, 2, 6)
    assert count(TextToImage(pipe.dvae, pipe.prior, pipe.contrastive, pipe.tokenizer, {"candidates": None})) == 64
    monkeypatch.chdir(tmp_path)
    for name, model, words, total in (
        ("own", five, [], 5),
        ("own", five, ["--candidates=3"], 3),
        ("none", pipe, [], 16),
    ):
        model.save_pretrained(name)
        assert main(["draw", CAPTION, "--model", name, *words]) == 0
        assert f" of {total})" in capsys.readouterr().out


def test_drawing_leaves_the_callers_random_numbers_alone(pipe, saved):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(saved)(CAPTION, candidates=2)
    assert torch.equal(torch.rand(3), expected)


def test_batches_do_not_change_what_is_drawn(pipe, monkeypatch):
    whole = pipe.candidates(WORDS, 6, seed=[1, 2])
    monkeypatch.setattr(inference, "MAX_CPU_BATCH", 4)
    parts = pipe.candidates(WORDS, 6, seed=[1, 2])
    assert torch.equal(whole.tokens, parts.tokens)
    assert torch.equal(whole.pictures, parts.pictures)
    torch.testing.assert_close(whole.scores, parts.scores, atol=1e-5, rtol=1e-5)
    alone = pipe.candidates(WORDS[1:], 3, seed=2)
    assert torch.equal(alone.tokens[0], whole.tokens[1, :3])


def test_batch_size_follows_from_the_bytes_of_the_caches(pipe, monkeypatch):
    monkeypatch.setattr(inference, "MAX_CPU_BATCH", 1_000_000)
    each = TokenDecoder(pipe.prior).prefill(torch.zeros(1, pipe.prior.config.text_len, dtype=torch.long))[0]
    dtype = Auto().dtype(pipe.device)
    each = each.bytes_per_candidate * dtype.itemsize // 4
    assert pipe.engine.models.max_rows() == inference.MAX_CACHE_BYTES // each
    config = InferenceConfig(int8_cache=True)
    small = TextToImage(pipe.dvae, pipe.prior, pipe.contrastive, pipe.tokenizer, inference_config=config)
    assert small.engine.models.max_rows() > 1.3 * inference.MAX_CACHE_BYTES // each
    monkeypatch.setattr(inference, "MAX_CACHE_BYTES", 1)
    assert pipe.engine.models.max_rows() == 1


def test_pictures_are_the_same_however_many_are_decoded_at_once(pipe, monkeypatch):
    tokens = torch.randint(0, pipe.dvae.config.vocab, (2, 5, 36))
    whole = pipe.engine.models.decode(tokens, 6)
    monkeypatch.setattr(inference, "MAX_DECODER_BYTES", 1)
    assert torch.equal(pipe.engine.models.decode(tokens, 6), whole)


def test_captions_of_one_seed_share_a_batch_and_agree_with_drawing_alone(pipe):
    many = pipe.draw_many(WORDS, n=2, candidates=4, seed=7)
    for caption, drawings in zip(WORDS, many, strict=True):
        assert np.array_equal(pixels(drawings), pixels(pipe(caption, n=2, candidates=4, seed=7)))


def test_progress_reaches_the_end_exactly_once(pipe, monkeypatch):
    monkeypatch.setattr(inference, "MAX_CPU_BATCH", 4)
    seen = []
    pipe(CAPTION, candidates=6, progress=seen.append)
    assert sum(seen) == 6 and min(seen) > 0 and len(seen) > 2  # progress counts single drawings, not batches


def test_partial_pictures_come_every_few_rows_and_end_in_the_drawing(pipe, monkeypatch):
    monkeypatch.setattr(inference, "MAX_CPU_BATCH", 4)
    parts = []
    made = pipe.candidates(WORDS, 6, seed=[1, 2], on_preview=parts.append, preview_every=4)
    (h, _), side = pipe.dvae.config.grid, pipe.dvae.config.size
    assert [(p.caption, p.candidates) for p in parts if p.pictures.shape[2] == side * 4 // h] == [
        (0, range(4)), (0, range(4, 6)), (1, range(4)), (1, range(4, 6)),
    ]  # fmt: skip
    assert {p.pictures.shape[2] * h // side for p in parts} == set(range(4, h + 1, 4))
    assert torch.equal(made.pictures, pipe.candidates(WORDS, 6, seed=[1, 2]).pictures)
    whole = []
    made = pipe.candidates(WORDS[:1], 2, on_preview=whole.append, preview_every=h)
    assert torch.equal(whole[0].pictures, made.pictures[0])
    with pytest.raises(UserError, match="preview_every, a number of rows"):
        pipe(CAPTION, candidates=1, on_preview=parts.append, preview_every=0)


def test_options_are_given_as_one_or_by_name_or_both(pipe):
    options = GenerationConfig(candidates=3, seed=2, temperature=0.9, top_k=7)
    whole = pipe(CAPTION, options, n=2)
    for same in (
        pipe(CAPTION, n=2, candidates=3, seed=2, temperature=0.9, top_k=7),
        pipe(CAPTION, GenerationConfig(candidates=3, seed=5, top_k=7), n=2, seed=2, temperature=0.9),
        pipe.draw_many([CAPTION], options, n=2, seed=[2])[0],
    ):
        assert np.array_equal(pixels(whole), pixels(same)) and whole[0].settings == same[0].settings
    assert not np.array_equal(pixels(whole), pixels(pipe(CAPTION, options, n=2, seed=3)))
    with pytest.raises(TypeError, match="temprature"):
        pipe(CAPTION, temprature=1)


def test_seeds_may_be_numbers_of_numpy_and_there_may_be_no_captions(pipe):
    seeds = [2**40 + 1, 2**63 - 1]
    own = pipe.candidates(WORDS, 2, seed=seeds).tokens
    assert torch.equal(own, pipe.candidates(WORDS, 2, seed=np.array(seeds)).tokens)
    three, same = (pipe(CAPTION, candidates=2, seed=seed) for seed in (3, np.int64(3)))
    assert np.array_equal(pixels(three), pixels(same))
    assert pipe.draw_many([], candidates=2) == []
    with pytest.raises(UserError, match="seed must be at least 0, not -1"):
        pipe.draw_many([CAPTION], seed=[-1])
    with pytest.raises(UserError, match="takes a list of captions, not a string"):
        pipe.draw_many(CAPTION)


def test_more_drawings_than_candidates_means_more_candidates(pipe):
    assert len(pipe(CAPTION, n=5, candidates=2)) == 5


@pytest.mark.parametrize(
    ("caption", "settings", "says"),
    [
        ("  ", {}, "empty"),
        ("a \udcff circle", {}, "Unicode"),
        (["a", "b"], {}, "draw_many"),
        (CAPTION, {"n": 0}, "at least 1"),
        (CAPTION, {"candidates": 0, "n": -1}, "at least 1"),
        (CAPTION, {"temperature": -1.0}, "temperature"),
        (CAPTION, {"temperature": float("nan")}, "temperature"),
        (CAPTION, {"temperature": 1e-9}, "temperature"),
        (CAPTION, {"top_k": 0}, "top_k"),
        (CAPTION, {"top_p": 0.0}, "top_p"),
        (CAPTION, {"top_p": 1.5}, "top_p"),
    ],
)
def test_mistakes_are_named(pipe, caption, settings, says):
    with pytest.raises(UserError, match=says):
        pipe(caption, **settings)


def test_a_long_caption_is_cut_with_a_warning(pipe):
    with pytest.warns(UserWarning, match="cut to 30"):
        pipe("red " * 40, candidates=1)


def test_8_bit_weights_draw_too(saved):
    pipe = load(saved, int8_weights=True)
    made = pipe.candidates([CAPTION], 2)
    assert made.pictures.shape[:2] == (1, 2)
    assert pipe.prior.head.image.weight.dtype == torch.float32  # the model itself is unchanged


def test_bf16_draws_too(saved):
    drawings = load(saved, precision=Bf16())(CAPTION, n=2, candidates=3)
    assert all(np.isfinite(drawings.scores))


# ---------------------------------------------------------------------------- files


def test_a_png_says_what_drew_it(pipe, tmp_path):
    caption = 'a "small" <red> circle & a naïve 🎨'
    drawing = pipe(caption, candidates=4, seed=11, temperature=0.9, top_k=5)[0]
    path = drawing.save(tmp_path / "new" / "drawing.png")
    image = Image.open(path)
    assert image.size == (384, 384)
    text = image.text
    assert text["caption"] == text["Description"] == caption
    assert (text["seed"], text["model"], text["top_k"]) == ("11", "tiny", "5")
    assert text["candidate"] == str(drawing.candidate)
    made = pipe.candidates([caption], 4, seed=11, sampler=Sampler(temperature=0.9, top_k=5))
    assert drawing.candidate == int(made.scores[0].argmax()) + 1  # counted from 1
    assert text["Software"].startswith("limner ")
    xmp = ElementTree.fromstring(text["XML:com.adobe.xmp"].split("?>", 1)[1].rsplit("<?", 1)[0])
    kind = xmp.find(".//{http://iptc.org/std/Iptc4xmpExt/2008-02-29/}DigitalSourceType")
    assert kind is not None
    assert kind.text == SOURCE_TYPE
    assert SOURCE_TYPE.endswith("/trainedAlgorithmicMedia")
    assert caption in "".join(xmp.itertext())
    assert [p.name for p in path.parent.iterdir()] == ["drawing.png"]  # no temporary file is left


def test_enlarging_repeats_pixels(pipe, tmp_path):
    drawing = pipe(CAPTION, candidates=1)[0]
    small, large = (np.asarray(Image.open(drawing.save(tmp_path / f"{s}.png", scale=s))) for s in (1, 5))
    assert np.array_equal(small, np.asarray(drawing.image))
    assert np.array_equal(large, small.repeat(5, 0).repeat(5, 1))
    with pytest.raises(UserError, match="scale"):
        drawing.save(tmp_path / "x.png", scale=0)
    with pytest.raises(UserError, match="PNG"):
        drawing.save(tmp_path / "x.jpg")


def test_several_drawings_are_numbered(pipe, tmp_path):
    drawings = pipe(CAPTION, n=3, candidates=3)
    assert [p.name for p in drawings.save(tmp_path / "a.png")] == ["a-1.png", "a-2.png", "a-3.png"]
    assert [p.name for p in drawings[:1].save(tmp_path / "a.png")] == ["a.png"]


def test_a_notebook_shows_a_drawing_and_several_on_one_sheet(pipe):
    """IPython asks for `_repr_png_`; None lets it print the object instead."""

    def shown(thing):
        image = Image.open(io.BytesIO(thing._repr_png_()))
        assert image.text["caption"] == CAPTION and SOURCE_TYPE in image.text["XML:com.adobe.xmp"]
        return np.asarray(image)

    drawings = pipe(CAPTION, n=6, candidates=6)
    one = np.asarray(drawings[0].image)
    assert np.array_equal(shown(drawings[0]), one.repeat(16, 0).repeat(16, 1))
    assert np.array_equal(shown(drawings[:1]), shown(drawings[0]))
    sheet = shown(drawings)
    assert sheet.shape == (2 * 192 + 8, 4 * 192 + 3 * 8, 3)
    for i, drawing in enumerate(drawings):
        y, x = i // 4 * 200, i % 4 * 200
        assert np.array_equal(sheet[y : y + 192 : 8, x : x + 192 : 8], np.asarray(drawing.image)), i
    assert (sheet[:, 192:200] == 255).all() and (sheet[200:, 400:] == 255).all()
    assert drawings[6:]._repr_png_() is None


# ---------------------------------------------------------------------------- bundles


def test_a_bundle_draws_what_was_saved(pipe, saved):
    loaded = TextToImage.from_pretrained(saved)
    assert loaded.name == "tiny"
    assert {p.name for p in saved.iterdir()} == {
        "config.json", "dvae.safetensors", "prior.safetensors", "contrastive.safetensors", "tokenizer.json",
        "README.md",
    }  # fmt: skip
    exact = pipe.save_pretrained(saved.parent / "exact", dtype=torch.float32)
    drawn = TextToImage.from_pretrained(exact, device="cpu")(CAPTION, n=3, candidates=6, seed=1)
    assert np.array_equal(pixels(drawn), pixels(pipe(CAPTION, n=3, candidates=6, seed=1)))
    assert sum(p.stat().st_size for p in saved.glob("*.safetensors")) < 0.7 * sum(
        p.stat().st_size for p in exact.glob("*.safetensors")
    )
    assert "M parameters" in (saved / "README.md").read_text()
    assert not [p for p in saved.parent.iterdir() if p.name.startswith(".")]


def test_saving_again_replaces_a_bundle_but_nothing_else(pipe, bundle, tmp_path):
    (bundle / "stale").touch()
    pipe.save_pretrained(bundle)
    assert not (bundle / "stale").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").touch()
    with pytest.raises(UserError, match="not a bundle"):
        pipe.save_pretrained(other)
    assert (other / "thesis.txt").exists()


def test_a_failed_save_leaves_the_old_bundle(pipe, bundle, monkeypatch):
    before = (bundle / "config.json").read_bytes()
    monkeypatch.setattr(bundles, "model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipe.save_pretrained(bundle)
    assert (bundle / "config.json").read_bytes() == before
    assert [p for p in bundle.parent.iterdir() if p.name.startswith(".")] == []
    load(bundle)


def test_a_model_that_has_diverged_is_not_stored(bundle, tmp_path):
    diverged, before = load(bundle), load_file(bundle / "prior.safetensors")
    diverged.prior.head.norm.weight.data[0] = torch.nan
    for folder in (tmp_path / "new", bundle):
        with pytest.raises(UserError, match=r"the prior has diverged, its 'head.norm.weight' is not finite"):
            diverged.save_pretrained(folder)
    assert not (tmp_path / "new").exists() and not [entry for entry in tmp_path.iterdir() if entry != bundle]
    assert all(torch.equal(value, before[key]) for key, value in load_file(bundle / "prior.safetensors").items())


def test_text_that_no_file_can_hold_is_stored_without_it(bundle, tmp_path):
    pipe = load(bundle)
    pipe.info |= {"license": "\udcff\udcfe", "recipe": {"start": "a\ud800b"}}
    again = load(pipe.save_pretrained(tmp_path / "new"))
    assert again.info["license"] == "??" and again.info["recipe"] == {"start": "a?b"}


def test_the_folder_of_a_run_will_do(bundle):
    shutil.move(bundle, bundle.parent / "run" / "bundle")
    assert load(bundle.parent / "run").name == "tiny"


def test_a_weight_too_large_for_half_precision_is_kept(pipe, tmp_path):
    other = tiny_pipe(1)
    with torch.no_grad():
        other.prior.head.image.bias[0] = 1e6
    assert load(other.save_pretrained(tmp_path / "b")).prior.head.image.bias[0] == 1e6


def test_matrices_in_8_bits_are_off_by_half_a_step_of_their_row(pipe, saved, tmp_path):
    small = pipe.save_pretrained(tmp_path / "small", torch.int8)
    again, matrices = load(small, device="cpu"), 0
    for name in ("prior", "contrastive"):
        ours, theirs = getattr(pipe, name).state_dict(), getattr(again, name).state_dict()
        for key, value in ours.items():
            if value.dim() == 2:
                matrices += 1
                step = value.abs().amax(1, keepdim=True) / 127
                assert ((theirs[key] - value).abs() <= step * 0.5001).all(), key
                assert value.numel() < 400 or (theirs[key] != value).any()
            else:
                assert torch.equal(theirs[key], value.half().float()), key
        half, eighth = ((folder / f"{name}.safetensors").stat().st_size for folder in (saved, small))
        assert eighth < 0.8 * half  # a tiny model's scales and names weigh much
    assert matrices > 20
    assert all(torch.equal(value, pipe.dvae.state_dict()[key]) for key, value in again.dvae.state_dict().items())
    third = load(again.save_pretrained(tmp_path / "third", torch.int8))
    assert torch.equal(third.prior.head.image.weight, again.prior.head.image.weight)
    assert again(CAPTION, candidates=2)[0].image.size == (24, 24)


def test_a_dvae_is_stored_without_loss_in_16_bits_where_these_do(pipe, tmp_path):
    state = pipe.dvae.state_dict()
    state["decoder.blocks.input.w"] = state["decoder.blocks.input.w"].half().float()
    dvae = pipe.dvae.config.build()
    dvae.load_state_dict(state)
    pixels = torch.randint(0, 256, (64, 3, 24, 24), dtype=torch.uint8)
    folder = bundles.save_model(tmp_path / "dvae", "dvae", dvae, {})
    stored = load_file(folder / "dvae.safetensors")
    assert stored["decoder.blocks.input.w"].dtype == torch.float16
    assert stored["encoder.blocks.input.w"].dtype == torch.float32
    whole = TextToImage(bundles.load_model(folder, "dvae"), pipe.prior, pipe.contrastive, pipe.tokenizer)
    again = load(whole.save_pretrained(tmp_path / "bundle"))
    third = load(again.save_pretrained(tmp_path / "copy"), device="cpu")
    assert all(torch.equal(value, state[key]) for key, value in third.dvae.state_dict().items())
    assert torch.equal(third.dvae.tokenize(pixels), dvae.tokenize(pixels))
    small = bundles.save_model(tmp_path / "small", "dvae", bundles.rounded(dvae), {})
    assert {value.dtype for value in load_file(small / "dvae.safetensors").values()} == {torch.float16}
    assert torch.equal(bundles.load_model(small, "dvae").tokenize(pixels), dvae.tokenize(pixels))


def edit(bundle, change):
    path = bundle / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def rewrite(bundle, name, change):
    path = bundle / f"{name}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def put(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(config):
        for key in keys:
            config = config[key]
        config[last] = value

    return change


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def pipe_instead(path):
    path.unlink()
    os.mkfifo(path)


def zeros_instead(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def poke(tensors):
    tensors["head.image.weight"][0, 0] = float("nan")


SPOILED = {
    "no config": (lambda b: (b / "config.json").unlink(), "not a bundle"),
    "broken config": (lambda b: (b / "config.json").write_text("{"), "not a bundle"),
    "foreign format": (lambda b: edit(b, put("format", "other")), "not a bundle"),
    "unknown setting": (lambda b: edit(b, put("prior", "widht", 3)), "did you mean 'width'"),
    "missing part": (lambda b: edit(b, lambda c: c.pop("dvae")), "lacks the settings of 'dvae'"),
    "other width": (lambda b: edit(b, put("prior", "width", 64)), "has shape"),
    "other depth": (lambda b: edit(b, put("prior", "depth", 4)), "unknown tensor"),
    "too deep": (lambda b: edit(b, put("prior", "depth", 4_000)), "layers"),
    "too wide": (lambda b: edit(b, put("prior", "width", 10**12)), "width must be"),
    "heads that do not divide": (lambda b: edit(b, put("prior", "heads", 0)), "heads must be"),
    "huge grid": (lambda b: edit(b, put("prior", "grid", [100, 100])), "10000 positions"),
    "negative size": (lambda b: edit(b, put("dvae", "vocab", -5)), "vocab must be"),
    "guidance in words": (lambda b: edit(b, put("info", "guidance", "much")), "guidance must be a number"),
    "a large weight": (lambda b: edit(b, put("info", "prior_score_weight", 101)), "weight must be at most 100"),
    "no candidates": (lambda b: edit(b, put("info", "candidates", 0)), "candidates must be at least 1"),
    "half a candidate": (lambda b: edit(b, put("info", "candidates", 0.5)), "candidates must be an integer"),
    "no temperature": (lambda b: edit(b, put("info", "temperature", -1)), "temperature must be"),
    "a huge temperature": (lambda b: edit(b, put("info", "temperature", 10**400)), "temperature must be a finite"),
    "other grid": (lambda b: edit(b, put("dvae", "size", 48)), "do not match"),
    "missing weights": (lambda b: (b / "prior.safetensors").unlink(), "missing"),
    "cut weights": (lambda b: cut(b / "prior.safetensors"), "damaged"),
    "garbage": (lambda b: (b / "dvae.safetensors").write_bytes(b"\x80\x04pickle" * 9), "damaged"),
    "lost tensor": (lambda b: rewrite(b, "prior", lambda t: t.pop("embed.start")), "lacks 'embed.start'"),
    "not a number": (lambda b: rewrite(b, "prior", poke), "not finite"),
    "heads that leave a rest": (lambda b: edit(b, put("prior", "heads", 3)), "multiple of heads"),
    "a wide window": (lambda b: edit(b, put("prior", "kernel", 10**7)), "kernel must be"),
    "a wide reranker": (lambda b: edit(b, put("contrastive", "width", 1 << 14)), "has shape"),
    "many patches": (lambda b: edit(b, put("contrastive", "size", 8 * 65)), "4225 positions"),
    "no patches": (lambda b: edit(b, put("contrastive", "patch", 25)), "0 positions"),
    "many groups": (lambda b: edit(b, put("dvae", "groups", 40)), "groups must be"),
    "many blocks": (lambda b: edit(b, put("dvae", "blocks", 200)), "layers"),
    "an infinite gain": (lambda b: edit(b, put("dvae", "gain", float("inf"))), "gain must be"),
    "settings that are a pipe": (lambda b: pipe_instead(b / "config.json"), "not a bundle"),
    "weights that are a pipe": (lambda b: pipe_instead(b / "prior.safetensors"), "is a folder, a pipe or a device"),
    "a tokenizer that never ends": (lambda b: zeros_instead(b / "tokenizer.json"), "is a folder, a pipe or a device"),
    "integers": (
        lambda b: rewrite(b, "prior", lambda t: t.update({"embed.start": t["embed.start"].int()})), "stored as",
    ),
    "no tokenizer": (lambda b: (b / "tokenizer.json").unlink(), "tokenizer"),
    "not a tokenizer": (lambda b: (b / "tokenizer.json").write_text("[]"), "tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_bad_bundle_is_one_sentence(bundle, spoil):
    act, says = SPOILED[spoil]
    act(bundle)
    with pytest.raises(UserError, match=says) as caught:
        load(bundle)
    assert "\n" not in str(caught.value)


def test_models_that_do_not_belong_together_are_refused(pipe):
    other = tiny_pipe()
    config = other.contrastive.config
    with pytest.raises(UserError, match="do not match"):
        TextToImage(pipe.dvae, pipe.prior, type(config)(
            text_vocab=config.text_vocab, text_len=30, size=48, patch=8, width=16, depth=1, heads=2, embedding=8
        ).build(), pipe.tokenizer)  # fmt: skip


def test_names_are_looked_up_in_the_package(saved, monkeypatch):
    monkeypatch.setattr(pretrained, "ASSETS", saved.parent)
    assert list(pretrained.list_pretrained()) == sorted(pretrained.list_pretrained())
    assert limner.load("tiny").name == "tiny"
    with pytest.raises(UserError, match="did you mean 'tiny'"):
        load("tinny")


def test_a_folder_that_is_no_bundle(tmp_path):
    with pytest.raises(UserError, match="not a bundle"):
        load(tmp_path)


def test_the_package_shows_its_three_names():
    assert limner.TextToImage is TextToImage
    assert limner.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="nothing"):
        _ = limner.nothing


def test_a_precision_is_no_name():
    with pytest.raises(UserError, match="of limner.numerics.precision, not 'bf16'"):
        limner.load(precision="bf16")


def test_drawings_that_repeat_a_better_candidate_come_last():
    pictures = np.arange(5, dtype=np.uint8)[:, None, None, None].repeat(3, 1)
    tokens = np.array([[1, 2], [3, 4], [1, 2], [3, 5], [3, 4]])
    drawings = Drawings.best(
        pictures, np.array([0.4, 0.3, 0.5, 0.2, 0.4]), tokens, 5, caption="a", seed=1, model="m", settings={}
    )
    assert [drawing.candidate for drawing in drawings] == [3, 5, 4, 1, 2]
    assert [drawing.image.getpixel((0, 0))[0] for drawing in drawings] == [2, 4, 3, 0, 1]
