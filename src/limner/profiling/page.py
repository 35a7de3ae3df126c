"""The report as one HTML file without outside resources. Text from traces is escaped."""

from __future__ import annotations

import base64
import gzip
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from linecache import getline
from pathlib import Path
from typing import Any
from urllib.parse import quote

from limner.evaluation.report import chart, save_page, table
from limner.json_files import to_json
from limner.profiling.compare import COLUMNS, TITLES, rows_of
from limner.profiling.distributed_view import PARTS
from limner.profiling.recommendations import format_size, format_time
from limner.profiling.timeline_view import KINDS
from limner.profiling.trace import Trace

MAX_ROWS = 30  # of steps, operators and kernels in a table of the page; the JSON has all
MAX_CODE = 120  # characters of a line of code
MAX_POINTS = 400  # of a memory curve
MAX_EMBEDDED = 32 << 20  # bytes of compressed traces in the page, for Perfetto
PART_TITLES = ("compute", "exposed communication", "input", "other")
_COLORS = ("var(--c0)", "var(--c1)", "var(--c3)", "var(--line)")


def tables_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report without its curves and timelines."""
    memory = [{key: value for key, value in row.items() if key != "curve"} for row in report["memory"]]
    return {key: value for key, value in report.items() if key != "timelines"} | {"memory": memory}


def save_report(path: Path, report: Mapping[str, Any], traces: Sequence[Trace]) -> Path:
    """Write the page of the tables of `analysis.analyze`."""
    ranks = report["ranks"]
    mean = sum(row["total"] for row in ranks) / len(ranks)
    devices = {str(device.get("name", "GPU")) for trace in traces for device in trace.devices} or {"CPU"}
    steps = [row["step"] for row in report["steps"]]
    lead = (
        f"Ranks: {len(ranks)}, on {', '.join(sorted(devices))}. Steps: {min(steps)} to {max(steps)}. Mean time of a "
        f"step: {format_time(mean)}."
    )
    advice = [
        f'<li>{escape(row["text"])} <span class="kind">({row["kind"]})</span></li>' for row in report["recommendations"]
    ]
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    body = [
        f"<style>{style}</style><h1>Where time and memory go</h1><p class='lead'>{escape(lead)}</p>",
        "<h2>Recommendations</h2>",
        f"<ul>{''.join(advice)}</ul>" if advice else "<p>No rule found a limit worth a change.</p>",
        *_compared(report),
        *_distributed(report),
        *_timeline(report, traces),
        *_memory(report),
        *_operators(report),
        "<h2>Tables</h2><p><button id='json'>Save the tables as JSON</button></p>",
        _script("tables", to_json(tables_of(report))),
        f"<script>{script}</script>",
    ]
    return save_page(path, "Profile", "\n".join(body))


def _compared(report: Mapping[str, Any]) -> Iterator[str]:
    if compared := report.get("compared"):
        yield "<h2>Compared with the earlier run</h2>"
        for key, title in TITLES.items():
            yield f"<div class='wide'>{table(rows_of(compared[key]), (title, *COLUMNS))}</div>"


def _distributed(report: Mapping[str, Any]) -> Iterator[str]:
    ranks = report["ranks"]
    yield f"<h2>Time of a step by rank</h2>{_legend(dict(zip(PART_TITLES, _COLORS, strict=True)))}"
    longest = max(row["total"] for row in ranks)
    for row in ranks:
        parts = "".join(
            f'<i style="flex: {row[part]:.0f}; background: {color}" title="{title} {format_time(row[part])}"></i>'
            for part, title, color in zip(PARTS, PART_TITLES, _COLORS, strict=True)
        )
        yield f'rank {row["rank"]}<div class="bar" style="width: {row["total"] / longest:.1%}">{parts}</div>'
    times = dict(zip(PART_TITLES, PARTS, strict=True)) | {"overlap": "overlap", "waiting": "waiting"}
    yield _table(ranks, {"rank": "rank", "step": "total", **times})
    yield "<p class='dim'>Compute, exposed communication, input and other add up to the step. Overlap is communication "
    yield "hidden by computation. Waiting is exposed communication before the last rank arrives.</p>"
    by_step = defaultdict[int, dict[str, Any]](dict)
    for row in report["steps"]:
        by_step[row["step"]] |= {"step": row["step"], f"rank {row['rank']}": format_time(row["input"])}
    yield "<h2>Time waiting for data</h2>"
    yield _table(
        [*by_step.values()][:MAX_ROWS], {name: name for name in ("step", *(f"rank {row['rank']}" for row in ranks))}
    )
    if report["loading"]:
        yield "<p class='dim'>The threads that load pictures, also while the device computes:</p>"
        yield _table(report["loading"], {"part": "part", "rank": "rank", "calls": "calls", "time": "time"})
    if report["collectives"]:
        columns = {
            "collective": "name", "rank": "rank", "type": "type", "bytes of a call": "call_bytes", "calls": "calls",
            "bytes": "bytes", "time": "time",
        }  # fmt: skip
        yield "<h2>Collectives</h2>" + _table(report["collectives"], columns)
    if report["gpus"]:
        columns = {
            "rank": "rank", "utilization": "utilization", "est. SM efficiency": "sm_efficiency",
            "est. occupancy": "occupancy", "Tensor Cores": "tensor_cores", "mean kernel": "mean_kernel",
        }  # fmt: skip
        yield "<h2>GPUs</h2>" + _table(report["gpus"], columns)


def _timeline(report: Mapping[str, Any], traces: Sequence[Trace]) -> Iterator[str]:
    yield "<h2>Timeline</h2><p><button id='in'>+</button> <button id='out'>−</button> <button id='all'>all</button> "
    yield f"<span id='range' class='dim'></span></p>{_legend(KINDS)}"
    yield "<p class='dim'>Wheel or pinch to zoom, drag to move. Bars show the share of each bucket in which the device "
    yield "works; on a GPU, green bars show the estimated SM efficiency.</p>"
    yield "<output id='event'>Tap an event to see its name and time.</output><canvas id='timeline'></canvas>"
    yield _script("timelines", to_json({"kinds": list(KINDS.values()), "ranks": report["timelines"]}))
    embedded = 0
    for trace in traces:
        data = trace.path.read_bytes()
        data = data if data[:2] == b"\x1f\x8b" else gzip.compress(data)
        embedded += len(data)
        if embedded <= MAX_EMBEDDED:
            yield f"<button data-trace='trace{trace.rank}'>Open rank {trace.rank} in Perfetto</button> "
            yield f"<script type='text/plain' id='trace{trace.rank}'>{base64.b64encode(data).decode()}</script>"


def _memory(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Memory</h2><div class='charts'>" if report["memory"] else ""
    for row in report["memory"]:
        title = f"rank {row['rank']}, {row['device']}: peak {format_size(row['peak'])}, in {row['peak_phase']}"
        start, size = row["curve"][0][0], -(-len(row["curve"]) // MAX_POINTS)
        parts = (row["curve"][i : i + size] for i in range(0, len(row["curve"]), size))
        points = [((part[0][0] - start) / 1e6, max(total for _, total in part) / 1e6) for part in parts]
        yield chart(f"{title} (MB)", {"memory": points}, "ms")
    yield "</div>" if report["memory"] else ""
    for i, row in enumerate(report["memory"]):
        title = f"Who holds the peak of rank {row['rank']}, {row['device']}"
        before = {"operator": "allocated before the recording", "bytes": row["before"]}
        columns = {
            "operator": "operator", "part": "phase", "bytes": "bytes", "module": "module", "source": "source"
        }  # fmt: skip
        table = _table([*row["holders"][:MAX_ROWS], before], columns)
        yield f"<details{' open' * (i == 0)}><summary>{title}</summary>{table}</details>"


def _operators(report: Mapping[str, Any]) -> Iterator[str]:
    columns = {"operator": "name", "calls": "calls", "self": "self", "total": "total"}
    columns |= ({"GPU self": "gpu_self", "GPU total": "gpu_total"} if report["gpus"] else {}) | {"source": "source"}
    yield "<h2>Operators, kernels, and memory by operator</h2>"
    for i, rank in enumerate(row["rank"] for row in report["ranks"]):
        rows = [row for row in report["operators"] if row["rank"] == rank]
        yield f"<details{' open' * (i == 0)}><summary>rank {rank}</summary>{_table(rows[:MAX_ROWS], columns)}"
        if kernels := [row for row in report["kernels"] if row["rank"] == rank]:
            yield _table(kernels[:MAX_ROWS], {
                "kernel": "name", "calls": "calls", "time": "time", "mean blocks per SM": "blocks_per_sm",
                "mean est. occupancy": "occupancy", "Tensor Cores": "uses_tensor_cores",
            })  # fmt: skip
        by_memory = sorted((row for row in rows if row["allocated"]), key=lambda row: -row["self_allocated"])
        yield _table(by_memory[:MAX_ROWS], {
            "operator": "name", "allocations": "allocations", "self": "self_allocated", "total": "allocated",
            "self, less releases": "self_net",
        }) + "</details>"  # fmt: skip


def _legend(colors: Mapping[str, str]) -> str:
    entries = (f'<i style="background: {color}"></i>{name}' for name, color in colors.items())
    return f"<p class='legend'>{''.join(entries)}</p>"


def _table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return a table with the value of a key of each row in each column; its `_FORMATS` escapes text."""
    head = "".join(f"<th>{escape(title)}</th>" for title in columns)
    lines = (
        "".join(f"<td>{_FORMATS.get(key, _plain)(row.get(key, ''))}</td>" for key in columns.values()) for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _share(value: float) -> str:
    return f"{value:.1%}"


@cache
def _link(source: str) -> str:
    """Return a link that opens "file:line" in an editor, and the line; the text alone if no folder of `sys.path` has
    the file."""
    name, _, line = source.rpartition(":")
    found = ((Path(folder).resolve(), Path(folder, name).resolve()) for folder in sys.path if name)
    file = next((path for folder, path in found if path.is_relative_to(folder) and path.is_file()), None)
    if file is None:
        return escape(source)
    link = f'<a href="vscode://file{quote(file.as_posix())}:{int(line)}">{escape(source)}</a>'
    return link + _code(getline(str(file), int(line)).strip()[:MAX_CODE])


def _script(identifier: str, json: str) -> str:
    """Return JSON as an element that no text in it can close."""
    text = json.replace("<", "\\u003c")
    return f"<script type='application/json' id='{identifier}'>{text}</script>"


_TIMES = (*PARTS, "total", "overlap", "waiting", "self", "gpu_self", "gpu_total", "time", "mean_kernel")
_SIZES = ("bytes", "call_bytes", "self_allocated", "allocated", "self_net")
_FORMATS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(_TIMES, format_time),
    **dict.fromkeys(_SIZES, format_size),
    **dict.fromkeys(("utilization", "sm_efficiency", "tensor_cores"), _share),
    "occupancy": "{:.1f}%".format,
    "blocks_per_sm": "{:.2f}".format,
    "source": _link,
    "module": _code,
}
