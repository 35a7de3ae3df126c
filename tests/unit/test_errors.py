"""What a message says after a name that is not there."""

from limner.errors import suggestion


def test_the_name_that_was_meant_or_all_of_them():
    assert suggestion("tarin", ["train", "draw"]) == "did you mean 'train'?"
    assert suggestion("xyzzy", ["train", "draw"]) == "there are train, draw"
    assert suggestion("xyzzy", []) == "there are none"


def test_of_many_names_some_are_listed():
    assert suggestion("x", dict.fromkeys(range(30))) == f"there are {', '.join(map(str, range(30)))}"
    assert suggestion("x", range(5_000)) == f"there are {', '.join(map(str, range(30)))}, ..."
