"""Layouts: every block and parameter has one stage, and the messages of a transition provide what each rank needs."""

import pytest
from hypothesis import given, strategies as st

from limner.distributed.pipeline_layout import PipelineLayout, parameter_stages
from limner.distributed.pipeline_schedule import count_microbatches
from limner.distributed.pipeline_transition import Message, messages
from limner.errors import UserError
from limner.models.transformer import TransformerConfig


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.integers(0, 40), st.integers(1, 40))
def test_pieces_are_the_trained_blocks_in_order_and_of_similar_size(stages, replicas, chunks, frozen, trained):
    layout = PipelineLayout(stages=stages, replicas=replicas, frozen=frozen, chunks=chunks)
    if trained < stages * chunks:
        with pytest.raises(UserError, match="fewer --pipeline-stages"):
            layout.chunk_blocks(frozen + trained)
        return
    pieces = layout.chunk_blocks(frozen + trained)
    assert len(pieces) == stages * chunks
    assert [block for piece in pieces for block in piece] == list(range(frozen, frozen + trained))
    sizes = [len(piece) for piece in pieces]
    assert min(sizes) >= 1 and max(sizes[1:], default=0) - min(sizes[1:], default=0) <= 1
    assert sizes[0] <= max(sizes[1:], default=trained) + 1
    stage_of = layout.block_stages(frozen + trained)
    assert stage_of[:frozen] == [0] * frozen
    assert all(stage_of[block] == i % stages for i, piece in enumerate(pieces) for block in piece)


def test_frozen_blocks_count_a_sixth():
    assert PipelineLayout(stages=2, frozen=6).chunk_blocks(13) == [range(6, 9), range(9, 13)]


def test_ranks_of_a_pipeline_are_neighbors():
    layout = PipelineLayout(stages=2, replicas=3)
    assert layout.pipelines == [[0, 1], [2, 3], [4, 5]] and layout.world_size == 6
    assert [layout.stage(r) for r in range(6)] == [0, 1] * 3
    assert [layout.replica(r) for r in range(6)] == [0, 0, 1, 1, 2, 2]


def test_embeddings_are_in_the_first_stage_and_the_head_in_the_last():
    model = TransformerConfig(text_vocab=9, image_vocab=9, text_len=2, grid=(2, 2), width=8, depth=4, heads=2).build()
    stages = parameter_stages(model, PipelineLayout(stages=2, frozen=1))
    assert stages.keys() == dict(model.named_parameters()).keys()
    assert {stages[name] for name in stages if name.startswith(("embed.", "blocks.0.", "blocks.1."))} == {0}
    assert {stages[name] for name in stages if name.startswith(("blocks.2.", "blocks.3.", "head."))} == {1}


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
