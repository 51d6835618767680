"""Labelled pictures that are drawn, not photographed: something to train on where no data set is at hand."""

import numpy as np

from trainer.datasets.files import LabelledImages

SIDE = 32
CLASSES = (
    "disc",
    "ring",
    "square",
    "frame",
    "triangle",
    "cross",
    "diagonal cross",
    "horizontal stripes",
    "vertical stripes",
    "chequers",
)
_NOISE = 20.0  # standard deviation, of 255
_MIN_CONTRAST = 70.0  # between the colours of figure and ground, in one of the three channels at least


def pictures(count, seed):
    """Draw `count` pictures of the ten classes, in turn.

    Place, size and both colours are random and all is noisy, so that neither a pixel nor a colour tells the class. The
    same seed draws the same pictures again.

    Returns:
        LabelledImages: uint8 [count, 32, 32, 3], int64 [count].
    """
    random = np.random.RandomState(seed)
    labels = np.arange(count, dtype=np.int64) % len(CLASSES)
    images = np.empty((count, SIDE, SIDE, 3), np.uint8)
    for label, figure in enumerate(_FIGURES):
        images[label :: len(CLASSES)] = _draw(random, figure, len(labels[label :: len(CLASSES)]))
    return LabelledImages(images, labels)


def _draw(random, figure, count):
    """Return uint8 [count, 32, 32, 3]: pictures of one class."""
    radius = random.uniform(6, 9, (count, 1, 1))
    centre_y, centre_x = random.uniform(12, 20, (2, count, 1, 1))
    y, x = np.mgrid[:SIDE, :SIDE]
    inside = figure((y - centre_y) / radius, (x - centre_x) / radius, random.uniform(0.6, 1.0, (count, 1, 1)))
    ground_colour, figure_colour = _colours(random, count)
    shade = random.uniform(-20, 20, (count, 1, 1, 1)) * np.linspace(-1, 1, SIDE)[:, np.newaxis, np.newaxis]
    picture = np.where(inside[..., np.newaxis], figure_colour, ground_colour) + shade
    return np.clip(picture + random.normal(0, _NOISE, picture.shape), 0, 255).astype(np.uint8)


def _colours(random, count):
    """Return two arrays [count, 1, 1, 3] of colours that can be told apart."""
    colours = random.uniform(20, 235, (2, count, 1, 1, 3))
    while True:
        too_close = abs(colours[0] - colours[1]).max(axis=(1, 2, 3)) < _MIN_CONTRAST
        if not too_close.any():
            return colours
        colours[:, too_close] = random.uniform(20, 235, (2, too_close.sum(), 1, 1, 3))


# Each says where its figure is, given distances from the figure's centre in units of its radius, and a period.


def _disc(y, x, _):
    return np.hypot(y, x) < 1


def _ring(y, x, _):
    return abs(np.hypot(y, x) - 0.8) < 0.2


def _square(y, x, _):
    return np.maximum(abs(y), abs(x)) < 0.9


def _frame(y, x, _):
    return abs(np.maximum(abs(y), abs(x)) - 0.8) < 0.2


def _triangle(y, x, _):
    return (y < 0.8) & (abs(x) < (y + 1) / 1.8)


def _cross(y, x, _):
    return (np.maximum(abs(y), abs(x)) < 1) & (np.minimum(abs(y), abs(x)) < 0.3)


def _diagonal_cross(y, x, _):
    return _cross((y + x) / np.sqrt(2), (y - x) / np.sqrt(2), _)


def _horizontal_stripes(y, x, period):
    return (y / period) % 1 < 0.5


def _vertical_stripes(y, x, period):
    return _horizontal_stripes(x, y, period)


def _chequers(y, x, period):
    return _horizontal_stripes(y, x, period) ^ _vertical_stripes(y, x, period)


_FIGURES = (
    _disc,
    _ring,
    _square,
    _frame,
    _triangle,
    _cross,
    _diagonal_cross,
    _horizontal_stripes,
    _vertical_stripes,
    _chequers,
)
