"""Traces from strangers: limits, damage and fields of other types."""

import gzip
import json

import pytest
from hypothesis import given, strategies as st

from limner.errors import UserError
from limner.profiling import trace as module
from limner.profiling.analysis import analyze
from limner.profiling.trace import read_trace, read_traces
from profiles import TraceFile, straggler


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"traceEvents": 3}', b'{"traceEvents": []}', b"\x1f\x8b", b"\xff" * 9, b"[" * 9999]
)
def test_a_damaged_file_is_one_sentence(tmp_path, content):
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_trace(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_truncated_gzip_file_is_damaged(tmp_path):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(straggler(0).save(tmp_path).read_bytes())[:-20])
    with pytest.raises(UserError, match="damaged"):
        read_trace(path)


def test_a_file_that_grows_beyond_the_limit_is_not_decompressed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (64 << 20)))
    with pytest.raises(UserError, match="more than 1 MiB"):
        read_trace(path)


def test_too_many_events_and_traces(tmp_path, monkeypatch):
    path = straggler(0).save(tmp_path)
    monkeypatch.setattr(module, "MAX_EVENTS", 3)
    with pytest.raises(UserError, match="more than 3 events"):
        read_trace(path)
    monkeypatch.setattr(module, "MAX_BRACKETS", 3)
    with pytest.raises(UserError, match="more than 3 JSON objects"):
        read_trace(path)
    monkeypatch.setattr(module, "MAX_TRACES", 1)
    with pytest.raises(UserError, match="name fewer"):
        read_traces([path, path])


def test_two_traces_of_one_rank_and_a_folder_without_traces(tmp_path):
    path = straggler(0).save(tmp_path)
    with pytest.raises(UserError, match="both of rank 0"):
        read_traces([path, path])
    with pytest.raises(UserError, match="lacks traces"):
        read_traces([_empty_folder(tmp_path)])
    with pytest.raises(UserError, match="no trace is named"):
        read_traces([])
    with pytest.raises(UserError, match="cannot be read"):
        read_traces([tmp_path / "absent.json"])


def _empty_folder(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_a_gzipped_trace_equals_the_plain_one(tmp_path):
    path = straggler(1).save(tmp_path)
    zipped = tmp_path / "zipped.json.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(path).events == read_trace(zipped).events and read_trace(path).rank == 1


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.just(10**400), st.dictionaries(st.sampled_from(["Bytes", "Addr", "Input Dims"]), st.integers(), max_size=2),
)  # fmt: skip
KEYS = st.sampled_from(["ts", "dur", "cat", "name", "args", "pid", "tid", "ph"])


@given(st.lists(st.tuples(st.integers(0, 20), KEYS, VALUES), max_size=6), st.dictionaries(KEYS, VALUES))
def test_fields_of_other_types_are_left_out(tmp_path_factory, changes, more):
    trace = straggler(0)
    trace.allocate(5, 100, 1)
    trace.op("aten::mm", 0, 1, **{"Input Dims": [[10**30, 10**30]], "Sequence number": "x", "External id": None})
    for index, key, value in changes:
        trace.events[index % len(trace.events)][key] = value
    trace.events.append(more)
    analyze([read_trace(trace.save(tmp_path_factory.getbasetemp()))])


HEADS = None, [], {"rank": -1, "first_step": "x", "loading": {"read": [1, "x"]}}, {"loading": [1]}, "x", -1, 10**30, [3]


@pytest.mark.parametrize("key", ["deviceProperties", "distributedInfo", "limner", "host_name", "baseTimeNanoseconds"])
@pytest.mark.parametrize("value", HEADS)
def test_heads_of_other_types_are_left_out(tmp_path, key, value):
    path = straggler(0).save(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert analyze([read_trace(path)])["ranks"]


def test_times_far_apart_do_not_fill_memory(tmp_path):
    trace = TraceFile()
    trace.op("aten::mm", 0, 1)
    trace.op("aten::mm", 2**39, 2**39 + 1)
    timeline = analyze([read_trace(trace.save(tmp_path))])["timelines"][0]
    assert len(timeline["utilization"]) <= 2_001


def test_events_inside_each_other_take_time_in_proportion(tmp_path):
    trace = TraceFile()
    for depth in range(4_000):
        trace.op("aten::mm", depth, 80_000 - depth)
    trace.op("autograd::engine::evaluate_function: X", 90_000, 90_010, **{"Sequence number": 7})
    trace.op("aten::t", 90_001, 90_005, **{"Sequence number": 7})  # its own forward operator
    assert analyze([read_trace(trace.save(tmp_path))])["operators"][0]["calls"] == 4_000
