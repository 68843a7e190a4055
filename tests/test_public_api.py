"""The public API: its names, their documentation, and what importing them costs."""

import enum
import functools
import importlib
import inspect
import json
import os
import pydoc
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flaxfit"
PUBLIC = {
    module: names.split()
    for module, names in {
        "flaxfit": """
            ArrayStream Batch Checkpoint DataParallel EndOfData EvalLoop EvalTask
            History InferenceState Model MultiTask Sharded TrainLoop TrainState
            TrainTask gather init_state initialize is_main make_eval_step
            make_predict_step make_train_step process_count process_index step_key
            update_statistics
        """,
        "flaxfit.callbacks": """
            AverageWeights CSVLogger Callback StatefulCallback EarlyStopping Events
            ExitCode Export JSONLogger LearningRateScheduler LogTo Logger MLflowLogger
            MemoryReport Norms Profiler ProgressBar ReduceLROnPlateau Rollback
            SaveOnSignal StopOnNaN SummaryLogger SwapEMA TensorBoardLogger Throughput
            Timer Unfreeze WandbLogger Watchdog at every when
        """,
        "flaxfit.checkpoints": """
            CheckpointFile CheckpointFileReader CheckpointFileWriter best latest
            list_steps load_weights restore save save_weights
        """,
        "flaxfit.data": """
            ArrayStream DataStream as_stream one_pass pack prefetch take
        """,
        "flaxfit.export": """
            ExportReport ExportedModel InputSpec JaxModule batch_specs from_state load
            save save_onnx save_saved_model write
        """,
        "flaxfit.importers": """
            CheckpointTranslator LazyArray LazyAwaitableArray LazyThreadPoolArray
            UnreadableFile fill load load_msgpack load_npz load_orbax load_safetensors
            load_t5x load_tf_ckpt restore_from_t5 t5_translator
        """,
        "flaxfit.launch": "main",
        "flaxfit.losses": """
            binary_crossentropy binary_focal_crossentropy categorical_focal_crossentropy
            categorical_hinge check_loss_shape check_values circle cosine_distance
            cosine_similarity crossentropy ctc dice generalized_crossentropy hinge huber
            info_nce kl_divergence log_cosh mae mape mse msle onehot_crossentropy
            poisson resolve smape squared_hinge supervised_contrastive triplet tversky
        """,
        "flaxfit.metrics": """
            Metric accuracy as_metrics auc average_precision balanced_accuracy
            binary_accuracy binary_iou bleu brier calibration_error cer cohen_kappa
            collected concordance confusion_matrix cosine_similarity d2_absolute_error
            d2_tweedie dice exact_match explained_variance f1 false_negative_rate
            false_negatives false_positive_rate false_positives fbeta hamming_loss iou
            kendall log_loss mae max_error mcc mean mean_iou mean_poisson_deviance
            median_absolute_error mrr mse ndcg negative_predictive_value on pearson
            perplexity plot_confusion_matrix pr_auc precision precision_at_k
            precision_at_recall psnr quantile_loss r2 recall recall_at_k
            recall_at_precision rmse rouge_1 rouge_2 rouge_l sensitivity_at_specificity
            spearman specificity specificity_at_sensitivity ssim sum top_k
            true_negatives true_positives wer zero_one_loss
        """,
        "flaxfit.modules": """
            ModelFunctions from_function from_nnx nnx_step summarize train_and_eval
            update_nnx
        """,
        "flaxfit.optim": """
            MultiOptimizer Optimizer OptimizerDef averaged eval_params hyperparams
            set_hyperparams swap_ema
        """,
        "flaxfit.sklearn": "FlaxClassifier FlaxRegressor",
        "flaxfit.strategies": "DataParallel Eager Layout Sharded Strategy gather",
    }.items()
}
# Rooms whose names are no promise; what users need of them is at the top.
INTERNAL = ("display", "distributed", "loop", "model", "state", "step", "task", "tree")
# The spine of the library is at the top; these live in a sub-package as well, among their kind.
TWICE = {"ArrayStream", "DataParallel", "Sharded", "gather"}
# Protocols of what the library calls: one class of the user's own is the example of all methods.
PROTOCOLS = (
    importlib.import_module("flaxfit.callbacks").StatefulCallback,
    importlib.import_module("flaxfit.callbacks").Logger,
    importlib.import_module("flaxfit.strategies").Strategy,
)
# Methods that only the library calls: they have no example, and are not in the reference.
FOR_THE_LIBRARY = {
    *("ArrayStream.next_rows", "ArrayStream.next_rows_of", "ArrayStream.order_ahead"),
    *("ArrayStream.pick", "ArrayStream.whole", "EvalLoop.check", "InferenceState.apply_gradient"),
    *("MultiOptimizer.check", "MultiOptimizer.describe", "MultiOptimizer.with_patterns"),
    *("OptimizerDef.check", "OptimizerDef.describe"),
    *("ProgressBar.interrupt", "ProgressBar.recall", "TrainLoop.in_phase"),
}
HEAVY = ("flax.nnx", "grain", "matplotlib", "orbax", "tensorflow", "torch")


