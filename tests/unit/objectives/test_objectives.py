"""Losses against their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.func import functional_call

from limner.attention import sparse
from limner.models.contrastive import MAX_LOG_SCALE, CLIPConfig
from limner.models.dvae import DVAEConfig, map_pixels
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.codebook_elbo import BalancedELB, contrast
from limner.objectives.contrastive import CLIPLoss
from limner.objectives.elbo import (
    RelaxedELB,
    gumbel_softmax,
    kl_to_uniform,
    logit_laplace_nll,
)
from limner.objectives.hard_negatives import HardNegativeLoss, cut_paste
from limner.objectives.reconstruction_loss import ReconstructionLoss
from limner.text import PAD
from limner.training.train_module import Trainable

PRIOR = TransformerConfig(text_vocab=9, image_vocab=7, text_len=3, grid=(4, 3), width=8, depth=3, heads=2, kernel=3)
CLIP = CLIPConfig(text_vocab=9, text_len=3, size=8, patch=4, width=8, depth=1, heads=2, embedding=8)
DVAE = DVAEConfig(size=8, width=8, groups=2, blocks=1, vocab=12, code_width=8)
IN_FLOAT64 = {
    "prior, sparse": (PRIOR, Autoregressive(), 0),
    "prior, masked": (PRIOR, Autoregressive(), 1_000),
    "contrastive": (CLIP, CLIPLoss(), 0),
    "hard negatives": (CLIP, HardNegativeLoss(cut_paste_negatives=1), 0),
    "dVAE": (DVAE, RelaxedELB(), 0),
    "dVAE, balanced": (DVAE, BalancedELB(), 0),
    "dVAE of patches": (
        PatchDVAEConfig(size=8, patch=4, vocab=12, width=8, blocks=1, pixel_blocks=1),
        ReconstructionLoss(),
        0,
    ),
}


@pytest.mark.parametrize("case", IN_FLOAT64)
def test_losses_in_float64_have_the_gradients_of_finite_differences(case, monkeypatch):
    """Nothing on the way is fp32: differences of 1e-6 would drown in its rounding."""
    config, objective, short = IN_FLOAT64[case]
    monkeypatch.setattr(sparse, "DENSE_MAX_POSITIONS", short)
    torch.manual_seed(0)
    trainable = Trainable(config.build().double(), objective)
    batch = {"pixels": torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8), "text": torch.randint(0, 9, (4, 3))}
    batch |= {"image": torch.randint(0, 7, (4, 12)), "distractors": torch.randint(0, 9, (4, 2, 3))}
    batch["text"][1, 2:] = PAD
    names, values = zip(*((n, p + 0.1 * torch.randn_like(p)) for n, p in trainable.named_parameters()), strict=True)

    def loss(*parameters):
        random = torch.Generator().manual_seed(0)
        return functional_call(trainable, dict(zip(names, parameters, strict=True)), (batch, 2_500, random))[0]

    values = [value.detach().requires_grad_() for value in values]
    assert loss(*values).dtype == torch.float64
    assert gradcheck(loss, values, fast_mode=True, rtol=1e-6, atol=1e-7)


def test_logit_laplace_is_a_density():
    x = torch.linspace(1e-5, 1 - 1e-5, 400_001, dtype=torch.float64)
    for mu, log_b in ((0.0, 0.0), (1.5, -1.0), (-2.0, 0.5)):
        density = torch.exp(-logit_laplace_nll(x, torch.tensor(mu), torch.tensor(log_b)))
        assert torch.trapezoid(density, x).item() == pytest.approx(1, abs=5e-3)


def test_kl_to_uniform_is_0_for_uniform_and_ln_v_a_position_for_certain():
    uniform = torch.zeros(2, 16, 3, 3).log_softmax(1)
    assert kl_to_uniform(uniform).abs().max() < 1e-5
    certain = (1e4 * F.one_hot(torch.zeros(2, 3, 3, dtype=torch.long), 16).movedim(-1, 1).float()).log_softmax(1)
    torch.testing.assert_close(kl_to_uniform(certain), torch.full((2,), 9 * math.log(16)))


def test_gumbel_argmax_samples_the_categorical():
    logits = torch.tensor([0.0, 1.0, 2.0]).view(1, 3, 1, 1).expand(60_000, 3, 1, 1)
    z = gumbel_softmax(logits, 0.5, torch.Generator().manual_seed(0))
    torch.testing.assert_close(z.sum(1), torch.ones(60_000, 1, 1))
    share = z.argmax(1).flatten().bincount(minlength=3) / 60_000
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    assert (share - expected).abs().max() < 0.01  # five standard deviations


def test_relaxation_becomes_one_hot_as_tau_falls():
    logits = torch.randn(4, 8, 2, 2, generator=torch.Generator().manual_seed(0))
    z = gumbel_softmax(logits, 1e-3, torch.Generator().manual_seed(1))
    assert z.amax(1).mean() > 0.99


def test_relaxed_elb_is_the_papers_sum():
    torch.manual_seed(0)
    model = DVAEConfig(size=8, width=8, groups=2, vocab=12, code_width=8).build()
    pixels = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    objective, step = RelaxedELB(), 2_500
    loss, metrics = objective(model, {"pixels": pixels}, step, torch.Generator().manual_seed(5))
    logits = model.encode(pixels)
    mu, log_b = model.decode(gumbel_softmax(logits, objective.tau(step), torch.Generator().manual_seed(5)))
    nll = logit_laplace_nll(map_pixels(pixels), mu, log_b).sum((1, 2, 3))
    kl = kl_to_uniform(logits.log_softmax(1))
    torch.testing.assert_close(loss, ((nll + 3.3 * kl) / (8 * 8 * 3)).mean())  # beta is half way
    assert {"nll", "kl", "codes", "perplexity"} <= set(metrics)


def test_balanced_elb_punishes_collapse_not_certainty():
    model = DVAEConfig(size=8, width=8, groups=1, vocab=4, code_width=8).build()
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    model.encode = lambda _: 50 * F.one_hot(codes, 4).movedim(-1, 1).float()
    codes = torch.arange(64).view(1, 8, 8) % 4  # sure everywhere, all codes equally used
    _, metrics = BalancedELB()(model, {"pixels": pixels}, 0, torch.Generator())
    assert metrics["imbalance"] == pytest.approx(0, abs=1e-4)
    codes = torch.zeros(1, 8, 8, dtype=torch.long)
    _, metrics = BalancedELB()(model, {"pixels": pixels}, 0, torch.Generator())
    assert metrics["imbalance"] == pytest.approx(math.log(4), abs=1e-4)


def test_the_codes_that_were_to_be_used_have_a_price_later():
    torch.manual_seed(0)
    model = DVAEConfig(size=8, width=8, groups=1, vocab=4, code_width=8).build()
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    objective = BalancedELB(usage_kl_weight=0.3, usage_penalty=0.2, usage_penalty_from=7, min_log_b=-9.0)
    for step, weight in ((6, 0.3), (7, -0.2)):
        loss, metrics = objective(model, {"pixels": pixels}, step, torch.Generator().manual_seed(0))
        torch.testing.assert_close(loss.detach(), metrics["nll"] + weight * metrics["imbalance"])


def test_patches_with_contrast_have_most_of_their_pictures_weight():
    torch.manual_seed(0)
    model = DVAEConfig(size=16, width=8, groups=2, vocab=4, code_width=8).build()
    pixels = torch.full((2, 3, 16, 16), 200, dtype=torch.uint8)
    pixels[0, :, 3, 5] = 0  # of one patch of 2 x 2 pixels in one of the pictures
    pixels[1, :, 12:] = torch.randint(0, 256, (3, 4, 16), dtype=torch.uint8)
    nll = torch.rand(2, 3, 16, 16)
    weight = contrast(pixels, 8)
    by_hand = 0.0
    for picture in range(2):
        total = sum(
            weight[picture, 0, y, x] * nll[picture, :, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].mean()
            for y in range(8) for x in range(8)
        )  # fmt: skip
        by_hand += (0.7 * total / weight[picture].sum() + 0.3 * nll[picture].mean()) / 2
    torch.testing.assert_close(BalancedELB(contrast_weight=0.7).mean_nll(nll, weight), by_hand)
    assert BalancedELB().mean_nll(nll, weight) == nll.mean()
    loss, _ = BalancedELB(contrast_weight=1.0, usage_kl_weight=0.0)(model, {"pixels": pixels}, 0, torch.Generator())
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_prior_loss_weighs_kinds_and_leaves_padding_out():
    torch.manual_seed(0)
    model = TransformerConfig(
        text_vocab=30, image_vocab=20, text_len=6, grid=(2, 2), width=16, depth=2, heads=2
    ).build()
    text = torch.tensor([[3, 4, 5, 6, PAD, PAD], [7, 8, PAD, PAD, PAD, PAD]])
    image = torch.randint(0, 20, (2, 4))
    loss, metrics = Autoregressive()(model, {"text": text, "image": image}, 0, None)
    text_logits, image_logits = model(text, image)
    targets = [(0, 0, 4), (0, 1, 5), (0, 2, 6), (1, 0, 8)]  # row, position, next token
    by_hand = torch.stack([-text_logits[r, p].log_softmax(-1)[t] for r, p, t in targets]).mean()
    torch.testing.assert_close(metrics["text"], by_hand)
    torch.testing.assert_close(metrics["image"], F.cross_entropy(image_logits.flatten(0, 1), image.flatten()))
    torch.testing.assert_close(loss.detach(), metrics["text"] / 8 + metrics["image"] * 7 / 8)


def test_under_autocast_logits_have_operands_in_32_bits_unless_the_objective_rounds_them():
    torch.manual_seed(0)
    model = PRIOR.build()
    with torch.no_grad():
        model.head.image.weight *= 50  # logits at which bf16 operands change the loss
    batch = {"text": torch.randint(0, 9, (4, 3)), "image": torch.randint(0, 7, (4, 12))}
    states = model.outputs(model.run(model.inputs(**batch)), batch["text"])
    model.outputs = lambda x, text: states  # the same for all
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact, rounded = (Autoregressive(**x)(model, batch, 0, None) for x in ({}, {"logit_operands": "autocast"}))
        assert torch.is_autocast_enabled("cpu")
    without = Autoregressive()(model, batch, 0, None)
    assert exact[0] == without[0] != rounded[0] and exact[1]["image"] == without[1]["image"]
    gradients = [
        torch.autograd.grad(loss, [*model.head.image.parameters(), *model.blocks.parameters()], retain_graph=True)
        for loss in (exact[0], without[0], rounded[0])
    ]
    assert all(map(torch.equal, gradients[0], gradients[1]))
    assert not any(map(torch.equal, gradients[0], gradients[2]))


def test_a_batch_of_empty_captions_has_no_text_loss():
    model = TransformerConfig(text_vocab=9, image_vocab=9, text_len=3, grid=(2, 2), width=16, depth=1, heads=2).build()
    batch = {"text": torch.full((2, 3), PAD), "image": torch.zeros(2, 4, dtype=torch.long)}
    loss, metrics = Autoregressive()(model, batch, 0, None)
    assert metrics["text"] == 0
    assert torch.isfinite(loss)


def test_the_decoder_finishes_on_argmax_codes_while_the_encoder_rests():
    torch.manual_seed(0)
    model = DVAEConfig(size=16, width=8, groups=3, vocab=20, code_width=8).build()
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    seen = []
    model.decoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for step in (4, 5):
        model.zero_grad()
        loss, _ = BalancedELB(freeze_encoder_from=5)(model, {"pixels": pixels}, step, torch.Generator().manual_seed(0))
        loss.backward()
        moves = [any(p.grad is not None for p in part.parameters()) for part in (model.encoder, model.decoder)]
        assert moves == [step < 5, True]
    tokens = model.tokenize(pixels).unflatten(1, (4, 4))
    assert torch.equal(seen[1], F.one_hot(tokens, 20).movedim(-1, 1).float())
    assert not torch.equal(seen[0], seen[1])


def contrastive():
    torch.manual_seed(0)
    return CLIPConfig(text_vocab=30, text_len=6, size=16, patch=8, width=32, depth=2, heads=4, embedding=16).build()


def test_contrastive_loss_equals_clips_when_captions_differ():
    model = contrastive()
    batch = {
        "pixels": torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8),
        "text": torch.randint(0, 30, (5, 6)),
    }
    loss, metrics = CLIPLoss()(model, batch, 0, None)
    logits = model.scale() * model.encode_image(batch["pixels"]) @ model.encode_text(batch["text"]).T
    labels = torch.arange(5)
    torch.testing.assert_close(loss, (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2)
    torch.testing.assert_close((loss, metrics), HardNegativeLoss()(model, batch, 0, None))


@pytest.mark.parametrize("loss", [CLIPLoss(), HardNegativeLoss()])
def test_contrastive_logits_have_32_bits_where_products_run_in_16(loss, monkeypatch):
    model = contrastive()
    images, texts = F.normalize(torch.randn(2, 5, 8), dim=-1)
    monkeypatch.setattr(model, "encode_image", lambda pixels: images)
    monkeypatch.setattr(model, "encode_text", lambda text: texts)
    batch = {"pixels": torch.zeros(5, 3, 16, 16, dtype=torch.uint8), "text": torch.arange(5)[:, None]}
    in_full, _ = loss(model, batch, 0, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_16, _ = loss(model, batch, 0, None)
    assert torch.equal(in_full, in_16)


def test_equal_captions_are_not_negatives_of_each_other():
    model = contrastive()
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    text = torch.randint(0, 30, (1, 6)).expand(2, 6)
    loss, metrics = HardNegativeLoss()(model, {"pixels": pixels, "text": text}, 0, None)
    assert metrics["accuracy"] == 1
    assert loss >= math.log(2) - 1e-6  # the best there is: both count half


def test_a_picture_picks_among_its_distractors_too_and_padding_is_none():
    model = contrastive()
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    text, wrong = torch.randint(0, 30, (3, 6)), torch.randint(0, 30, (3, 2, 6))
    wrong[1, 1] = PAD
    loss, _ = HardNegativeLoss()(model, {"pixels": pixels, "text": text, "distractors": wrong}, 0, None)
    images, right = model.encode_image(pixels), model.encode_text(text)
    losses = []
    for i in range(3):
        choices = torch.cat([right, model.encode_text(wrong[i, : 1 if i == 1 else 2])])
        losses.append(F.cross_entropy(model.scale() * choices @ images[i], torch.tensor(i)))
    by_caption = F.cross_entropy(model.scale() * right @ images.T, torch.arange(3))
    torch.testing.assert_close(loss, (torch.stack(losses).mean() + by_caption) / 2)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_spoiled_picture_differs_in_one_rectangle_from_its_own_picture_or_the_next(shift):
    pixels = torch.randint(0, 256, (40, 3, 16, 24), dtype=torch.uint8)
    spoiled, intact = cut_paste(pixels, shift, torch.Generator().manual_seed(0))
    again, _ = cut_paste(pixels, shift, torch.Generator().manual_seed(0))
    assert torch.equal(spoiled, again) and not intact.any()
    for i in range(40):
        changed = (spoiled[i] != pixels[i]).any(0)
        rows, columns = (changed.any(axis).nonzero().flatten() for axis in (1, 0))
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        assert 2 <= bottom - top <= 8 and 3 <= right - left <= 12
        patch = spoiled[i, :, top:bottom, left:right]
        windows = pixels[(i + shift) % 40].unfold(1, patch.shape[1], 1).unfold(2, patch.shape[2], 1)
        assert (windows == patch[:, None, None]).all(-1).all(-1).all(0).any()


def test_a_copy_that_shows_no_change_is_no_negative():
    flat = torch.full((4, 3, 16, 16), 90, dtype=torch.uint8)
    assert cut_paste(flat, 0, None)[1].all()
    model = contrastive()
    batch = {"pixels": flat, "text": torch.randint(0, 30, (4, 6))}
    torch.testing.assert_close(
        HardNegativeLoss(cut_paste_negatives=1)(model, batch, 0, None)[0], CLIPLoss()(model, batch, 0, None)[0]
    )


def test_a_caption_picks_among_the_spoiled_copies_of_its_picture_too():
    model = contrastive()
    batch = {
        "pixels": torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8),
        "text": torch.randint(0, 30, (3, 6)),
    }
    loss, metrics = HardNegativeLoss(cut_paste_negatives=2)(model, batch, 0, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    wrong = [cut_paste(batch["pixels"], shift, generator)[0] for shift in (0, 1)]
    images, texts = model.encode_image(batch["pixels"]), model.encode_text(batch["text"])
    losses = []
    for i in range(3):
        choices = torch.cat([images, *(model.encode_image(copies[i : i + 1]) for copies in wrong)])
        losses.append(F.cross_entropy(model.scale() * choices @ texts[i], torch.tensor(i)))
    by_picture = F.cross_entropy(model.scale() * images @ texts.T, torch.arange(3))
    torch.testing.assert_close(loss, (torch.stack(losses).mean() + by_picture) / 2)
    assert 0 <= metrics["text_to_image_acc"] <= 1


def test_contrastive_towers_read_to_the_last_token_and_give_unit_vectors():
    model = contrastive().eval()
    text = torch.tensor([[3, 4, 5, PAD, PAD, PAD]])
    longer = torch.tensor([[3, 4, 5, 6, PAD, PAD]])
    a, b = model.encode_text(text), model.encode_text(longer)
    torch.testing.assert_close(a.norm(dim=-1), torch.ones(1))
    assert not torch.allclose(a, b)


def test_a_clipped_temperature_comes_back():
    model = contrastive()
    with torch.no_grad():
        model.log_scale.fill_(MAX_LOG_SCALE + 1)
    model.constrain()
    assert model.scale().item() == pytest.approx(100)
    batch = {"pixels": torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8), "text": torch.randint(0, 30, (4, 6))}
    CLIPLoss()(model, batch, 0, None)[0].backward()  # sure and wrong: it wants to be less sure
    assert model.log_scale.grad is not None and model.log_scale.grad.item() > 0


@pytest.mark.parametrize("lengths", [(1, 6, 6, 6), (6, 1, 1, 2), (2, 2, 2, 2)])
def test_micro_batches_of_the_prior_add_up_to_its_batch_for_all_captions(lengths):
    config = TransformerConfig(text_vocab=30, image_vocab=20, text_len=6, grid=(2, 3), width=16, depth=2, heads=2)
    torch.manual_seed(0)
    model, objective = config.build(), Autoregressive()
    text, image = torch.randint(0, 30, (4, 6)), torch.randint(0, 20, (4, 6))
    for row, length in zip(text, lengths, strict=True):
        row[length:] = PAD
    batch = {"text": text, "image": image}

    def gradients(parts: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        model.zero_grad()
        for part in parts:
            (objective(model, part, 0, None)[0] * len(part["text"]) / 4).backward()
        return [p.grad.clone() for p in model.parameters()]

    batch_stats = {**batch, **objective.batch_stats(batch)}
    parts = [{name: tensor[rows] for name, tensor in batch_stats.items()} for rows in (slice(1), slice(1, 4))]
    for whole, added in zip(gradients([batch]), gradients(parts), strict=True):
        torch.testing.assert_close(added, whole, rtol=1e-4, atol=1e-7)
