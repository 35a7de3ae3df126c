"""Settings that the recipes of the papers take from their papers."""

from dataclasses import replace

import torch

from limner import recipes
from limner.numerics.precision import Auto, Fp16
from limner.objectives.autoregressive import Autoregressive
from limner.planner.cost import table1
from limner.recipes.presets import paper
from limner.training.grad_scaler import scaling
from limner.training.step import update
from limner.training.train_state import TrainState

SIZES = ("tiny", "small", "base", "large", "xl", "dalle-3b", "dalle-6b", "dalle-12b")
SMALL = ("scenes", "demo", "emoji", "icons", "glyphs", "laptop", "photos")


def test_operands_of_logits_are_in_32_bits_in_the_papers_recipes_alone():
    assert {paper(size).prior.objective for size in SIZES} == {Autoregressive()}
    assert Autoregressive().logit_operands == "fp32"
    assert {recipes.get(name).prior.objective.logit_operands for name in SMALL} == {"autocast"}


def test_the_dvae_trains_in_fp16_with_one_loss_scale():
    """App. A.2, in small: the learning rate is raised, since the model sees 20 batches."""
    stage = paper().dvae
    assert (stage.training.precision, stage.training.scaling) == (Fp16(), "loss")
    assert (paper("tiny").dvae.training.precision, paper("tiny").dvae.training.scaling) == (Auto(), "none")
    torch.manual_seed(0)
    model = replace(stage.model, size=16, width=8, groups=2, blocks=1, vocab=16, code_width=8).build()
    optimizer = replace(stage.training.optimizer, lr=1e-2)
    run = TrainState(model, stage.objective, replace(stage.training, batch_size=4, optimizer=optimizer))
    seen = []
    model.decoder.register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    hooks = scaling(run)
    pixels = torch.randint(0, 256, (4, 3, 4, 4), dtype=torch.uint8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    losses = []
    for _ in range(20):
        update(run, {"pixels": pixels}, hooks)
        losses.append(run.loss)
    assert set(seen) == {torch.float16} and run.skipped <= 2
    assert losses[-1] < losses[0] - 0.05
    assert all(p.dtype == torch.float32 for p in run.parameters)


def test_the_largest_priors_have_the_ranks_of_table_1():
    ranks = {size: paper(size).prior.grad_compression_rank for size in SIZES}
    assert {size: rank for size, rank in ranks.items() if rank} == {"dalle-3b": 512, "dalle-6b": 640, "dalle-12b": 896}
    assert list(filter(None, ranks.values())) == [rank for _, _, rank, _ in table1()]
    assert not any(recipes.get(name).prior.grad_compression_rank for name in SMALL)


def test_the_best_of_512_candidates_at_temperature_1():
    """§2.6: "without temperature reduction (i.e., using t = 1) [...] and use reranking with N = 512"."""
    for size in SIZES:
        recipe = paper(size)
        assert (recipe.prior.temperature, recipe.contrastive.candidates) == (1.0, 512)
    assert not any(recipes.get(name).contrastive.candidates for name in SMALL)
