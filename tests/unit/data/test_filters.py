"""The filters of appendix C, on captions as they occur."""

import random
import re
import time

import pytest

from limner.data import filters as module
from limner.data.filters import Filters, aspect_ratio, boilerplate, not_english, too_short
from limner.data.sample import MAX_CAPTION, Rejected
from no_filters import NO_FILTERS

BOILERPLATE = """
Photographed on 2010-05-12
photographed on May 12th, 2010
Photographed on 12 May 2010
Photographed on 5/12/10
taken on 12.05.2010
Taken on May 12, 2010 at 3:45 PM
Captured 2010:05:12 14:30:00
Uploaded on 1st of June, 2009
shot on Friday, 3 August 2007
Photo taken on 2007-08-03T14:22:10Z
This photo was taken on October 3rd 2009
Image uploaded on Sep 3, 2011
Picture from June 2008
on 12-May-2010
Created on July 4, '09
Date: 2009/10/03
10 Dec 2005 12:41 pm
2010-05-12 14.30.15
20100512_143000
June 2008
12 May
Photographed in 2006
IMG_1234.jpg
IMG_1234
IMG-20160703-WA0001
DSC0001
DSC_0001.JPG
DSCN1234
DSCF3049 (2)
P1010023
PICT0032.JPG
Screenshot 2016-01-02 10.33.12
Photo 12 of 45
image 3
Untitled
""".strip().splitlines()

REAL = """
a red circle above a blue square
A dog taken for a walk in May
The march on Washington
Sunset over the Golden Gate Bridge, photographed on 12 May 2010
1957 Chevrolet Bel Air
Taj Mahal, Agra, India
Eiffel Tower 1889
woman firefighter medium skin tone
A photo of 3 cats
Battle of Hastings 1066
shot of whisky on the rocks
Christmas market Vienna, December 2011
Boeing 747-400 at Heathrow
Chair, Charles Eames, 1956
A man captured on a camera trap
Brooklyn Bridge at night 2008
May Day parade
image of a horse
Formula 1 car
Route 66
picture frame
P-51 Mustang
two cats
""".strip().splitlines()


@pytest.mark.parametrize("caption", BOILERPLATE)
def test_boilerplate_goes(caption):
    assert boilerplate(caption) == "caption is boilerplate"
    assert boilerplate(caption.upper()) and boilerplate(f"  {caption}.")


@pytest.mark.parametrize("caption", REAL)
def test_real_captions_stay(caption):
    assert Filters().caption(caption) is None


@pytest.mark.parametrize(
    "caption",
    [
        "ein roter Kreis über einem blauen Quadrat auf grauem Grund",
        "un chat noir dort sur le canapé du salon",
        "猫がソファの上で眠っている",
        "две собаки играют на пляже летом",
    ],
)
def test_other_languages_go(caption):
    assert not_english(caption) == "caption not English"


def test_low_confidence_is_kept():
    assert not_english("Taj Mahal") is None
    assert not_english("ein roter Kreis über einem blauen Quadrat", confidence=1.1) is None


def test_too_short():
    assert too_short("dog") == too_short("") == too_short("...") == "caption too short"
    assert too_short("a dog") is None
    assert too_short("猫が眠っている") is None  # no spaces, but several words
    assert too_short("dog", 1) is None


@pytest.mark.parametrize(("h", "w", "kept"), [(100, 200, 1), (200, 100, 1), (100, 201, 0), (999, 1, 0)])
def test_aspect_ratio(h, w, kept):
    assert (aspect_ratio(h, w) is None) == bool(kept)


def test_filters_compose():
    filters = Filters()
    assert filters.captions(["dog", "a dog on a beach"]) == ("a dog on a beach",)
    with pytest.raises(Rejected, match="caption too short"):
        filters.captions(["dog", "IMG_1.jpg"])
    with pytest.raises(Rejected, match="aspect ratio"):
        filters.image(100, 300)
    NO_FILTERS.image(1, 300)
    assert NO_FILTERS.captions(["dog"]) == ("dog",)


PIECES = [
    "1-", "1", "a1", "- ", "_", ".jpg", ".png", "foo", "é", "\u0661", "IMG", "img_1_2", "p1 ", "(1) ", "photo ",
    "photo of ", "photo of - ", "12 ", "12 may", "may ", "may, ", ", ", "2010", "2010-05-12", "2010:05:12t", "12:30",
    "12:30:10.1", "12th ", "sun ", "created with a ", "uploaded by ", "date ", "date taken ", "1 of ", "1/", "at ",
    "@ ", "this ", "was ", "this photo was ", " ",
]  # fmt: skip


def test_the_bounded_expression_finds_what_the_plain_one_finds():
    plain = module.BOILERPLATE_PHRASES.pattern.replace(
        rf"\b(?=[\w-]{{1,128}}+{module.FILE_EXTENSION})(?=[\w-]*\d)[\w-]++{module.FILE_EXTENSION}",
        rf"\b[\w-]*\d[\w-]*{module.FILE_EXTENSION}",
    )
    assert plain != module.BOILERPLATE_PHRASES.pattern
    plain, rng = re.compile(plain, re.IGNORECASE), random.Random(0)
    for _ in range(5_000):
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 9)))
        assert module.BOILERPLATE_PHRASES.sub("|", text) == plain.sub("|", text), text


def test_no_caption_takes_long():
    """Pieces of the expression, repeated up to the longest caption, with an end that fails or fits."""
    not_english("the model is read once")
    rng, cases = random.Random(1), ["1-", "_-", "a-", "photo of ----", "é", "的", "a b "]
    cases += ["".join(rng.choices(PIECES, k=rng.randrange(1, 4))) for _ in range(60)]
    for case in cases:
        for end in ("", ".", ".jpg"):
            text = (case * MAX_CAPTION)[: MAX_CAPTION - len(end)] + end
            begun = time.process_time()
            Filters().caption(text)
            assert time.process_time() - begun < 0.5, (case, end)


def test_the_help_calls_only_the_limits_of_the_aspect_ratio_the_papers():
    assert Filters.__doc__ and Filters.__doc__.count("paper") == 1
    assert "Only that of the aspect ratio is the paper's" in Filters.__doc__ and Filters().aspect_ratio == 2
