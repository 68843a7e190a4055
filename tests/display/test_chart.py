import math
import re
import xml.etree.ElementTree as ET

import pytest

from flaxfit.display._chart import COLOURS, sparkline, svg_chart


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (range(8), "▁▂▃▄▅▆▇█"),
        ([3.0, -1.0], "█▁"),
        ([2.0, 2.0], "▁▁"),
        ([], ""),
        ([0.0, math.nan, math.inf, 1.0], "▁  █"),
        ([math.nan], " "),
    ],
    ids=str,
)
def test_a_sparkline_runs_from_the_lowest_to_the_highest_with_blanks_for_missing(values, line):
    assert sparkline(values) == line


def test_a_long_series_is_shown_from_end_to_end_in_the_width():
    line = sparkline([*range(999), 5000], width=40)
    assert len(line) == 40
    assert (line[0], line[-1]) == ("▁", "█")


def points_of(svg):
    lines = ET.fromstring(svg).iter("polyline")
    return [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in lines
    ]


def test_a_chart_draws_each_series_over_x_within_its_frame():
    svg = svg_chart("loss", {"loss": [2.0, 1.0, 0.0], "val_loss": [1.0, 1.0, 1.0]}, [1, 2, 5])
    falling, flat = points_of(svg)
    assert [y for _, y in falling] == sorted(y for _, y in falling)
    assert len({y for _, y in flat}) == 1
    assert [x for x, _ in falling] == [x for x, _ in flat]
    (a, _), (b, _), (c, _) = falling
    assert (c - b) == pytest.approx(3 * (b - a), abs=0.2)
    assert all(0 <= x <= 320 and 0 <= y <= 160 for x, y in falling + flat)


def test_a_chart_breaks_its_line_at_missing_values_and_dots_a_lone_one():
    nan = math.nan
    lines = points_of(svg_chart("f1", {"f1": [nan, 1.0, 2.0, nan, nan, 3.0]}, range(6)))
    assert [len(set(line)) for line in lines] == [2, 1]


def test_a_chart_of_nothing_or_of_one_point_is_still_a_picture():
    assert points_of(svg_chart("loss", {"loss": []}, [])) == []
    assert len(points_of(svg_chart("loss", {"loss": [1.0]}, [7]))) == 1


def test_a_chart_escapes_names_and_draws_its_axes_in_the_colour_of_the_page():
    svg = svg_chart("<b>", {"a & b": [1.0, 2.0]}, [1, 2])
    picture = ET.fromstring(svg)
    assert picture.findtext("text") == "<b>"
    assert [node.text for node in picture.iter("tspan")] == ["a & b"]
    assert re.search(r'<path [^>]*stroke="currentColor"', svg)


def luminance(colour):
    """The relative luminance of "#rrggbb", as the accessibility guidelines of the web define it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colour", COLOURS)
def test_lines_stand_out_on_light_and_on_dark_pages(colour):
    light, dark = luminance("#ffffff"), luminance("#111111")
    assert (light + 0.05) / (luminance(colour) + 0.05) > 3
    assert (luminance(colour) + 0.05) / (dark + 0.05) > 3
