"""The Trainer's arguments, checked, and the arithmetic of steps; knows no TensorFlow."""

import inspect
import math
import numbers
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Optional, Tuple

# What `data.count_samples` says about a dataset without a known size.
INFINITE = -1
UNKNOWN = -2

# Without a wish of the user: enough batches to ride out jitter, few enough to bound the memory.
MAX_DEFAULT_PREFETCH_BATCHES = 16

# What a signed 64-bit tensor holds, with room to count up from it.
MAX_SEED = 2**62


def _is_int(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_int(name, value, minimum):
    if not _is_int(value):
        raise TypeError(f"{name}: got {value!r}, expected an integer >= {minimum}")
    if value < minimum:
        raise ValueError(f"{name}: got {value!r}, expected an integer >= {minimum}")


def _check_number(name, value, *, above=None, at_least=None):
    bound = f"> {above}" if above is not None else f">= {at_least}"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, expected a number {bound}")
    if not (value > above if above is not None else value >= at_least):
        raise ValueError(f"{name}: got {value!r}, expected a number {bound}")


def _check_optimizer(optimizer, optimizer_args):
    if not callable(optimizer):
        raise TypeError(
            f"optimizer: got {optimizer!r}, expected a tf.train.Optimizer class such as "
            "tf.train.AdamOptimizer "
            "(the class, not an instance of it)"
        )
    if not isinstance(optimizer_args, Mapping):
        raise TypeError(
            f"optimizer_args: got {optimizer_args!r}, expected a dict such as {{'learning_rate': 0.001}}"
        )
    if "learning_rate" not in optimizer_args:
        raise ValueError(
            f"optimizer_args: got keys {sorted(map(str, optimizer_args))}, expected 'learning_rate' among "
            "them (for one rank; the Trainer scales "
            "it)"
        )
    rate = optimizer_args["learning_rate"]
    # A tensor (a decay schedule) is recognised by its dtype: this module knows no TensorFlow.
    if isinstance(rate, (bool, str)) or not (isinstance(rate, numbers.Real) or hasattr(rate, "dtype")):
        raise TypeError(f"optimizer_args['learning_rate']: got {rate!r}, expected a number")
    if isinstance(rate, numbers.Real) and not 0 <= rate < math.inf:
        raise ValueError(f"optimizer_args['learning_rate']: got {rate!r}, expected a finite number >= 0")
    try:
        signature = inspect.signature(optimizer)
    except ValueError:
        # Some classes written in C do not tell what they take.
        return
    try:
        signature.bind(**optimizer_args)
    except TypeError as error:
        name = getattr(optimizer, "__name__", optimizer)
        raise TypeError(
            f"optimizer_args: got keys {sorted(optimizer_args)}, which {name} does not take: {error}"
        ) from error


@dataclass(frozen=True)
class TrainSpec:
    """Every argument of a Trainer; a wrong one raises TypeError or ValueError when the spec is made."""

    training_dataset: Any
    build_training_func: Callable
    optimizer: Callable
    optimizer_args: Mapping[str, Any]
    batch_size: int = 32
    prefetch_size: Optional[int] = None
    checkpoint_dir: Optional[str] = None
    scaling_learning_rate: bool = True
    log_step_size: int = 1
    validation_dataset: Any = None
    build_validation_func: Optional[Callable] = None
    max_iteration: float = math.inf
    warmup_steps: Optional[int] = None
    warmup_epochs: Optional[float] = None
    gradient_compression: str = "none"
    metrics_dir: Optional[str] = None
    hooks: Tuple[Any, ...] = field(default=())
    seed: Optional[int] = None
    save_checkpoint_secs: Optional[float] = 600
    save_checkpoint_steps: Optional[int] = None

    def __post_init__(self):
        _check_int("batch_size", self.batch_size, 1)
        if self.prefetch_size is not None:
            _check_int("prefetch_size", self.prefetch_size, 0)
        _check_int("log_step_size", self.log_step_size, 1)
        _check_number("max_iteration", self.max_iteration, above=0)
        _check_optimizer(self.optimizer, self.optimizer_args)
        self._check_functions()
        self._check_extras()

    def _check_functions(self):
        if not callable(self.build_training_func):
            raise TypeError(
                f"build_training_func: got {self.build_training_func!r}, expected a function (x, y) -> "
                "(network, loss, log_tensors)"
            )
        if self.build_validation_func is not None and not callable(self.build_validation_func):
            raise TypeError(
                f"build_validation_func: got {self.build_validation_func!r}, expected a function (x, y) "
                "-> (network, metrics)"
            )
        if self.validation_dataset is not None and self.build_validation_func is None:
            raise ValueError(
                "build_validation_func: got None with a validation_dataset, expected a function "
                "(x, y) -> (network, metrics)"
            )
        for name in ("checkpoint_dir", "metrics_dir"):
            value = getattr(self, name)
            if value is not None and not (hasattr(value, "__fspath__") or (isinstance(value, str) and value)):
                raise TypeError(f"{name}: got {value!r}, expected a directory's path or None")

    def _check_extras(self):
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise ValueError(
                f"warmup_steps and warmup_epochs cannot both be set: got {self.warmup_steps!r} and "
                f"{self.warmup_epochs!r}"
            )
        if self.warmup_steps is not None:
            _check_int("warmup_steps", self.warmup_steps, 0)
        if self.warmup_epochs is not None:
            _check_number("warmup_epochs", self.warmup_epochs, at_least=0)
        if self.gradient_compression not in ("none", "fp16"):
            raise ValueError(
                f"gradient_compression: got {self.gradient_compression!r}, expected 'none' or 'fp16'"
            )
        if self.seed is not None:
            _check_int("seed", self.seed, 0)
            if self.seed > MAX_SEED:
                raise ValueError(f"seed: got {self.seed!r}, expected an integer <= {MAX_SEED}")
        if self.save_checkpoint_secs is not None:
            _check_number("save_checkpoint_secs", self.save_checkpoint_secs, above=0)
        if self.save_checkpoint_steps is not None:
            _check_int("save_checkpoint_steps", self.save_checkpoint_steps, 1)

    @property
    def prefetch_batches(self):
        """Batches to keep ready on each rank."""
        if self.prefetch_size is None:
            return min(self.batch_size, MAX_DEFAULT_PREFETCH_BATCHES)
        return self.prefetch_size


@dataclass(frozen=True)
class StepPlan:
    """How many steps every rank still makes; `steps` is None while nothing known limits them."""

    steps: Optional[int]
    left_out: int  # samples of the whole run that no rank trains on; 0 while unknown
    ends_with_data: bool


def plan_steps(samples, position, *, size, batch_size, minibatches_done=0, max_iteration=math.inf):
    """Plan the steps that are left, the same on every rank.

    Samples are dealt to the ranks one by one, so a last global batch that is not full still gives every rank a
    share when it holds at least one sample per rank; otherwise it is left out.

    Args:
        samples: length of the whole training stream, or `INFINITE` or `UNKNOWN`.
        position: samples of the stream already used, by any number of ranks.
        size: ranks.
        batch_size: samples per rank and step.
        minibatches_done: mini-batches already made, over all ranks together.
        max_iteration: mini-batches over all ranks together at which training ends.

    Returns:
        A StepPlan.
    """
    limit = None
    if max_iteration != math.inf:
        limit = max(0, int((max_iteration - minibatches_done) // size))
    if samples < 0:
        return StepPlan(limit, 0, False)
    full, rest = divmod(max(0, samples - position), size * batch_size)
    data_steps = full + (rest >= size)
    if limit is not None and limit < data_steps:
        return StepPlan(limit, 0, False)
    return StepPlan(data_steps, rest if rest < size else 0, True)


def warmup_step_count(spec, samples_per_epoch, size):
    """Return the number of warm-up steps that `spec` asks for (0: none).

    Raises:
        ValueError: `warmup_epochs` is given and the length of an epoch is not known.
    """
    if spec.warmup_steps is not None:
        return spec.warmup_steps
    if not spec.warmup_epochs:
        return 0
    if samples_per_epoch < 0:
        raise ValueError(
            f"warmup_epochs: got {spec.warmup_epochs!r}, but the number of samples in an epoch of "
            "training_dataset is not known; "
            "use warmup_steps"
        )
    return math.ceil(spec.warmup_epochs * samples_per_epoch / (size * spec.batch_size))
