"""The report of a run's loss spikes and the RMS spikes that precede them, from the log of a run."""

import json

import numpy as np
import pytest

from limner.cli import main
from limner.errors import UserError
from limner.evaluation.loss_spikes import spike_report


def written(folder, steps=3_000):
    """Loss spikes at 1,005 and 2,005; RMS spikes of the first matrix five steps before, of the second at random."""
    rng = np.random.default_rng(0)
    loss = 2 + 0.05 * rng.standard_normal(steps)
    first, second = np.ones(steps), np.ones(steps)
    for step in (1_000, 2_000):
        first[step - 1] = 5
        loss[step + 4 : step + 8] += 1
    second[[499, 1_499]] = 4
    folder.mkdir()
    rows = [
        {"step": i + 1, "loss": loss[i], "rms": {"patches": first[i], "<b>middle": second[i]} if i else {}}
        for i in range(steps)
    ]
    rows[600]["loss"] = None
    for row in rows[9::10]:
        row["features"] = {"blocks.0": 0.5, "blocks.1": row["step"] / 100}
    (folder / "stability.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 30')
    return spike_report(folder)


def test_the_matrix_that_precedes_loss_spikes_is_listed_first_and_charted(tmp_path):
    report = written(tmp_path / "prior")
    rows = report.rows()
    assert rows[0][:4] == ("patches", "2", "2", "2") and float(rows[0][4]) < 1e-3
    assert rows[1][:5] == ("<b>middle", "2", "2", "0", "1")
    page = report.save(tmp_path / "spikes.html", "prior").read_text()
    assert "spike at step 1005" in page and "spike at step 2005" in page
    assert report.features["blocks.1"][:2] == [(10, 0.1), (20, 0.2)] and "mean magnitude of features" in page
    assert "<b>middle" not in page and "&lt;b&gt;middle" in page


def test_a_folder_without_a_log_raises(tmp_path):
    with pytest.raises(UserError, match="name a run"):
        spike_report(tmp_path)


def test_loss_spikes_are_reported_without_logged_rms(tmp_path, capsys):
    """RMS_t is undefined for Lion, for example."""
    loss = 2 + 0.05 * np.random.default_rng(0).standard_normal(1_000)
    loss[599:603] += 1
    rows = [{"step": i, "loss": value, "rms": {}} for i, value in enumerate(loss, 1)]
    (tmp_path / "stability.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["inspect", "spikes", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1 spike of the loss, at steps 600" in out and "RMS_t was not logged" in out


def test_all_stages_of_a_run_are_reported_and_a_page_needs_one_stage(tmp_path, capsys):
    for name in ("prior", "contrastive"):
        written(tmp_path / name)
    capsys.readouterr()
    assert main(["inspect", "spikes", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.index("prior: ") < out.index("contrastive model: ") and out.count("<b>middle") == 2
    page = tmp_path / "spikes.html"
    assert main(["inspect", "spikes", str(tmp_path), "-o", str(page)]) == 2
    assert "name one for a page, such as" in capsys.readouterr().err and not page.exists()
    assert main(["inspect", "spikes", str(tmp_path / "prior"), "-o", str(page)]) == 0 and page.exists()


def test_lines_of_any_kind_are_left_out_and_null_is_infinite(tmp_path, capsys):
    good = [{"step": i, "loss": 1 / i, "rms": {"a": 1.0}} for i in range(1, 31)]
    good[19] = {"step": 20, "loss": None, "rms": {"a": None, "b": "x"}, "features": {"c": [], "d": 1}}
    wrong = ["[" * 100_000, '{"step": ' * 100_000, "null", "3", '{"rms": {}}', '{"step": "x", "rms": {}}']
    wrong += [f'{{"step": {step}, "rms": {{}}}}' for step in (0, -5, 1e15, 10**15, 10**400, "[]", "true")]
    wrong += ['{"step": 31, "rms": []}', '{"step": 31, "rms": null}']
    lines = wrong + [json.dumps(row) for row in good] + wrong
    (tmp_path / "stability.jsonl").write_text("\n".join(lines))
    report = spike_report(tmp_path)
    assert len(report.loss) == 30 and np.isinf(report.loss[19]) and np.isfinite(np.delete(report.loss, 19)).all()
    assert report.rms["a"][18:21].tolist() == [1, np.inf, 1] and report.rms["b"][18:21].tolist() == [1, np.inf, 1]
    assert report.features == {"c": [(20, np.inf)], "d": [(20, 1.0)]}
    assert main(["inspect", "spikes", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert "30 steps" in capsys.readouterr().out
    (tmp_path / "stability.jsonl").write_text("\n".join(wrong))
    assert main(["inspect", "spikes", str(tmp_path)]) == 2
    assert "no steps in" in capsys.readouterr().err
