"""Pages of evaluations."""

from PIL import Image

from limner.evaluation.report import SheetRow
from limner.evaluation.result import EvalResult
from limner.evaluation.results_page import Section, save_results_page


def test_each_result_shows_at_most_48_drawings(tmp_path):
    sheet = [SheetRow(caption=f"caption {i}.", pictures=[(Image.new("RGB", (4, 4)), "drawn")]) for i in range(50)]
    results = [EvalResult(title=title, rows={}, cases=[], sheet=sheet) for title in ("first", "second")]
    page = save_results_page(tmp_path / "page.html", "scenes", [Section("pairs", "", results)], "limner").read_text()
    assert page.count("data:image/png") == 2 * 48
    assert "caption 47." in page and "caption 48." not in page