def public_names(module_name):
    """The names of a module without an underscore that flaxfit defines."""
    module = importlib.import_module(module_name)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "").startswith("flaxfit")
    }


@pytest.fixture
def fresh(run_child):
    """What a script prints as JSON in a new interpreter."""

    def run(script):
        command = [sys.executable, "-W", "error", "-c", script]
        # Compiled files are kept, as they are by default.
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        done = run_child(command, env=variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_every_public_module_is_listed():
    packages = {path.parent.name for path in PACKAGE.glob("[!_]*/__init__.py")} - {*INTERNAL}
    modules = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert {"flaxfit"} | {f"flaxfit.{name}" for name in packages | modules} == PUBLIC.keys()


@pytest.mark.parametrize("module", PUBLIC)
def test_a_module_has_the_names_that_were_agreed_and_a_star_import_brings_them_in(module):
    assert public_names(module) == set(PUBLIC[module])
    assert sorted(importlib.import_module(module).__all__) == sorted(PUBLIC[module])


@pytest.mark.parametrize("module", ["flaxfit.losses", "flaxfit.modules"])
def test_help_lists_just_these_names(module):
    text = pydoc.render_doc(module, renderer=pydoc.plaintext)
    *_, functions = re.split(r"^FUNCTIONS$", text, flags=re.MULTILINE)
    listed = re.findall(r"^ {4}(\w+)\(", re.split(r"^\w+$", functions, flags=re.MULTILINE)[0], re.M)
    classes = re.findall(r"^ {4}class (\w+)\(", text, re.MULTILINE)
    assert sorted([*classes, *listed]) == sorted(PUBLIC[module])


def test_dir_lists_the_names_of_the_top_and_its_sub_packages():
    package = importlib.import_module("flaxfit")
    lazy = {name.removeprefix("flaxfit.") for name in PUBLIC} - {"flaxfit"}
    assert set(dir(package)) == {*PUBLIC["flaxfit"], *lazy, "__version__"}


def test_the_version_is_that_of_the_distribution():
    config = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert config["tool"]["hatch"]["version"]["path"] == "flaxfit/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", importlib.import_module("flaxfit").__version__)


def public_values():
    """The module, the name and the value of each public name."""
    for module, names in PUBLIC.items():
        for name in names:
            yield module, name, getattr(importlib.import_module(module), name)


def public_classes():
    """Names and classes; protocols are documented where they are used."""
    for _, name, value in public_values():
        if inspect.isclass(value) and not getattr(value, "_is_protocol", False):
            yield name, value


def test_a_public_name_is_documented_with_an_example():
    docs = {f"{module}.{name}": inspect.getdoc(value) for module, name, value in public_values()}
    assert [name for name, doc in docs.items() if ">>> " not in (doc or "")] == []


