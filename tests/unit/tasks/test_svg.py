"""SVG from strangers: drawn as it says, mirrored and turned, and nothing dangerous drawn at all."""

import time

import numpy as np
import pytest

from limner.data.sample import Rejected
from limner.tasks.svg import MAX_BODY, MAX_DEPTH, document, draw

BOX = (0.0, 0.0, 8.0, 8.0)
CORNER = '<path fill="#f00" d="M0 0h4v4H0z"/>'  # red in the upper left quarter


def quarters(picture: np.ndarray) -> list[list[str]]:
    """ "red", or "white", for each quarter of a picture."""
    half = len(picture) // 2
    found = [[picture[y + half // 2, x + half // 2] for x in (0, half)] for y in (0, half)]
    return [["red" if tuple(color) == (255, 0, 0) else "white" for color in row] for row in found]


@pytest.mark.parametrize(
    ("turns", "mirror", "at"),
    [(0, (1, 1), (0, 0)), (1, (1, 1), (0, 1)), (2, (1, 1), (1, 1)), (3, (1, 1), (1, 0)), (0, (-1, 1), (0, 1)),
     (0, (1, -1), (1, 0)), (1, (-1, 1), (1, 1))],
)  # fmt: skip
def test_turns_go_clockwise_after_mirroring(turns, mirror, at):
    found = quarters(draw(document(CORNER, BOX, turns, mirror), 16))
    assert [(y, x) for y in (0, 1) for x in (0, 1) if found[y][x] == "red"] == [at]


def test_a_box_that_is_no_square_is_centred_on_the_background():
    wide = draw(document('<path d="M-4 2h8v4h-8z" fill="#f00"/>', (-4.0, 2.0, 8.0, 4.0)), 16, "blue")
    assert wide.shape == (16, 16, 3)
    assert (wide[:3] == (0, 0, 255)).all() and (wide[5:11] == (255, 0, 0)).all() and (wide[13:] == (0, 0, 255)).all()
    turned = draw(document('<path d="M-4 2h8v4h-8z" fill="#f00"/>', (-4.0, 2.0, 8.0, 4.0), turns=1), 16)
    assert (turned[:, 5:11] == (255, 0, 0)).all() and (turned[:, :3] == 255).all()


def test_what_is_half_transparent_lies_over_the_background():
    picture = draw(document('<path d="M0 0h8v8H0z" fill="#000" fill-opacity=".5"/>', BOX), 8, "#ff0000")
    assert np.abs(picture.astype(int) - (127, 0, 0)).max() <= 2


def test_references_within_the_document_are_drawn():
    body = '<defs><path id="a" fill="#f00" d="M0 0h4v4H0z"/></defs><use href="#a"/><use xlink:href="#a" x="4" y="4"/>'
    assert quarters(draw(document(body, BOX), 16)) == [["red", "white"], ["white", "red"]]


def test_names_and_small_numbers_are_no_large_numbers():
    body = '<path id="a12345678" fill="#1e9e9e" d="M.12345678 1e-9h1234567v8z"/>'
    assert "1234567v8" in document(body, BOX)


def bomb(levels: int) -> str:
    """Ten `use` of ten `use` of ...: 10^levels elements."""
    parts = ['<path id="u0" d="M0 0h1v1z"/>']
    parts += [f'<g id="u{i}">' + f'<use href="#u{i - 1}"/>' * 10 + "</g>" for i in range(1, levels + 1)]
    return f'<defs>{"".join(parts)}</defs><use href="#u{levels}"/>'


MASKS = "".join(
    f'<mask id="m{i}">' + f'<path mask="url(#m{i - 1})" d="M0 0h8v8z"/>' * 10 + "</mask>" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("<path", "not XML"),
        ("</g></svg><svg>", "not XML"),
        ('<!DOCTYPE a [<!ENTITY b "c">]>', "declaration"),
        ("<?xml-stylesheet href='a'?>", "declaration"),
        ("<!-- a comment --><script>alert(1)</script>", "declaration"),
        ("<script>alert(1)</script>", "script"),
        ('<image href="file:///etc/passwd"/>', "image"),
        ("<foreignObject/>", "foreignObject"),
        ("<text>words</text>", "text"),
        ('<a:b xmlns:a="urn:c"/>', "another kind"),
        ('<use href="other.svg#a"/>', "outside"),
        ('<use xlink:href="http://example.org/a.svg#a"/>', "outside"),
        ('<path fill="url(http://example.org/a)" d="M0 0h8v8z"/>', "outside"),
        ("<path style=\"fill:url( 'file:///a' )\" d='M0 0h8v8z'/>", "outside"),
        ('<g id="a"><use href="#a"/></g>', "refers to itself"),
        ('<mask id="m"><path mask="url(#m)" d="M0 0h8v8z"/></mask><path mask="url(#m)" d="M0 0h8v8z"/>', "itself"),
        (bomb(9), "too large"),
        (MASKS + '<path mask="url(#m11)" d="M0 0h8v8z"/>', "too large"),
        ("<g>" * 200 + "</g>" * 200, "too deep"),
        ("<g>" * 90_000 + "</g>" * 90_000, "too deep"),
        (" " * (MAX_BODY + 1), "too long"),
        ('<path stroke="#000" stroke-width="1e30" d="M0 0h8v8H0z"/>', "number that is too large"),  # resvg panics
        ('<path d="M0 0h123456789v8H0z"/>', "number that is too large"),
    ],
)  # fmt: skip
def test_what_is_dangerous_is_refused_quickly_and_says_why(body, reason):
    begun = time.process_time()
    with pytest.raises(Rejected, match=reason):
        draw(document(body, BOX), 16)
    assert time.process_time() - begun < 5  # a bomb of 10^9 elements would take hours: not a measurement


def test_chains_of_references_are_as_deep_as_they_look():
    links = "".join(f'<g id="c{i}"><use href="#c{i + 1}"/></g>' for i in range(MAX_DEPTH))
    with pytest.raises(Rejected, match="too deep"):
        document(f'<defs>{links}<g id="c{MAX_DEPTH}"/></defs>', BOX)
