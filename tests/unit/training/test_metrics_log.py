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


def test_values_within_mappings_and_lists_are_valid_json_too(tmp_path: Path) -> None:
    log = MetricsLog(path := tmp_path / "stability.jsonl")
    log.write({"step": 1, "rms": {"a": math.inf, "b": 1.5, "c": math.nan}, "parts": [{"x": -math.inf}]})
    log.close()
    assert read_metrics(path) == [{"step": 1, "rms": {"a": None, "b": 1.5, "c": None}, "parts": [{"x": None}]}]
    MetricsLog(path, step=1).close()  # resuming writes it again
    assert json.loads(path.read_text()) == read_metrics(path)[0]


def test_a_run_resumes_from_a_file_with_lines_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = ('"x"', "null", "[1]", '{"a": 1}', "1.5", "1e999", "true", "9" * 400)
    others = ["", "null", "[]", "3", '{"loss": 1}', "[" * 100_000, '{"step": ' * 100_000, "9" * 5_000]
    lines = ['{"step": 1}', *others, *(f'{{"step": {step}}}' for step in steps), '{"step": 2, "loss": 1e999}']
    path.write_text("\n".join(lines))
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    log = MetricsLog(path, step=2)
    log.write({"step": 3})
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2, "loss": null}\n{"step": 3}\n'
