"""What rank 0 shows and writes of a training: log lines, a progress bar, metrics files."""

import json
import logging
import math
import os
import sys
import time

import numpy as np

from trainer.checkpoints import make_directory
from trainer.compat import tf

logger = logging.getLogger("trainer")

_BAR_WIDTH = 30
_BAR_INTERVAL_S = 0.2


def as_scalar(value):
    """Return `value` as a float where it is a single number, else None."""
    array = np.asarray(value)
    return float(array.reshape(())) if array.size == 1 and array.dtype.kind in "biuf" else None


def _as_json(value):
    """Return lists, numbers or bytes as JSON has them; it has no NaN and no infinity, which become null."""
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def log_line(step, last_step, values, samples_per_s):
    """Format one line: step, every logged value, samples per second over all ranks."""
    parts = [f"step {step}" if last_step is None else f"step {step}/{last_step}"]
    for name, value in values.items():
        number = as_scalar(value)
        parts.append("{} {}".format(name, _as_json(value) if number is None else f"{number:.6g}"))
    if samples_per_s is not None:
        parts.append(f"{samples_per_s:.0f} samples/s")
    return ", ".join(parts)


def bar_line(step, last_step, samples_per_s, width=_BAR_WIDTH):
    """Format the progress bar's text; without a known end it counts."""
    rate = "" if samples_per_s is None else f"  {samples_per_s:.0f} samples/s"
    if not last_step:
        return f"step {step}{rate}"
    done = min(width, width * step // last_step)
    return "[{}{}] {:3d}%  step {}/{}{}".format(
        "#" * done, "." * (width - done), 100 * step // last_step, step, last_step, rate
    )


class ProgressBar:
    """One line at the bottom of a terminal, redrawn in place; writes nothing to anything else.

    With RINGMASTER_TTY=1 the stream is a pipe at whose other end there is a terminal.
    """

    def __init__(self, stream=None):
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self.is_shown = self._is_terminal or os.environ.get("RINGMASTER_TTY") == "1"
        self._drawn_at_s = 0.0
        self._length = 0

    def draw(self, step, last_step, samples_per_s):
        """Redraw, at most a few times a second."""
        now_s = time.monotonic()
        if not self.is_shown or (now_s - self._drawn_at_s < _BAR_INTERVAL_S and step != last_step):
            return
        self._drawn_at_s = now_s
        text = bar_line(step, last_step, samples_per_s)
        self._write("\r" + text.ljust(self._length))
        self._length = len(text)

    def clear(self):
        """Take the bar off the terminal, so that a line can be written."""
        if self._length:
            # The reader of the pipe replaces the whole bar by what comes next.
            self._write("\r" + " " * self._length + "\r" if self._is_terminal else "\r")
            self._length = 0

    def _write(self, text):
        self._stream.write(text)
        self._stream.flush()


class MetricsWriter:
    """Writes `metrics.jsonl` and TensorBoard scalars into a directory."""

    def __init__(self, directory):
        make_directory("metrics_dir", str(directory))
        self._lines = open(os.path.join(str(directory), "metrics.jsonl"), "a")  # noqa: SIM115
        self._events = tf.summary.FileWriter(str(directory))

    def write(self, step, values):
        """Add one line and one event; values that are no single number are left out of the event.

        Args:
            step: global step.
            values: name -> number or array.
        """
        record, summary = {"step": int(step), "time_s": round(time.time(), 3)}, tf.Summary()
        for name, value in values.items():
            if value is None:
                continue
            number = as_scalar(value)
            record.setdefault(name, _as_json(np.asarray(value).tolist() if number is None else number))
            if number is not None:
                summary.value.add(tag=name, simple_value=number)
        self._lines.write(json.dumps(record, allow_nan=False) + "\n")
        self._lines.flush()
        self._events.add_summary(summary, int(step))

    def close(self):
        """Write out what is buffered."""
        self._lines.close()
        self._events.close()


class Reporter:
    """A rank's voice: turns the progress of the training into lines, and on rank 0 a bar and metrics."""

    def __init__(self, ranks, metrics_dir):
        self._prefix = "" if ranks.is_master else f"rank {ranks.rank}: "
        self._bar = ProgressBar() if ranks.is_master else None
        self._metrics = MetricsWriter(metrics_dir) if metrics_dir is not None and ranks.is_master else None
        self._mark = None  # (time, samples) from which the rate is taken
        self._has_stepped = False
        self._rate = None

    def step_begins(self, samples):
        """Note the start of the first step."""
        if self._mark is None:
            self._mark = (time.monotonic(), samples)

    def step_done(self, step, last_step, samples, values, extra):
        """Report a finished step.

        Args:
            samples: samples used so far by all ranks.
            values: name -> value to log, or None where the step is not due.
            extra: name -> value for the metrics files only.
        """
        now_s = time.monotonic()
        elapsed_s = now_s - self._mark[0]
        if values is not None and elapsed_s > 0 and samples > self._mark[1]:
            self._rate = (samples - self._mark[1]) / elapsed_s
        if values is not None or not self._has_stepped:
            # The first step pays for start-up: it counts for its own line only.
            self._mark = (now_s, samples)
        self._has_stepped = True
        if values is not None:
            self.say("%s", log_line(step, last_step, values, self._rate))
        if self._bar is not None:
            self._bar.draw(step, last_step, self._rate)
        if values is not None and self._metrics is not None:
            self._metrics.write(step, dict(values, samples_per_s=self._rate, **extra))

    def pause(self, seconds):
        """Leave time spent on something else, such as validation, out of the rate."""
        if self._mark is not None:
            self._mark = (self._mark[0] + seconds, self._mark[1])

    def say(self, message, *arguments):
        """Log a line, above the bar."""
        self.clear_bar()
        logger.info(self._prefix + message, *arguments)

    def clear_bar(self):
        """Take the bar away before somebody else writes."""
        if self._bar is not None:
            self._bar.clear()

    def close(self):
        """End the bar and the files."""
        self.clear_bar()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
