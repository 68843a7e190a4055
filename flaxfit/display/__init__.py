"""Numbers, lines, charts and HTML for terminals and notebooks, and how lines are written."""

from flaxfit.display._lines import WIDTH as WIDTH
from flaxfit.display._lines import checkpoint_line as checkpoint_line
from flaxfit.display._lines import final_line as final_line
from flaxfit.display._lines import folded as folded
from flaxfit.display._lines import label as label
from flaxfit.display._lines import metric_line as metric_line
from flaxfit.display._lines import progress_line as progress_line
from flaxfit.display._lines import start_line as start_line
from flaxfit.display._numbers import count as count
from flaxfit.display._numbers import duration as duration
from flaxfit.display._numbers import is_scalar as is_scalar
from flaxfit.display._numbers import number as number
from flaxfit.display._numbers import plural as plural
from flaxfit.display._numbers import rate as rate
from flaxfit.display._numbers import size as size
from flaxfit.display._streams import columns as columns
from flaxfit.display._streams import is_cell as is_cell
from flaxfit.display._streams import is_live as is_live
from flaxfit.display._streams import is_notebook as is_notebook
from flaxfit.display._streams import output as output
from flaxfit.display._streams import printable as printable
from flaxfit.display._streams import quiet as quiet
from flaxfit.display._streams import say as say
from flaxfit.display._streams import write as write
