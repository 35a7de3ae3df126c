"""Layouts: every block and parameter has one stage, and the messages of a transition provide what each rank needs."""

import pytest
from hypothesis import given, strategies as st
from torch import nn

from limner.distributed.pipeline_layout import PipelineLayout, parameter_stages, unit_weights
from limner.distributed.pipeline_schedule import count_microbatches
from limner.distributed.pipeline_transition import Message, messages
from limner.errors import UserError


class Model(nn.Module):
    """A model whose embedding, blocks and head have numbers of parameters."""

    def __init__(self, embed, *sizes):
        super().__init__()
        self.embed, *blocks, self.head = (nn.Linear(1, n, bias=False, device="meta") for n in (embed, *sizes))
        self.blocks = nn.ModuleList(blocks)


@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 20), st.lists(st.integers(1, 9), min_size=3, max_size=24))
def test_pieces_are_the_trained_blocks_in_order(stages, chunks, frozen, sizes):
    depth = len(sizes) - 2
    layout = PipelineLayout(stages=stages, frozen=min(frozen, depth), chunks=chunks)
    if max(depth - layout.frozen, 1) < layout.pieces:
        with pytest.raises(UserError, match="fewer --pipeline-stages"):
            layout.chunk_blocks(Model(*sizes))
        return
    pieces = layout.chunk_blocks(Model(*sizes))
    assert len(pieces) == (stages * chunks if stages > 1 else 1)
    assert [block for piece in pieces for block in piece] == list(range(layout.frozen, depth))
    assert all(pieces) or layout.frozen == depth


def test_units_weigh_their_parameters_and_frozen_ones_a_sixth():
    prior = Model(30, 60, 61, 62, 7)
    assert unit_weights(prior, 0) == [90, 61, 69]
    assert unit_weights(prior, 1) == [15 + 61, 69]
    assert unit_weights(prior, 3) == pytest.approx([(30 + 60 + 61 + 62) / 6 + 7])


def test_ranks_of_a_pipeline_are_neighbors():
    layout = PipelineLayout(stages=2, replicas=3)
    assert layout.pipelines == [[0, 1], [2, 3], [4, 5]] and layout.world_size == 6
    assert [layout.stage(r) for r in range(6)] == [0, 1] * 3
    assert [layout.replica(r) for r in range(6)] == [0, 0, 1, 1, 2, 2]


def test_embeddings_are_in_the_first_stage_and_the_head_in_the_last():
    prior = Model(1, 1, 1, 1, 1, 1)
    stages = parameter_stages(prior, PipelineLayout(stages=2, frozen=1))
    assert list(stages) == [name for name, _ in prior.named_parameters()]
    assert list(stages.values()) == [0, 1, 0, 0, 0, 1]  # embedding, head, blocks


@given(st.data())
def test_messages_provide_what_each_rank_needs(data):
    names, ranks = ["a", "b", "c", "d"], data.draw(st.integers(1, 5))
    subsets = st.sets(st.sampled_from(names))
    held = [{f"{group}/{n}" for n in data.draw(subsets) for group in "wm"} for _ in range(ranks)]
    needed = [data.draw(subsets) for _ in range(ranks)]
    sent = messages(held, needed)
    assert all(m.key in held[m.source] and m.source != m.target for m in sent)
    after = [keys | {m.key for m in sent if m.target == rank} for rank, keys in enumerate(held)]
    assert len(sent) == sum(map(len, after)) - sum(map(len, held))  # nothing is sent twice
    existing = set().union(*held)
    for rank, wanted in enumerate(needed):
        assert {key for key in existing if key[2:] in wanted} <= after[rank]


def test_holders_share_the_messages():
    sent = messages([{"w/a"}, {"w/a"}, set(), set()], [set(), set(), {"a"}, {"a"}])
    assert sent == [Message("w/a", 0, 2), Message("w/a", 1, 3)]


@pytest.mark.parametrize(
    ("rows", "stages", "least", "expected"),
    [
        (16, 4, 1, 8),
        (8, 4, 1, 8),
        (4, 4, 1, 4),
        (16, 1, 1, 1),
        (12, 1, 5, 6),
        (24, 2, 1, 4),
        (24, 2, 5, 6),
        (6, 2, 9, 6),
    ],
)
def test_micro_batches_are_a_multiple_of_the_stages(rows, stages, least, expected):
    assert count_microbatches(rows, PipelineLayout(stages=stages), least) == expected


def test_rows_that_the_stages_cannot_share_are_pointed_out():
    with pytest.raises(UserError, match="6 samples cannot be divided among 4 pipeline stages: choose a batch_size"):
        count_microbatches(6, PipelineLayout(stages=4, replicas=2), 1)
