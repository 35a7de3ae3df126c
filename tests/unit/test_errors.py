"""Suggestions in messages about unknown names."""

from limner.errors import did_you_mean


def test_the_name_that_was_meant_or_all_of_them():
    assert did_you_mean("tarin", ["train", "draw"]) == "did you mean 'train'?"
    assert did_you_mean("xyzzy", ["train", "draw"]) == "choose train, draw"
    assert did_you_mean("xyzzy", []) == "no choice exists"


def test_some_of_many_names_are_listed():
    assert did_you_mean("x", dict.fromkeys(range(30))) == f"choose {', '.join(map(str, range(30)))}"
    assert did_you_mean("x", range(5_000)) == f"choose {', '.join(map(str, range(30)))}, ..."
