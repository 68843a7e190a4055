"""A notebook, executed cell by cell and exported: it needs neither widgets nor scripts."""

import os
import re
from pathlib import Path

import pytest

CELLS = {
    "imports": """
import signal
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
import flaxfit as ff

x, y = load_digits(return_X_y=True)
x = x / 16
""",
    "a model": """
model = ff.Model(nn.Dense(10), optax.adam(0.01), "crossentropy", metrics=["accuracy"])
model
""",
    "fit": "model.fit(x, y, batch_size=256, epochs=3, validation_split=0.2)",
    "the model": "model",
    "its state": "model.state",
    "a loop": """
data = ff.ArrayStream(x, y, batch_size=256)
task = ff.TrainTask(nn.Dense(10).apply, optax.adam(0.01), "crossentropy", data)
loop = ff.TrainLoop(nn.Dense(10).init, task, 0, n_steps_per_checkpoint=5, n_steps=20)
""",
    "the loop": "loop",
    "a checkpoint": "loop.next_checkpoint()",
    "the next": "loop.next_checkpoint()",
    "an interrupt": """
interrupts = [11]

def interrupt(checkpoint):
    if checkpoint.step in interrupts:
        interrupts.clear()
        signal.raise_signal(signal.SIGINT)

loop.callbacks = [interrupt]
for checkpoint in loop:
    print("at", checkpoint.step)
""",
    "and on": "loop.next_checkpoint()",
    "to the end": "[checkpoint.step for checkpoint in loop]",
}
STOPPED = "an interrupt"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The notebook with the outputs that a kernel of its own gave."""
    for name in ("nbclient", "ipykernel", "sklearn"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    import nbclient
    import nbformat

    cells = [nbformat.v4.new_code_cell(code.strip()) for code in CELLS.values()]
    cells[list(CELLS).index(STOPPED)].metadata.tags = ["raises-exception"]
    folder = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    root = str(Path(__file__).parents[1])
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": root, "IPYTHONDIR": str(folder)}
    return client.execute(env={**os.environ, **environment})


def outputs_of(notebook, name):
    return notebook.cells[list(CELLS).index(name)].outputs


def shown(notebook, name):
    """The HTML of a cell's value, without its tags, and its picture where it has one."""
    (page,) = [
        output.data["text/html"]
        for output in outputs_of(notebook, name)
        if output.output_type == "execute_result"
    ]
    return re.sub(r"<[^>]+>", " ", page), page.count("<svg")


@pytest.mark.slow
def test_nothing_is_said_that_nobody_asked_for(notebook):
    assert not outputs_of(notebook, "imports")


@pytest.mark.slow
def test_values_show_themselves(notebook):
    assert "no weights yet" in shown(notebook, "a model")[0]
    text, n_charts = shown(notebook, "fit")
    assert n_charts == 2 and "Dense: 3 epochs, 18 steps" in text and "best val_accuracy" in text
    text, n_charts = shown(notebook, "the model")
    assert n_charts == 2 and "Dense at step 18" in text and "650 params" in text
    assert "TrainState at step 18" in shown(notebook, "its state")[0]
    assert "TrainLoop at step 0/20" in shown(notebook, "the loop")[0]


@pytest.mark.slow
def test_fit_shows_its_progress_in_the_output_of_the_cell(notebook):
    streams = [each for each in outputs_of(notebook, "fit") if each.output_type == "stream"]
    assert {each.name for each in streams} == {"stdout"}
    text = "".join(each.text for each in streams)
    assert "\r" not in text
    bars = [each.data["text/plain"] for each in outputs_of(notebook, "fit") if "data" in each][:-1]
    assert not any(bars)  # They are gone at the end.
    assert re.findall(r"(\d)/3", text)[-1] == "3" and "done in" in text


@pytest.mark.slow
def test_a_loop_goes_on_from_cell_to_cell_and_after_an_interrupt(notebook):
    assert "Checkpoint at step 1 " in shown(notebook, "a checkpoint")[0]
    assert "Checkpoint at step 6 " in shown(notebook, "the next")[0]
    *_, error = outputs_of(notebook, STOPPED)
    assert error.ename == "KeyboardInterrupt"
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    assert "in interrupt(checkpoint)" in text and "flaxfit" not in text
    # Its callbacks were not through with the one at step 11: it is delivered again.
    assert "Checkpoint at step 11 " in shown(notebook, "and on")[0]
    (rest,) = outputs_of(notebook, "to the end")
    assert rest.data["text/plain"] == "[16, 20]"


@pytest.mark.slow
def test_it_needs_no_widgets_and_can_be_exported(notebook):
    kinds = {
        kind for cell in notebook.cells for each in cell.outputs for kind in each.get("data", ())
    }
    assert kinds == {"text/plain", "text/html"}
    nbconvert = pytest.importorskip("nbconvert", reason="nbconvert is not installed")
    page, _ = nbconvert.HTMLExporter(template_name="lab").from_notebook_node(notebook)
    assert page.count("<polyline") == shown_lines(notebook)


def shown_lines(notebook):
    """How many lines the charts of all cells have."""
    return sum(
        each.get("data", {}).get("text/html", "").count("<polyline")
        for cell in notebook.cells
        for each in cell.outputs
    )
