"""Tracer of icons: a gray picture becomes an SVG document of lines and cubic curves.

An icon has a foreground, which may cover a pixel in part, and perhaps areas of one lighter gray (duotone). Each is a
field of coverage, whose contour at one half is the outline. The gray of a pixel at an edge says where in the pixel
the edge is, so outlines are far finer than pixels: the picture is enlarged smoothly, and corrected until the share of
each pixel inside the outline is its coverage (iterative back-projection, Irani and Peleg 1991). Outlines are split at
corners, smoothed, and fitted by the longest lines and cubic curves within a tolerance (Schneider, "An algorithm for
automatically fitting digitized curves", 1990). contourpy finds the contours.

Tracers of black and white pictures, such as vtracer, start from the steps of an enlarged mask, and write four times
as many bytes for the same icons. The license of potrace and its ports is not compatible with limner's.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from xml.sax.saxutils import escape

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image

from limner.errors import UserError, escape_control

__all__ = ["to_svg"]

BOX = 24  # units of the longer side of the view box, as in most icon sets
_UNITS = 100  # steps of a coordinate in one unit of the view box

# Lengths are in pixels of the picture.
_ENLARGEMENT = 4
_CORRECTIONS = 2
_STEP = 0.25  # between points of an outline
_MIN_AREA = 0.75  # square pixels inside an outline
_CORNER_REACH, _CORNER_ANGLE = 1.0, np.radians(50)  # how far before and after a point, and the turn that is a corner
_SMOOTHING = 0.45  # standard deviation along the outline
_TANGENT_REACH = 1.25
_LINE_TOLERANCE, _CURVE_TOLERANCE = 0.06, 0.1

# Shares of the range from foreground to background.
_FLAT = 0.12  # range of 2 x 2 pixels in an area
_MIN_SECOND, _MAX_SECOND = 0.25, 0.88  # the second gray; nearer to an end is a blurred line, or the edge of one
_MIN_GRAY_SHARE = 0.005  # of the picture, in areas of the second gray
_MAX_CHROMA = 48  # largest difference of two channels in a gray picture


def to_svg(picture: np.ndarray, title: str = "", metadata: str = "") -> str:
    """Trace a gray picture, uint8 [H, W, 3]. Return an SVG document whose longer side is 24 units. H, W >= 2.

    The foreground is a path in `currentColor`: the color of the text around the icon, black by default. A second gray
    is a path of the same color and less opacity. The background is transparent; a blank picture gives an empty
    document. `metadata` is XML for the element of this name. Raises `UserError` for a picture with colors, and without
    contourpy.
    """
    if np.mean(np.ptp(picture, axis=-1) > _MAX_CHROMA) > 0.01:
        raise UserError("the picture has colors, and SVG files are traced from gray icons: use its PNG file")
    height, width = picture.shape[:2]
    scale = BOX / max(height, width)
    paths = ""
    for opacity, coverage in _layers(picture.mean(-1) / 255):
        shown = f' opacity="{_number(round(opacity * _UNITS))}"' if opacity < 1 else ""
        if data := "".join(_path_data(outline, scale) for outline in _outlines(coverage)):
            paths += f'<path{shown} d="{data}"/>'
    box = " ".join(_number(round(side * scale * _UNITS)) for side in (width, height))
    head = f"<title>{escape(escape_control(title))}</title>" if title else ""
    head += f"<metadata>{metadata}</metadata>" if metadata else ""
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box}" fill="currentColor">{head}{paths}</svg>\n'


def _layers(gray: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """Return opacity and coverage [H, W] of the second gray, if the picture [H, W] has one, and of the foreground."""
    ends = np.sort(gray, axis=None)
    rank = min(8, (gray.size - 1) // 2)  # a few pixels of noise may be darker or lighter
    darkest, lightest = min(ends[rank], 0.5), max(ends[-1 - rank], 0.5 + 1e-6)
    gray = np.clip((gray - darkest) / (lightest - darkest), 0, 1)
    # A block of 2 x 2 equal pixels is in an area of gray if most pixels around it are as dark or darker, and most are
    # as light or lighter. In a thin line of the foreground, or in a gap, they are not.
    blocks = sliding_window_view(gray, (2, 2))
    levels, around = blocks.mean((2, 3)), sliding_window_view(np.pad(gray, 1, "edge"), (4, 4)).mean((2, 3))
    area = (np.ptp(blocks, axis=(2, 3)) < _FLAT) & (1 - around > 0.7 * (1 - levels)) & (around > 0.7 * levels)
    area &= (levels > _MIN_SECOND) & (levels < _MAX_SECOND)
    level = float(np.median(levels[area])) if area.any() else 1.0
    area &= abs(levels - level) < _FLAT
    if area.sum() < _MIN_GRAY_SHARE * gray.size:
        return [(1, 1 - gray)]
    near = sliding_window_view(np.pad(area, 3), (6, 6)).any((2, 3))  # at most 2 pixels away: with those of the edge
    # Under the edge of the foreground the second gray has full coverage, so no gap shows between the two.
    second = np.clip((1 - gray) / (1 - level), 0, 1) * near
    return [(1 - level, second), (1, np.clip(1 - gray / np.where(near, level, 1), 0, 1))]


def _outlines(coverage: np.ndarray) -> list[np.ndarray]:
    """Return the contours of a coverage [H, W] as closed polygons, complex x + iy [points]. Raises `UserError`."""
    try:
        from contourpy import contour_generator
    except ImportError:
        raise UserError('SVG files need the contourpy package: pip install "limner[svg]"') from None
    (height, width), k = coverage.shape, _ENLARGEMENT
    target, size = coverage, (width * k, height * k)
    for correction in range(_CORRECTIONS + 1):
        field = np.asarray(Image.fromarray(np.float32(target)).resize(size, Image.Resampling.BICUBIC))
        if correction < _CORRECTIONS:
            inside = np.clip((field - 0.5) * 0.75 * k + 0.5, 0, 1)
            target = target + coverage - inside.reshape(height, k, width, k).mean((1, 3))
    x, y = (np.clip((np.arange(-1, side * k + 1) + 0.5) / k, 0, side) for side in (width, height))
    outlines = []
    for line in contour_generator(x, y, np.pad(field, 1)).lines(0.5):
        points = np.asarray(line) @ (1, 1j)
        if abs((points[:-1].conj() * points[1:]).imag.sum()) / 2 >= _MIN_AREA:
            length = np.append(0, np.cumsum(abs(np.diff(points))))
            outlines.append(np.interp(np.arange(0, length[-1] - _STEP / 2, _STEP), length, points))
    return outlines


def _path_data(outline: np.ndarray, scale: float) -> str:
    """Return SVG path data of a closed polygon [points], with relative coordinates."""
    reach = min(round(_CORNER_REACH / _STEP), len(outline) // 4)
    turn = abs(np.angle((np.roll(outline, -reach) - outline) / (outline - np.roll(outline, reach))))
    largest = np.max([np.roll(turn, shift) for shift in range(-reach, reach + 1)], axis=0)
    corners = np.flatnonzero((turn == largest) & (turn > _CORNER_ANGLE))
    segments = []
    if len(corners):
        outline = np.roll(outline, -corners[0])
        ends = [*(corners - corners[0]), len(outline)]
        closed = np.append(outline, outline[0])
        for start, end in pairwise(ends):
            # Reflecting the points at both ends keeps the corners.
            points = _smoothed(np.pad(closed[start : end + 1], _SMOOTHING_POINTS, "reflect", reflect_type="odd"))
            segments += _fit(points, _direction(points, 0), _direction(points, len(points) - 1))
    else:
        points = _smoothed(np.pad(outline, _SMOOTHING_POINTS, "wrap"))
        tangent = _direction(np.roll(points, len(points) // 2), len(points) // 2)
        segments = _fit(np.append(points, points[0]), tangent, tangent)
    grid = [np.rint(np.stack([np.real(s), np.imag(s)], -1) * scale * _UNITS).astype(int) for s in segments]
    data = "M" + _numbers(grid[0][0])
    for points in grid:
        data += ("l" if len(points) == 2 else "c") + _numbers((points[1:] - points[0]).ravel())
    return data + "z"


_SMOOTHING_POINTS = round(3 * _SMOOTHING / _STEP)
_KERNEL = np.exp(-0.5 * (np.arange(-_SMOOTHING_POINTS, _SMOOTHING_POINTS + 1) * _STEP / _SMOOTHING) ** 2)


def _smoothed(points: np.ndarray) -> np.ndarray:
    return np.convolve(points, _KERNEL / _KERNEL.sum(), "valid")


def _direction(points: np.ndarray, at: int) -> complex:
    """Return the unit tangent at a point: over as far on both sides, or on one side at an end."""
    reach, last = round(_TANGENT_REACH / _STEP), len(points) - 1
    side = min(reach, at, last - at)
    chord = (
        points[at + side] - points[at - side] if side else points[min(at + reach, last)] - points[max(at - reach, 0)]
    )
    return chord / max(abs(chord), 1e-9)


def _fit(points: np.ndarray, tangent: complex, last_tangent: complex) -> list[np.ndarray]:
    """Return lines [2] and cubic curves [4] along points: each the longest within the tolerance."""
    segments, start, last = [], 0, len(points) - 1
    while start < last:
        line_end, line = _longest(partial(_fit_line, points, start), start, last)
        curve_end, curve = _longest(partial(_fit_curve, points, start, tangent, last_tangent), start, last)
        is_line = line_end - start >= 0.7 * (curve_end - start)
        end, segment = (line_end, line) if is_line else (curve_end, curve)
        segments.append(segment)
        is_long = is_line and end - start > 2 / _STEP
        tangent = (
            (points[end] - points[start]) / abs(points[end] - points[start]) if is_long else _direction(points, end)
        )
        start = end
    return segments


def _longest(fit: Callable[[int], np.ndarray | None], start: int, last: int) -> tuple[int, np.ndarray]:
    """Return the largest end, by doubling and bisection, for which `fit` gives a segment, and the segment."""
    if (segment := fit(last)) is not None:
        return last, segment
    good, bad, step, best = start + 1, last, 4, fit(start + 1)
    while bad - good > 1:
        middle = min(good + step, (good + bad) // 2) if bad == last else (good + bad) // 2
        segment = fit(middle)
        if segment is None:
            bad = middle
        else:
            good, best, step = middle, segment, 2 * step
    assert best is not None
    return good, best


def _fit_line(points: np.ndarray, start: int, end: int) -> np.ndarray | None:
    """Return the ends [2] of the line from one point to another; None if it is farther from a point between them than
    the tolerance."""
    chord, offsets = points[end] - points[start], points[start : end + 1] - points[start]
    if end > start + 1 and abs(chord) < _STEP * (end - start) / 2:  # the chord of a closed curve is a point
        return None
    distances = abs(np.imag(offsets * np.conj(chord)))
    return points[[start, end]] if distances.max() <= _LINE_TOLERANCE * abs(chord) else None


def _fit_curve(points: np.ndarray, start: int, tangent: complex, last_tangent: complex, end: int) -> np.ndarray | None:
    """Return the control points [4] of a cubic curve from one point to another, by least squares with unit tangents
    at both ends; None if it is farther from a point between them than the tolerance."""
    end_tangent = last_tangent if end == len(points) - 1 else _direction(points, end)
    points = points[start : end + 1]
    first, last = points[0], points[-1]
    if len(points) < 4:
        return np.linspace(first, last, 4)
    t = np.append(0, np.cumsum(abs(np.diff(points))))
    t, chord = t / t[-1], abs(last - first)
    for _ in range(3):
        s = 1 - t
        b0, b1, b2, b3 = s**3, 3 * t * s**2, 3 * t**2 * s, t**3
        arms = np.stack([b1 * tangent, -b2 * end_tangent], -1)
        rest = points - (b0 + b1) * first - (b2 + b3) * last
        solution = np.linalg.lstsq(
            np.r_[np.real(arms), np.imag(arms)], np.r_[np.real(rest), np.imag(rest)], rcond=None
        )[0]
        if solution.min() < 0.01 * chord or solution.max() > 3 * chord:
            solution = np.full(2, chord / 3)
        control = np.array([first, first + solution[0] * tangent, last - solution[1] * end_tangent, last])
        offsets = control @ np.stack([b0, b1, b2, b3]) - points
        if (error := abs(offsets).max()) <= _CURVE_TOLERANCE:
            return control
        if error > 4 * _CURVE_TOLERANCE:
            return None
        # One step of Newton's method towards the nearest point of the curve.
        slope = np.diff(control) @ (3 * np.stack([s**2, 2 * s * t, t**2]))
        t = np.clip(t - np.real(offsets * slope.conj()) / np.maximum(abs(slope) ** 2, 1e-9), 0, 1)
    return None


def _numbers(values: np.ndarray) -> str:
    """Return steps of a coordinate as numbers in view box units, with spaces only where the syntax needs them."""
    text = ""
    for number in map(_number, values.tolist()):
        text += number if not text or number[0] == "-" else f" {number}"
    return text


def _number(steps: int) -> str:
    sign, (whole, part) = "-" if steps < 0 else "", divmod(abs(steps), _UNITS)
    decimals = f".{part:02}".rstrip("0").rstrip(".")
    return f"{sign}{whole or ''}{decimals}" if whole or decimals else "0"
