"""Recording by training and by two processes, and the diagnosis of staged scenarios in real traces."""

import gzip
import os
import threading
import time
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn, profiler
from torch.utils.checkpoint import checkpoint

from chromium import CHROMIUM, open_page
from limner.cli import main
from limner.json_files import read_json
from limner.profiling.analysis import analyze
from limner.profiling.distributed_view import PARTS
from limner.profiling.page import save_report
from limner.profiling.recording import FOLDER, ProfileRecorder
from limner.profiling.trace import read_traces
from limner.runs.train import train_all
from limner.spans import span
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from profiles import cuda
from ranks import on_ranks
from tiny import tiny_recipe

RUNS = int(os.environ.get("LIMNER_PROFILE_RUNS", "0"))  # of each scenario, all counted; 0: until one is diagnosed
SHARE = 0.95  # of counted runs that are diagnosed


def staged(kind: str, folder: str) -> None:
    """Record steps of this rank's copy of a model, with the bottleneck `kind`."""
    rank = distributed.get_rank()
    torch.set_num_threads(1)
    small, deep = kind == "small-batch", kind in ("activations", "checkpointing")
    width, rows, depth = (16, 1, 40) if small else (256, 4096 if deep else 256, 4)
    blocks = (nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth))
    layers = nn.Sequential(*blocks)
    model = layers if kind == "uneven-stages" else nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if kind == "checkpointing":
            for block in layers:
                x = checkpoint(block, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
            return x
        return model(x)

    def step() -> None:
        with span("input"):
            x = torch.randn(rows, width)
            time.sleep(0.3 if kind == "input" else 0)
        if kind == "uneven-stages":
            pipeline_step(x)
            return
        with span("forward"):
            if kind == "straggler" and rank == 1:
                with torch.no_grad():
                    for _ in range(30):
                        layers(x)
            loss = forward(x).square().mean()
            if kind == "large-tensor":
                loss = loss + (x[:, None] * x[None]).mean()
        with span("backward"):
            loss.backward()
        with span("update"):
            optimizer.step()
            optimizer.zero_grad()

    def pipeline_step(x: torch.Tensor) -> None:
        """Rank 0 has the first block, rank 1 the others."""
        if rank == 0:
            hidden = layers[0](x)
            distributed.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            distributed.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty_like(x)
            distributed.recv(hidden, 0)
            hidden.requires_grad_()
            for _ in range(4):
                loss = layers[1:](hidden).square().mean()
                loss.backward()
            distributed.send(hidden.grad, 0)

    schedule = profiler.schedule(wait=1, warmup=1, active=9 if small else 3, repeat=1)

    def write(profile: profiler.profile) -> None:
        profile.export_chrome_trace(f"{folder}/rank{rank}.json.gz")

    with profiler.profile(schedule=schedule, on_trace_ready=write, profile_memory=True, record_shapes=True) as profile:
        for _ in range(11 if small else 5):
            step()
            profile.step()
    distributed.barrier()


def diagnose(kind: str, folder: Path) -> tuple[bool, dict[str, Any]]:
    """Record a scenario on two processes. Return True if its report names the bottleneck, and the report."""
    folder.mkdir()
    on_ranks(2, staged, kind, str(folder))
    report = analyze(read_traces([folder]))
    for row in report["steps"]:
        assert row["total"] == sum(row[part] for part in PARTS)
    for memory in report["memory"]:
        assert memory["peak"] == memory["before"] + memory["live"]
    texts = {advice["kind"]: advice["text"] for advice in report["recommendations"]}
    if kind == "checkpointing":
        return "activations" not in texts, report
    culprit = "ank 1 computes" if kind in ("straggler", "uneven-stages") else ""
    return kind in texts and culprit in texts[kind].replace("pipeline stage of r", "R"), report


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["straggler", "small-batch", "input", "uneven-stages", "large-tensor", "activations", "checkpointing"]
)
def test_a_staged_bottleneck_is_named(tmp_path, kind):
    right, report = 0, {}
    for run in range(RUNS or 2):  # other processes of a busy machine stretch short operators
        named, report = diagnose(kind, tmp_path / str(run))
        right += named
        if RUNS:
            kinds = ", ".join(advice["kind"] for advice in report["recommendations"])
            print(f"\n{kind}: {right} of {run + 1} runs diagnosed, the last one with: {kinds or 'nothing'}")
        elif named:
            break
    shown = (report["ranks"], report["operator_time"], report["recommendations"])
    assert right >= max(1, SHARE * RUNS), shown


