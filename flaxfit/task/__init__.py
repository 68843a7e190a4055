"""What to train and what to measure, as plain descriptions."""

from flaxfit.task._companions import Companion, are_same
from flaxfit.task._frozen import frozen_as, frozen_as_saved, frozen_facts, with_generations
from flaxfit.task._label_counts import check_counts, count_weights, valid_weights
from flaxfit.task._multi_output import (
    LossByOutput,
    as_loss,
    check_outputs,
    check_values,
    labels_out_of_range,
    targets_with_weights,
    weight_of,
)
from flaxfit.task._no_loss import as_all_loss, check_adds_loss, no_loss, with_penalty
from flaxfit.task._one_for_all import check_own_weights_of_all, for_all_outputs
from flaxfit.task._options import check_names
from flaxfit.task._output_metrics import MetricOfOutput, as_metrics, is_loss_of_output, with_names
from flaxfit.task._precision import in_float32, in_precision
from flaxfit.task._repr import describe_loss
from flaxfit.task._signatures import objective_in_evaluation, takes_ema
from flaxfit.task._task import (
    EvalTask,
    TrainTask,
    averaged_by,
    module_of,
    module_with,
    with_collections,
)
