"""The report of a run's spikes: which matrix foretells them, from the file that a run writes."""

import json

import numpy as np
import pytest

from limner.cli import main
from limner.errors import UserError
from limner.evaluation.loss_spikes import foretold


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
    return foretold(folder)


def test_the_matrix_that_foretells_is_named_first_and_drawn(tmp_path):
    found = written(tmp_path / "prior")
    rows = found.rows()
    assert rows[0][:4] == ("patches", "2", "2", "2") and float(rows[0][4]) < 1e-3
    assert rows[1][:5] == ("<b>middle", "2", "2", "0", "1")
    page = found.save(tmp_path / "spikes.html", "prior").read_text()
    assert "spike at step 1005" in page and "spike at step 2005" in page
    assert found.features["blocks.1"][:2] == [(10, 0.1), (20, 0.2)] and "mean magnitude of features" in page
    assert "<b>middle" not in page and "&lt;b&gt;middle" in page


def test_what_is_no_run_is_said_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="name a run"):
        foretold(tmp_path)


def test_spikes_are_told_where_no_rms_was_logged(tmp_path, capsys):
    """As with Lion, which divides by no running mean."""
    loss = 2 + 0.05 * np.random.default_rng(0).standard_normal(1_000)
    loss[599:603] += 1
    rows = [{"step": i, "loss": value, "rms": {}} for i, value in enumerate(loss, 1)]
    (tmp_path / "stability.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["inspect", "spikes", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "1 spike of the loss, at steps 600" in said and "no RMS_t was logged" in said


def test_of_a_run_every_stage_is_told_and_a_page_is_of_one(tmp_path, capsys):
    for name in ("prior", "contrastive"):
        written(tmp_path / name)
    capsys.readouterr()
    assert main(["inspect", "spikes", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.index("prior: ") < said.index("contrastive model: ") and said.count("<b>middle") == 2
    page = tmp_path / "spikes.html"
    assert main(["inspect", "spikes", str(tmp_path), "-o", str(page)]) == 2
    assert "name one, such as" in capsys.readouterr().err and not page.exists()
    assert main(["inspect", "spikes", str(tmp_path / "prior"), "-o", str(page)]) == 0 and page.exists()


def test_lines_of_any_kind_are_left_out_and_null_is_infinite(tmp_path, capsys):
    good = [{"step": i, "loss": 1 / i, "rms": {"a": 1.0}} for i in range(1, 31)]
    good[19] = {"step": 20, "loss": None, "rms": {"a": None, "b": "x"}, "features": {"c": [], "d": 1}}
    wrong = ["[" * 100_000, '{"step": ' * 100_000, "null", "3", '{"rms": {}}', '{"step": "x", "rms": {}}']
    wrong += [f'{{"step": {step}, "rms": {{}}}}' for step in (0, -5, 1e15, 10**15, 10**400, "[]", "true")]
    wrong += ['{"step": 31, "rms": []}', '{"step": 31, "rms": null}']
    lines = wrong + [json.dumps(row) for row in good] + wrong
    (tmp_path / "stability.jsonl").write_text("\n".join(lines))
    found = foretold(tmp_path)
    assert len(found.loss) == 30 and np.isinf(found.loss[19]) and np.isfinite(np.delete(found.loss, 19)).all()
    assert found.rms["a"][18:21].tolist() == [1, np.inf, 1] and found.rms["b"][18:21].tolist() == [1, np.inf, 1]
    assert found.features == {"c": [(20, np.inf)], "d": [(20, 1.0)]}
    assert main(["inspect", "spikes", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert "30 steps" in capsys.readouterr().out
    (tmp_path / "stability.jsonl").write_text("\n".join(wrong))
    assert main(["inspect", "spikes", str(tmp_path)]) == 2
    assert "has no steps" in capsys.readouterr().err
