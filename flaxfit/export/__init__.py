"""Export: trained models as files that run without their code, each compared with its source."""

from flaxfit.export._compare import ExportReport
from flaxfit.export._exported_model import ExportedModel
from flaxfit.export._module import JaxModule
from flaxfit.export._onnx import save_onnx
from flaxfit.export._saved_model import save_saved_model
from flaxfit.export._spec import InputSpec, batch_specs
from flaxfit.export._stablehlo import load, save
from flaxfit.export._trained import from_state, write

__all__ = [
    "ExportReport",
    "ExportedModel",
    "InputSpec",
    "JaxModule",
    "batch_specs",
    "from_state",
    "load",
    "save",
    "save_onnx",
    "save_saved_model",
    "write",
]
