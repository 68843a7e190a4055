import json
import math
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from flaxfit import Checkpoint
from flaxfit.callbacks._history import History

NAN = math.nan


def history_of(series, **options):
    """A history of checkpoints that are 44 steps and a quarter of a second apart."""
    history = History(**options)
    for i in range(max(map(len, series.values()))):
        metrics = {name: values[i] for name, values in series.items() if values[i] is not None}
        times = {"elapsed_time": 0.25, "compile_time": 1.0 if i == 0 else 0.0}
        step = 44 * (i + 1)
        history.append(
            Checkpoint(step=step, state=None, metrics=metrics, n_completed_steps=44, **times)
        )
    return history


def test_a_history_maps_names_to_lists_in_the_order_of_the_checkpoints():
    history = history_of({"loss": [0.9, 0.5, 0.4], "val_loss": [None, 0.6, None]})
    assert list(history) == ["loss", "val_loss"] and history["loss"] == [0.9, 0.5, 0.4]
    np.testing.assert_array_equal(history["val_loss"], [NAN, 0.6, NAN])
    assert history.steps == [44, 88, 132]
    assert (history.n_steps, history.elapsed_time, history.compile_time) == (132, 0.75, 1.0)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(KeyError, match="no 'val_loss'; it holds loss, f1"):
        history_of({"loss": [0.9], "f1": [0.5]})["val_loss"]
    assert "val_loss" not in history_of({"loss": [0.9]})
    with pytest.raises(ValueError, match=r"history holds loss\..*OptimizerDef\(optax.adam, learn"):
        history_of({"loss": [0.9]}).plot_lr()


def test_the_best_value_is_the_first_lowest_or_highest_finite_one():
    history = history_of({"loss": [NAN, 0.5, 0.2, 0.2], "f1": [0.1, 0.7, 0.7, math.inf]})
    assert history.best("loss") == (0.2, 3, 132)
    assert history.best("f1") == (0.7, 2, 88)
    assert history.best("f1", "min").epoch == 1
    assert history.best("loss", mode="max").value == 0.5
    with pytest.raises(ValueError, match="'loss' has no best value"):
        history_of({"loss": [NAN, math.inf]}).best("loss")


def test_a_history_survives_as_strict_json():
    history = history_of({"loss": [0.9, NAN], "bound": [math.inf, -math.inf]}, name="MLP")
    text = json.dumps(history.get_state(), allow_nan=False)
    other = History("MLP")
    other.set_state(json.loads(text))
    assert repr(other) == repr(history)
    assert other["loss"][0] == 0.9 and math.isnan(other["loss"][1])
    assert other["bound"] == [math.inf, -math.inf]
    other.append(Checkpoint(step=132, state=None, metrics={"loss": 0.1}))
    assert len(history["loss"]) == 2 and len(other["loss"]) == 3


def test_the_text_has_a_title_and_a_sparkline_from_first_to_last_for_each_metric():
    history = history_of(
        {"loss": [1.7632, 0.5, 0.1367], "val_accuracy": [0.8611, 0.95, 0.9694]},
        name="MLP",
        unit="epoch",
    )
    assert repr(history).splitlines() == [
        "MLP: 3 epochs, 132 steps in 1.8s",
        "  loss          █▃▁  1.7632 → 0.1367",
        "  val_accuracy  ▁▇█  0.8611 → 0.9694",
    ]


def test_an_empty_history_has_a_text_and_a_page():
    assert repr(History()) == "0 checkpoints, 0 steps in 0 ms"
    assert "0 checkpoints" in History()._repr_html_()


