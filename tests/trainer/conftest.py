"""Leaves out what needs the other stack."""

from trainer.compat import tf

# TensorLayer 1.11.1 is for TensorFlow 1: there is nothing to test on another.
collect_ignore = [] if tf.__version__.startswith("1.") else ["test_tensorlayer.py"]
