"""Objectives of several processes: the mean of their losses is the loss of one process on the whole batch."""

import pytest
import torch

from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.objectives.codebook_elbo import BalancedELB
from limner.objectives.hard_negatives import HardNegativeLoss

DVAE = DVAEConfig(size=16, width=8, groups=2, blocks=1, vocab=16, code_width=8)
CLIP = CLIPConfig(text_vocab=10, text_len=4, size=16, patch=8, width=16, depth=1, heads=2, embedding=8)


@pytest.mark.parametrize(
    ("config", "objective"),
    [
        (CLIP, HardNegativeLoss()),
        (DVAE, BalancedELB(freeze_encoder_from=0, usage_kl_weight=10.0)),
        (DVAE, BalancedELB(freeze_encoder_from=0, usage_penalty_from=0, usage_penalty=10.0, contrast_weight=0.7)),
    ],
)
def test_the_mean_over_processes_is_the_loss_of_the_whole(config, objective):
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # so that codes differ
    batch = {
        "pixels": torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8),
        "text": torch.tensor([[1, 2, -1, -1], [3, 4, 5, -1], [1, 2, -1, -1], [6, -1, -1, -1]]),
    }
    shares = [{name: x[k : k + 2] for name, x in batch.items()} for k in (0, 2)]
    whole, _ = objective(model, batch, 0, None)
    own: list[list[torch.Tensor]] = [[], []]  # what each process gives to `join`, call by call
    losses = []
    for _ in range(3):  # what one gives may depend on what it got: until nothing changes
        given, losses = own, []
        own = [[], []]
        for k, share in enumerate(shares):

            def join(rows, k=k, given=given, own=own):
                call = len(own[k])
                own[k].append(rows.detach())
                others = [calls[call] if call < len(calls) else rows for calls in given]
                return torch.cat([rows if i == k else other for i, other in enumerate(others)])

            losses.append(objective.gathered(join)(model, share, 0, None)[0])
    torch.testing.assert_close(torch.stack(losses).mean(), whole)
    alone = torch.stack([objective(model, share, 0, None)[0] for share in shares]).mean()
    assert (alone - whole).abs() > 1e-3  # shares that know nothing of each other have another loss
