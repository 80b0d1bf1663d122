"""Training: the gradient of a step, the loop over steps, and a run of language modelling."""

from lineartime.training.division import Division, divide
from lineartime.training.gradient import compute_gradient
from lineartime.training.language import TrainResult, new_model, train
from lineartime.training.loop import Callbacks, Setup, fit, fit_once, out_of_memory
from lineartime.training.optimizers import learning_rate_at, make_optimizer
from lineartime.training.stop import Progress, StopSignal

__all__ = ["Callbacks", "Division", "Progress", "Setup", "StopSignal", "TrainResult", "compute_gradient", "divide",
           "fit", "fit_once", "learning_rate_at", "make_optimizer", "new_model", "out_of_memory", "train"]