def test_the_page_has_facts_charts_and_a_table_and_needs_no_script():
    history = history_of(
        {
            "loss": [1.5, 0.5, 0.25],
            "f1": [0.5, 0.6, 0.7],
            "mine < yours": [1.0, NAN, NAN],
            "val_loss": [1.5, 0.5, 0.75],
            "val_f1": [0.5, 0.9, 0.8],
        },
        name="<MLP>",
        unit="epoch",
        facts="9,610 params",
    )
    page = history._repr_html_()
    root = ET.fromstring(page)
    text = "".join(root.itertext())
    assert "<MLP>: 3 epochs, 132 steps in 1.8s" in text
    assert "9,610 params · compiled in 1.0s · best val_f1 0.9000 at epoch 2" in text
    titles = [svg.findtext("text") for svg in root.iter("svg")]
    assert titles == ["loss", "f1"]
    rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    assert rows[0] == ["", "first", "last", "best", "at epoch"]
    assert rows[3] == ["mine < yours", "1.0000", "nan", "", ""]  # Its mode is not known.
    assert rows[4] == ["val_loss", "1.5000", "0.7500", "0.5000", "2"]
    assert "<script" not in page and "currentColor" in page
    assert len(page) < 6000


def test_entries_are_numbered_by_epochs_in_fit_and_by_steps_elsewhere_in_charts_and_tables():
    series = {"loss": [1.5, 0.25, 0.5], "val_f1": [0.5, 0.9, 0.8]}
    for options, unit, ends, best in (
        ({"unit": "epoch", "initial_epoch": 4}, "epoch", ["5", "7"], "6"),
        ({}, "step", ["44", "132"], "88"),
    ):
        root = ET.fromstring(history_of(series, **options)._repr_html_())
        assert f"best val_f1 0.9000 at {unit} {best}" in "".join(root.itertext())
        chart = next(root.iter("svg"))
        assert [each.text for each in chart.findall("text")][3:6] == [ends[0], unit, ends[1]]
        rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
        assert (rows[0][-1], rows[1][-1]) == (f"at {unit}", best)


@pytest.mark.parametrize(
    ("module", "method", "install"),
    [
        ("matplotlib", "plot", r'pip install "flaxfit\[plot\]"'),
        ("matplotlib", "plot_lr", r'pip install "flaxfit\[plot\]"'),
        ("pandas", "to_pandas", "pip install pandas"),
    ],
)
def test_a_missing_library_is_an_error_that_names_what_to_install(
    monkeypatch, module, method, install
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=install):
        getattr(history_of({"loss": [0.9], "learning_rate": [0.1]}), method)()


def test_a_data_frame_has_a_column_per_metric_and_the_steps_as_index():
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = history_of({"loss": [0.9, 0.5], "val_loss": [None, 0.6]}).to_pandas()
    assert list(frame.columns) == ["loss", "val_loss"]
    assert frame.loc[88, "val_loss"] == 0.6
    assert frame["val_loss"].isna().tolist() == [True, False]


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")


def test_a_plot_has_a_picture_per_metric_with_training_and_validation_together(pyplot):
    history = history_of({"loss": [0.9, 0.5], "f1": [0.1, 0.2], "val_loss": [0.8, 0.6]})
    axes = history.plot()
    assert [axis.get_title() for axis in axes] == ["loss", "f1"]
    assert [list(line.get_ydata()) for line in axes[0].lines] == [[0.9, 0.5], [0.8, 0.6]]
    assert list(axes[0].lines[0].get_xdata()) == [44, 88]
    assert axes[0].get_xlabel() == "step"
    axes = history_of({"loss": [0.9, 0.5]}, unit="epoch").plot()
    assert list(axes[0].lines[0].get_xdata()) == [1, 2] and axes[0].get_xlabel() == "epoch"


def test_learning_rates_are_drawn_over_the_steps_one_line_for_each_group(pyplot):
    one = history_of({"loss": [0.9, 0.5], "learning_rate": [0.1, 0.05]}).plot_lr()
    assert [list(line.get_ydata()) for line in one.lines] == [[0.1, 0.05]]
    assert list(one.lines[0].get_xdata()) == [44, 88] and one.get_legend() is None
    rates = {"learning_rate/stem": [0.01, 0.02], "learning_rate/head": [0.1, 0.2]}
    groups = history_of({"loss": [0.9, 0.5], **rates, "learning_rates": [1, 1]}).plot_lr()
    assert [line.get_label() for line in groups.lines] == list(rates)
