"""Numbers, lines, charts and HTML for terminals and notebooks, and how lines are written."""

from flaxfit.display import _html as html
from flaxfit.display._chart import sparkline, svg_chart
from flaxfit.display._html import arrays, card, n_numbers, table
from flaxfit.display._lines import (
    WIDTH,
    final_lines,
    first_line,
    folded,
    metric_line,
    pass_line,
    progress_line,
    start_lines,
)
from flaxfit.display._numbers import count, duration, is_scalar, number, plural, rate, size
from flaxfit.display._pyplot import pyplot
from flaxfit.display._streams import (
    columns,
    has_colour,
    is_cell,
    is_live,
    is_notebook,
    output,
    passing,
    printable,
    quiet,
    say,
    width_of,
    write,
)
from flaxfit.display._table import Table, place
from flaxfit.display._tracebacks import short_errors, show_one_line
