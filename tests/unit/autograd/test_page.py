"""Each line of docs/concepts/autograd.md runs, with the printed result."""

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/concepts/autograd.md"


def test_the_examples_print_what_the_page_shows():
    blocks = re.findall(r"^```pycon\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    assert runner.run(examples).failed == 0
    assert len(examples.examples) > 40
