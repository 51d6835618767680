"""What rank 0 shows and writes of a training: log lines, a progress bar, metrics files."""

import json
import logging
import os
import sys
import time

import numpy as np

from trainer.compat import tf

logger = logging.getLogger("trainer")

_BAR_WIDTH = 30
_BAR_INTERVAL_S = 0.2


def as_scalar(value):
    """Return `value` as a float where it is a single number, else None."""
    array = np.asarray(value)
    return float(array.reshape(())) if array.size == 1 and array.dtype.kind in "biuf" else None


def log_line(step, last_step, values, samples_per_s):
    """Format one line: step, every logged value, samples per second over all ranks."""
    parts = [f"step {step}" if last_step is None else f"step {step}/{last_step}"]
    for name, value in values.items():
        number = as_scalar(value)
        parts.append("{} {}".format(name, value if number is None else f"{number:.6g}"))
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
    """One line at the bottom of a terminal, redrawn in place; writes nothing to anything else."""

    def __init__(self, stream=None):
        self._stream = sys.stderr if stream is None else stream
        self.is_shown = self._stream.isatty()
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
            self._write("\r" + " " * self._length + "\r")
            self._length = 0

    def _write(self, text):
        self._stream.write(text)
        self._stream.flush()


class MetricsWriter:
    """Writes `metrics.jsonl` and TensorBoard scalars into a directory."""

    def __init__(self, directory):
        os.makedirs(str(directory), exist_ok=True)
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
            record[name] = np.asarray(value).tolist() if number is None else number
            if number is not None:
                summary.value.add(tag=name, simple_value=number)
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()
        self._events.add_summary(summary, int(step))

    def close(self):
        """Write out what is buffered."""
        self._lines.close()
        self._events.close()


class Reporter:
    """Rank 0's voice: turns the progress of the training into lines, a bar and metrics."""

    def __init__(self, log_step_size, metrics_dir):
        self._log_step_size = log_step_size
        self._bar = ProgressBar()
        self._metrics = MetricsWriter(metrics_dir) if metrics_dir is not None else None
        self._mark = None  # (time, samples) at the last report
        self._rate = None

    def is_due(self, step):
        """Say whether the values of `step` are wanted."""
        return step % self._log_step_size == 0

    def step_done(self, step, last_step, samples, values, extra):
        """Report a finished step.

        Args:
            samples: samples used so far by all ranks.
            values: name -> value to log, or None where the step is not due.
            extra: name -> value for the metrics files only.
        """
        now_s = time.monotonic()
        if self._mark is None:
            # The first step pays for start-up; the rate is taken from here on.
            self._mark = (now_s, samples)
        if values is None:
            self._bar.draw(step, last_step, self._rate)
            return
        elapsed_s = now_s - self._mark[0]
        if elapsed_s > 0 and samples > self._mark[1]:
            self._rate = (samples - self._mark[1]) / elapsed_s
        self._mark = (now_s, samples)
        self.say(log_line(step, last_step, values, self._rate))
        self._bar.draw(step, last_step, self._rate)
        if self._metrics is not None:
            self._metrics.write(step, dict(values, samples_per_s=self._rate, **extra))

    def pause(self, seconds):
        """Leave time spent on something else, such as validation, out of the rate."""
        if self._mark is not None:
            self._mark = (self._mark[0] + seconds, self._mark[1])

    def say(self, message, *arguments):
        """Log a line, above the bar."""
        self._bar.clear()
        logger.info(message, *arguments)

    def close(self):
        """End the bar and the files."""
        self._bar.clear()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
