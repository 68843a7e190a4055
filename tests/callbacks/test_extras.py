"""Loggers that need an extra say which one, where it is not installed."""

import sys

import pytest

from flaxfit.callbacks import MLflowLogger, TensorBoardLogger, WandbLogger


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("tensorboardX", "tensorboard", lambda: TensorBoardLogger("runs")),
        ("wandb", "wandb", WandbLogger),
        ("mlflow", "mlflow", MLflowLogger),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package, extra, make, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'needs {package}: pip install "flaxfit\[{extra}\]"'):
        make()
