"""Metrics: pairs of pure functions, `measure` on the device and `compute` on the host.

Sums, not means: what `measure` returns adds up over batches, devices and hosts, and `compute`
divides once, at the end. So the value is that of all the data at once, whatever the batches.

>>> import numpy as np
>>> logits, labels = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), np.array([0, 1, 1])
>>> accuracy.compute(accuracy.measure(logits, labels, weights=np.array([1.0, 2.0, 1.0])))
0.75
"""

from flaxfit.metrics._accuracy import accuracy as accuracy
from flaxfit.metrics._accuracy import binary_accuracy as binary_accuracy
from flaxfit.metrics._accuracy import top_k as top_k
from flaxfit.metrics._auc import auc as auc
from flaxfit.metrics._collected import collected as collected
from flaxfit.metrics._confusion import confusion_matrix as confusion_matrix
from flaxfit.metrics._confusion import f1 as f1
from flaxfit.metrics._confusion import plot_confusion_matrix as plot_confusion_matrix
from flaxfit.metrics._confusion import precision as precision
from flaxfit.metrics._confusion import recall as recall
from flaxfit.metrics._metric import Metric as Metric
from flaxfit.metrics._metric import mean as mean
from flaxfit.metrics._names import as_metrics as as_metrics
from flaxfit.metrics._names import on as on
from flaxfit.metrics._regression import mae as mae
from flaxfit.metrics._regression import mse as mse
from flaxfit.metrics._regression import perplexity as perplexity
from flaxfit.metrics._regression import r2 as r2
from flaxfit.metrics._regression import rmse as rmse
