"""Export: trained models as files that run without their code, each compared with its source."""

from flaxfit.export._compare import ExportReport as ExportReport
from flaxfit.export._exported_model import ExportedModel as ExportedModel
from flaxfit.export._module import JaxModule as JaxModule
from flaxfit.export._onnx import save_onnx as save_onnx
from flaxfit.export._saved_model import save_saved_model as save_saved_model
from flaxfit.export._spec import InputSpec as InputSpec
from flaxfit.export._spec import batch_specs as batch_specs
from flaxfit.export._stablehlo import load as load
from flaxfit.export._stablehlo import save as save
from flaxfit.export._trained import from_state as from_state
from flaxfit.export._trained import write as write

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