def undescribed_arguments():
    """The arguments of constructors, `Class(argument)`, of which the documentation says nothing."""
    for name, value in public_classes():
        if issubclass(value, Exception | enum.Enum):
            continue
        text = f"{inspect.getdoc(value)}\n{inspect.getsource(value)}"
        for argument, kind in inspect.signature(value).parameters.items():
            in_list = rf"^ *([*\w]+, )*\**{argument}(, [*\w]+)*: "  # Of `Args:` or `Attributes:`.
            as_field = rf"^ *{argument}: .*\n *\"\"\""
            is_named = kind.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
            is_listed = re.search(in_list, inspect.getdoc(value), re.M)
            if is_named and not is_listed and not re.search(as_field, text, re.M):
                yield f"{name}({argument})"


def test_the_arguments_of_constructors_are_described():
    assert [*undescribed_arguments()] == []


def methods_without_an_example():
    """Names of public methods, `Class.method`, that have no example where they are defined."""
    for name, value in public_classes():
        for method in (each for each in dir(value) if not each.startswith("_")):
            found = inspect.unwrap(getattr(value, method))
            if isinstance(found, functools.cached_property):
                continue
            is_own = str(getattr(found, "__module__", "")).startswith("flaxfit")
            documented = [inspect.getdoc(vars(base).get(method)) for base in value.__mro__]
            if inspect.isroutine(found) and is_own and ">>> " not in str(documented):
                yield f"{name}.{method}"


def test_a_public_method_is_documented_with_an_example():
    lacking = {*methods_without_an_example()}
    declared = {m for kind in PROTOCOLS for m in dir(kind)} | {"attach", "close"}
    assert {name for name in lacking if name.partition(".")[2] not in declared} == FOR_THE_LIBRARY


def test_no_name_is_reachable_by_two_paths():
    homes = Counter(id(value) for _, _, value in public_values())
    assert {name for _, name, value in public_values() if homes[id(value)] > 1} == TWICE


def test_an_unknown_name_is_an_attribute_error():
    name = "no_such_name"
    with pytest.raises(AttributeError, match=name):
        getattr(importlib.import_module("flaxfit"), name)


@pytest.mark.slow
def test_importing_brings_in_no_heavy_package(fresh):
    lazy = sorted(name.removeprefix("flaxfit.") for name in PUBLIC if "." in name)
    found = fresh(
        "import json, sys, flaxfit\n"
        f"for name in {lazy}: getattr(flaxfit, name)\n"
        f"heavy = {HEAVY}\n"
        "starts = tuple(name + '.' for name in heavy)\n"
        "print(json.dumps([m for m in sys.modules if m in heavy or m.startswith(starts)]))"
    )
    assert found == []


@pytest.mark.slow
def test_importing_costs_at_most_an_eighth_of_the_dependencies(fresh):
    script = (
        "import gc, json, time\n"
        "start = time.process_time()\n"
        "import flax.linen, jax, numpy, optax, redex.combinator, redex.util, tqdm\n"
        "gc.collect(), gc.freeze()\n"  # a collection of JAX's objects is none of flaxfit's time
        "before = time.process_time()\nimport flaxfit\n"
        "print(json.dumps((time.process_time() - before) / (before - start)))"
    )
    # The first run may have to compile the files. A ratio, as the speed of machines differs.
    assert any(fresh(script) <= 0.125 for _ in range(4))


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("flaxfit.callbacks", "ModelCheckpoint", "use flaxfit's checkpoints.CheckpointFileWriter"),
        ("flaxfit.callbacks", "TensorBoard", "use flaxfit's callbacks.TensorBoardLogger"),
        ("flaxfit", "load_model", r"use Model\(...\), as it was made, and its load\(folder\)"),
        ("flaxfit", "Trainer", "use Model, or TrainLoop"),
    ],
)
def test_a_name_of_another_library_is_answered_with_what_to_use(module, name, words):
    with pytest.raises(AttributeError, match=f"^module '{module}' has no attribute .*{words}"):
        getattr(importlib.import_module(module), name)


def test_a_name_that_is_nearly_right_is_left_to_python_to_suggest():
    for module, name in ("flaxfit.callbacks", "EarlyStoping"), ("flaxfit", "TrainLop"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'$") as raised:
            getattr(importlib.import_module(module), name)
        assert (raised.value.name, raised.value.obj) == (name, importlib.import_module(module))
