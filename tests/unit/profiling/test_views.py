"""The views of traces written by hand, whose numbers are known."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

from limner.profiling.analysis import analyze
from limner.profiling.compare import compare, comparison_table
from limner.profiling.distributed_view import PARTS, RankTimes, steps_by_rank
from limner.profiling.page import save_report, tables_of
from limner.profiling.recommendations import format_size, format_time
from limner.profiling.trace import read_trace, read_traces
from profiles import TraceFile, cuda, straggler

MS = 1_000_000  # nanoseconds


def report_of(folder, *traces):
    for trace in traces:
        trace.save(folder)
    return analyze(read_traces([folder]))


def kinds(report):
    return [advice["kind"] for advice in report["recommendations"]]


def test_a_step_is_divided_into_computation_communication_input_and_the_rest(tmp_path):
    report = report_of(tmp_path, straggler(0), straggler(1))
    rank = report["ranks"][0]
    assert [rank[name] / MS for name in ("total", *PARTS, "overlap", "waiting")] == [100, 20, 72.5, 2, 5.5, 0, 64]
    assert report["ranks"][1]["waiting"] == 0
    collectives = {(row["rank"], row["name"]): row for row in report["collectives"]}
    assert collectives[0, "all_reduce"] == {
        "rank": 0, "name": "all_reduce", "type": "float", "call_bytes": 4000, "calls": 2, "bytes": 8000,
        "time": 144 * MS,
    }  # fmt: skip


def test_the_straggler_is_named_with_its_numbers(tmp_path):
    report = report_of(tmp_path, straggler(0), straggler(1))
    assert kinds(report)[0] == "straggler"
    assert (
        "Rank 1 computes 4.2 times as long as rank 0, which waits 64% of each step"
        in (report["recommendations"][0]["text"])
    )


def test_clocks_of_two_machines_are_aligned_and_those_of_one_machine_are_not(tmp_path):
    two = report_of(tmp_path, straggler(0, host="a"), straggler(1, at=5000.0, host="b"))
    assert two["ranks"][0]["waiting"] == 64 * MS
    one = report_of(tmp_path, straggler(0), straggler(1, at=30.0))
    assert one["ranks"][0]["waiting"] == 72 * MS  # until the end of the collective


@given(st.integers(0, 2**32))
def test_the_parts_add_up_to_the_step_exactly(tmp_path_factory, seed):
    random, trace = np.random.default_rng(seed), TraceFile()
    for step in range(3):
        trace.span(f"ProfilerStep#{step}", 30 * step, 30 * step + random.uniform(20, 30))
    for name, category in (
        ("aten::mm", "cpu_op"),
        ("gloo:all_reduce", "user_annotation"),
        ("limner:input", "user_annotation"),
    ):
        for tid in (1, 2):
            for start in random.uniform(0, 90, 4):
                trace.add(name, category, start, start + random.exponential(6), tid)
    rows = steps_by_rank([RankTimes(read_trace(trace.save(tmp_path_factory.getbasetemp())))])
    for row in rows:
        assert row["total"] == sum(row[part] for part in PARTS)
        assert min(row.values()) >= 0
        assert row["waiting"] <= row["communication"]


def test_operators_inside_the_input_are_input_and_waiting_inside_autograd_is_not_computation(tmp_path):
    trace = TraceFile()
    trace.span("ProfilerStep#0", 0, 100)
    trace.span("limner:input", 0, 10)
    trace.op("aten::stack", 2, 8)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 10, 90)
    trace.op("aten::mm", 20, 30)
    row = report_of(tmp_path, trace)["ranks"][0]
    assert [row[part] / MS for part in PARTS] == [10, 0, 10, 80]


def test_the_parts_of_loading_have_a_table_and_the_longest_is_named(tmp_path):
    trace = TraceFile()
    trace.span("ProfilerStep#0", 0, 100)
    trace.span("limner:input", 0, 20)
    trace.op("aten::mm", 20, 90)
    trace.loading = {"decode": [8, 25 * MS], "read": [8, 7 * MS], "augment": [-1, 5], "other": [8, 99 * MS]}
    report = report_of(tmp_path, trace)
    assert report["loading"] == [
        {"rank": 0, "part": "read", "calls": 8, "time": 7 * MS},
        {"rank": 0, "part": "decode", "calls": 8, "time": 25 * MS},
    ]
    assert "20% of each step (20 ms of 100 ms), and threads that load data mostly decode: prepare" in str(
        report["recommendations"]
    )


def test_self_and_total_times_and_sources_of_operators(tmp_path):
    trace = TraceFile()
    trace.span("ProfilerStep#0", 0, 100)
    trace.add("limner/model.py(33): forward", "python_function", 0, 40)
    trace.add("torch/nn/linear.py(9): forward", "python_function", 0, 40)
    trace.op("aten::linear", 10, 30, **{"Sequence number": 5})
    trace.op("aten::mm", 12, 27, **{"Sequence number": 5})
    trace.allocate(13, 64, 1)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 50, 70, **{"Sequence number": 5})
    trace.op("aten::mm", 55, 60)
    rows = {row["name"]: row for row in report_of(tmp_path, trace)["operators"]}
    assert (rows["aten::linear"]["self"], rows["aten::linear"]["total"]) == (5 * MS, 20 * MS)
    assert (rows["aten::mm"]["calls"], rows["aten::mm"]["self"]) == (2, 20 * MS)
    assert rows["aten::mm"]["source"] == "limner/model.py:33"  # also that of the backward pass
    assert (rows["aten::linear"]["self_allocated"], rows["aten::linear"]["allocated"]) == (0, 64)
    assert (rows["aten::mm"]["self_allocated"], rows["aten::mm"]["allocations"]) == (64, 1)


def test_a_span_that_outlives_the_call_that_ended_the_one_before_is_not_inside_it(tmp_path):
    trace = TraceFile()
    trace.span("ProfilerStep#1", 0, 50)
    trace.add("torch/profiler.py(9): step", "python_function", 49, 51)
    trace.span("ProfilerStep#2", 50, 90)
    trace = read_trace(trace.save(tmp_path))
    last = next(i for i, event in enumerate(trace.events) if event.name == "ProfilerStep#2")
    assert "ProfilerStep#1" not in [trace.events[i].name for i in trace.ancestors(last)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 100)), min_size=1, max_size=30))
def test_the_peak_is_what_was_allocated_before_and_the_live_allocations(tmp_path_factory, steps):
    trace, live = TraceFile(), {0: 40, 1: 7}  # allocated before the recording
    trace.total = sum(live.values())
    for time, (address, size) in enumerate(steps):
        trace.allocate(time, -live.pop(address) if address in live else live.setdefault(address, size), address)
    folder = tmp_path_factory.getbasetemp()
    row = analyze([read_trace(trace.save(folder))])["memory"][0]
    assert row["peak"] == row["before"] + row["live"] == max(total for _, total in row["curve"])
    assert row["live"] == sum(holder["bytes"] for holder in row["holders"])


def test_the_modules_around_an_allocation_are_named_also_in_the_backward_pass(tmp_path):
    trace = TraceFile()
    trace.span("ProfilerStep#0", 0, 100)
    for start, end, name in ((0, 40, "Prior_0"), (5, 30, "Block_3")):
        trace.add(f"nn.Module: {name}", "python_function", start, end)
    trace.op("aten::mm", 10, 20, **{"Sequence number": 5})
    trace.allocate(11, 64, 1)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 50, 70, **{"Sequence number": 5})
    trace.op("aten::t", 55, 60)
    trace.allocate(56, 32, 2)
    trace.op("aten::add", 80, 90)
    trace.allocate(81, 8, 3)
    holders = report_of(tmp_path, trace)["memory"][0]["holders"]
    assert [(row["bytes"], row["module"]) for row in holders] == [
        (64, "Prior_0 > Block_3"), (32, "Prior_0 > Block_3"), (8, "")
    ]  # fmt: skip


def test_collectives_are_divided_by_size_and_type(tmp_path):
    trace = straggler(0)
    trace.all_reduce(96, 97, elements=10)
    trace.span("gloo:all_reduce", 97, 99, 2, **{"Input Dims": [[1000]], "Input type": ["c10::Half"]})
    rows = report_of(tmp_path, trace)["collectives"]
    assert [(row["type"], row["call_bytes"], row["calls"], row["bytes"]) for row in rows] == [
        ("float", 4000, 2, 8000), ("half", 2000, 1, 2000), ("float", 40, 1, 40)
    ]  # fmt: skip


def test_the_page_shows_lines_of_code_below_the_folders_that_python_imports_from_alone(tmp_path, monkeypatch):
    trace = TraceFile()
    trace.span("ProfilerStep#0", 0, 100)
    (tmp_path / "code/own").mkdir(parents=True)
    (tmp_path / "code/own/model.py").write_text("first\n    y = x < 1  # second\n")
    (tmp_path / "outside.py").write_text("secret\n")
    monkeypatch.syspath_prepend(tmp_path / "code")
    names = ("own/model.py(2): f", "../outside.py(1): f", f"{tmp_path}/outside.py(1): f", "own/gone.py(1): f")
    for i, name in enumerate(names):
        trace.add(name, "python_function", 10 * i, 10 * i + 9)
        trace.op(f"aten::op{i}", 10 * i + 1, 10 * i + 8)
    traces = [read_trace(trace.save(tmp_path))]
    page = save_report(tmp_path / "report.html", analyze(traces), traces).read_text()
    assert "<code>y = x &lt; 1  # second</code>" in page and page.count("vscode://") == 1
    assert "own/gone.py:1" in page and "secret" not in page


def test_who_holds_the_peak(tmp_path):
    trace = TraceFile()
    trace.span("ProfilerStep#0", 0, 100)
    trace.span("limner:forward", 0, 50)
    trace.op("aten::softmax", 10, 20)
    trace.op("aten::_softmax", 11, 19)
    trace.allocate(12, 64 << 20, 1)
    trace.op("aten::relu", 30, 40)
    trace.allocate(31, 8 << 20, 2)
    trace.allocate(60, -64 << 20, 1)
    report = report_of(tmp_path, trace)
    holder = report["memory"][0]["holders"][0]
    assert holder == {"operator": "aten::softmax", "phase": "forward", "module": "", "source": "", "bytes": 64 << 20}
    assert "One tensor of 67.1 MB, from aten::softmax, is 89% of the peak of 75.5 MB" in str(report["recommendations"])


def test_a_trace_of_a_gpu_fills_every_view(tmp_path):
    report = report_of(tmp_path, cuda(0), cuda(1))
    rank = report["ranks"][0]
    assert [rank[name] / MS for name in (*PARTS, "overlap")] == [60, 20, 5, 15, 10]
    gpu = report["gpus"][0]
    assert gpu["utilization"] == pytest.approx(0.82)  # with the copy and NCCL
    assert gpu["sm_efficiency"] == pytest.approx((30 + 5 + 4) / 100)  # NCCL's kernel names no blocks
    kernel = next(row for row in report["kernels"] if row["name"] == "elementwise_kernel")
    assert (kernel["calls"], kernel["time"]) == (2, 30 * MS)
    assert kernel["blocks_per_sm"] == pytest.approx((0.5 * 10 + 0.2 * 20) / 30)  # weighted by duration
    assert kernel["occupancy"] == pytest.approx((75 * 10 + 15 * 20) / 30)
    assert report["kernels"][0]["uses_tensor_cores"] and not kernel["uses_tensor_cores"]
    linear = next(row for row in report["operators"] if row["name"] == "aten::linear")
    assert (linear["gpu_self"], linear["gpu_total"], linear["source"]) == (30 * MS, 60 * MS, "nn/model.py:12")
    assert report["collectives"][0]["name"] == "allreduce" and report["collectives"][0]["bytes"] == 1000
    assert report["memory"][0]["device"] == "GPU 0" and report["memory"][0]["peak"] == 1000
    timeline = report["timelines"][0]
    assert timeline["utilization"] == [0.2, *[1] * 8, 0]
    assert timeline["sm_efficiency"][:6] == [0, 1, 1, 1, 0.5, 0.2]


def test_kernels_of_nccl_that_run_after_their_step_are_matched(tmp_path):
    traces = TraceFile(0), TraceFile(1)
    for trace, late in zip(traces, (0, 15), strict=True):
        for step in range(2):
            trace.span(f"ProfilerStep#{step}", 100 * step, 100 * step + 100)
            trace.kernel("k", 100 * step, 100 * step + 60 + late)
            trace.kernel("ncclDevKernel_AllReduce", 100 * step + 90 + late, 100 * step + 115)
    report = report_of(tmp_path, *traces)
    assert [row["waiting"] / MS for row in report["steps"]] == [10, 10, 0, 0]  # 5 ms of 15 are hidden


def test_a_step_that_one_rank_lacks_is_left_blank(tmp_path):
    traces = straggler(0), straggler(1)
    traces[1].events = [event for event in traces[1].events if event["ts"] < 100 * 1000]
    for trace in traces:
        trace.save(tmp_path)
    read = read_traces([tmp_path])
    assert "<td></td>" in save_report(tmp_path / "report.html", analyze(read), read).read_text()


def test_the_gpus_limits_are_named(tmp_path):
    idle, few, slow = TraceFile(), TraceFile(), TraceFile()
    for trace in (idle, few, slow):
        trace.span("ProfilerStep#0", 0, 100)
    for start in range(0, 100, 10):
        idle.kernel("k", start, start + 0.005)
    few.kernel("k", 0, 90, blocks=0.3)
    slow.kernel("ampere_sgemm_128x64_nn", 0, 80)
    texts = {}
    for name, trace in (("idle", idle), ("few", few), ("slow", slow)):
        (tmp_path / name).mkdir()
        texts[name] = report_of(tmp_path / name, trace)["recommendations"]
    assert [advice["kind"] for advice in texts["idle"]] == ["small-batch", "idle-gpu"]
    assert [advice["kind"] for advice in texts["few"]] == ["few-blocks"] and "use 30%" in texts["few"][0]["text"]
    assert [advice["kind"] for advice in texts["slow"]] == ["tensor-cores"]


@pytest.mark.parametrize(("input_ms", "expected"), [(9, []), (11, ["input"])])
def test_waiting_for_data_is_named_from_a_tenth_of_the_step(tmp_path, input_ms, expected):
    trace = TraceFile()
    trace.span("ProfilerStep#0", 0, 100)
    trace.span("limner:input", 0, input_ms)
    trace.op("aten::mm", input_ms, 99)
    assert kinds(report_of(tmp_path, trace)) == expected


def test_communication_without_waiting_asks_for_fewer_bytes(tmp_path):
    traces = TraceFile(0), TraceFile(1)
    for trace in traces:
        trace.span("ProfilerStep#0", 0, 100)
        trace.op("aten::mm", 0, 60)
        trace.all_reduce(60, 95, elements=10**6)
    report = report_of(tmp_path, *traces)
    assert kinds(report) == ["communication"] and "35% of each step (4 MB per step)" in str(report["recommendations"])


def test_stages_of_a_pipeline_that_wait_for_each_other_are_uneven(tmp_path):
    traces = TraceFile(0), TraceFile(1)
    for trace, work in zip(traces, (20, 70), strict=True):
        trace.span("ProfilerStep#0", 0, 100)
        trace.op("aten::mm", 0, work)
        trace.span("gloo:recv", work, 95)
    report = report_of(tmp_path, *traces)
    assert kinds(report) == ["uneven-stages"]
    assert "stage of rank 1 computes 3.5 times as long as rank 0" in report["recommendations"][0]["text"]


def test_a_trace_without_steps_is_one_step(tmp_path):
    trace = TraceFile()
    trace.op("aten::mm", 3, 13)
    assert report_of(tmp_path, trace)["ranks"][0]["total"] == 10 * MS


@pytest.mark.parametrize(
    ("value", "time", "size"),
    [
        (0, "0 ns", "0 B"),
        (31, "31 ns", "31 B"),
        (3140, "3.14 µs", "3.14 kB"),
        (999_600, "1 ms", "1 MB"),
        (2e12, "2,000 s", "2,000 GB"),
    ],
)
def test_units(value, time, size):
    assert (format_time(value), format_size(value)) == (time, size)


def test_the_page_escapes_names_and_loads_nothing(tmp_path):
    name = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028"
    trace = cuda()
    trace.op(name, 1, 2)
    trace.kernel(name, 1, 2, **{"Collective name": name})
    trace.add(f"{name}.py(3): f", "python_function", 0, 50)
    path = trace.save(tmp_path)
    traces = read_traces([path])
    page = save_report(tmp_path / "report.html", analyze(traces), traces).read_text()
    assert "<script>alert" not in page and "<img" not in page
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:|//)", page)
    tables = re.search(r"id='tables'>(.*?)</script>", page, re.DOTALL)
    assert json.loads(tables[1]) == json.loads(json.dumps(tables_of(analyze(traces))))


def test_two_runs_are_compared_by_step_and_by_operator(tmp_path):
    def run(folder, product):
        trace = TraceFile()
        for step in range(4):
            start = 100 * step
            trace.span(f"ProfilerStep#{step}", start, start + 60 + product + step)
            trace.op("aten::mm", start, start + product)
            trace.op("aten::add", start + product, start + product + 10)
        (tmp_path / folder).mkdir()
        trace.save(tmp_path / folder)
        return analyze(read_traces([tmp_path / folder]))

    before, after = run("before", 10), run("after", 30)
    same = compare(before, before)
    assert all(row["before"] == row["after"] for rows in same.values() for row in rows)
    compared = compare(before, after)
    times = {row["name"]: row for row in compared["times"]}
    assert times["total"]["after"] - times["total"]["before"] == times["compute"]["after"] - times["compute"]["before"]
    assert times["compute"]["after"] - times["compute"]["before"] == 20 * MS and times["other"]["before"] == 51.5 * MS
    # steps of 70, 71, 72, 73 ms: a variance of 5/3, and the same after
    assert times["total"]["within"] == pytest.approx(3.18 * (2 * 5 / 3 / 4) ** 0.5 * MS, rel=0.01)  # t of 3 degrees
    assert [(row["name"], row["before"], row["after"]) for row in compared["operators"]] == [
        ("aten::mm", 10 * MS, 30 * MS), ("aten::add", 10 * MS, 10 * MS),
    ]  # fmt: skip
    text = comparison_table(compared)
    assert "aten::mm" in text and "+20 ms (+200%)" in text and "±" in text
    page = save_report(tmp_path / "page.html", after | {"compared": compared}, []).read_text()
    assert "Compared with the earlier run" in page and "+20 ms (+200%)" in page
