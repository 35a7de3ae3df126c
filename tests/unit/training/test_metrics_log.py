import json
import math
from pathlib import Path

from limner.training.metrics_log import MetricsLog, read_metrics


def test_lines_are_there_at_once_and_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"step": 1, "loss": math.nan, "lr": 0.5})
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "lr": 0.5}
    log.close()


def test_resuming_keeps_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')  # killed while writing
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    log = MetricsLog(path, step=2)
    assert log.last == {"step": 2}
    log.write({"step": 3, "again": True})
    log.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