def test_training_records_and_the_command_reports(tmp_path, capsys):
    write_scenes(tmp_path / "data", SceneDataSettings(count=200, size=24, held_out=0.2))
    tiny = tiny_recipe()
    recipe = replace(tiny, prior=replace(tiny.prior, training=replace(tiny.prior.training, steps=5)))
    train_all(
        recipe, tmp_path / "data", tmp_path / "run", ("dvae", "prior"),
        stage_hooks=lambda folder: [ProfileRecorder(folder / FOLDER, 1, 3)],
    )  # fmt: skip
    for stage in ("dvae", "prior"):
        assert main(["profile", str(tmp_path / "run" / stage / FOLDER), "-o", str(tmp_path / "report.json")]) == 0
        out = capsys.readouterr().out
        assert out.startswith("rank  ") and "written: " in out
        tables = read_json(tmp_path / "report.json")
        assert [row["step"] for row in tables["steps"]] == [2, 3]
        assert any(row["name"].startswith("aten::") and row["self"] > 0 for row in tables["operators"])
        loading = {row["part"]: row["time"] for row in tables["loading"] if row["calls"] > 0}
        assert set(loading) == ({"read", "decode", "augment"} if stage == "dvae" else set())
    assert (
        main(["profile", str(tmp_path / "run/prior/profile/rank0.json.gz"), "-o", str(tmp_path / "report.html")]) == 0
    )
    page = (tmp_path / "report.html").read_text()
    assert "limner:forward" in page and "Open rank 0 in Perfetto" in page


HAND_OVER = """(async () => {
  const posted = [], pong = {data: "PONG", origin: "https://ui.perfetto.dev"};
  window.open = () => ({postMessage: (message, origin) => posted.push([message, origin])});
  document.querySelector("button[data-trace]").click();
  while (!posted.length) await new Promise((done) => setTimeout(done, 20));
  for (const origin of ["https://example.org", pong.origin])
    window.dispatchEvent(new MessageEvent("message", {...pong, origin}));
  const sent = posted.filter(([message]) => message.perfetto);
  return [sent.length, sent[0][1], [...new Uint8Array(sent[0][0].perfetto.buffer)]];
})()"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_served_page_hands_the_trace_to_perfetto_alone(tmp_path):
    path = cuda().save(tmp_path)
    traces = read_traces([path])
    save_report(tmp_path / "report.html", analyze(traces), traces)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with open_page(f"http://127.0.0.1:{server.server_port}/report.html", tmp_path / "user") as tab:
                count, origin, sent = tab.evaluate(HAND_OVER)
        finally:
            server.shutdown()
    assert (count, origin) == (1, "https://ui.perfetto.dev")
    assert gzip.decompress(bytes(sent)) == path.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_draws_in_a_browser_and_fits_a_phone(tmp_path, width):
    path = cuda().save(tmp_path)
    traces = read_traces([path])
    page = save_report(tmp_path / "report.html", analyze(traces), traces)
    with open_page(page, tmp_path / "user") as tab:
        tab("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.getElementById('timeline').height") > 50
        whole = tab.evaluate("document.getElementById('range').textContent")
        tab.evaluate("document.getElementById('in').click()")
        tab.wait(f"document.getElementById('range').textContent !== {whole!r}")
        assert not [
            event for event in tab.events if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
        ]
