"""Variables that the training and the validation network share, whichever of the two a script builds first."""

import contextlib
import functools

from trainer.compat import tf


class SharedVariables:
    """Builds the training network first and lets it say `reuse=True` where validation makes the variables.

    A script may be written for the other order: `reuse=False` (or nothing) for validation, `reuse=True` for training.
    What training then wants to reuse is made at once, with its own arguments (a variable is trainable if it is in
    training), and validation gets just these variables in place of new ones.
    """

    def __init__(self):
        self._awaited = set()  # names that training reuses and validation has yet to make
        self._promised = set()  # all of the former

    @contextlib.contextmanager
    def training(self):
        """While this is entered, variables to reuse that do not exist are made."""
        with _custom_getter(self._get_for_training):
            yield

    @contextlib.contextmanager
    def validation(self):
        """While this is entered, validation is given the variables that training said it reuses."""
        with _custom_getter(self._get_for_validation):
            yield

    def check(self):
        """Check, once all is built, that validation makes what training reuses.

        Raises:
            ValueError: it does not: training has a network of its own there.
        """
        if self._awaited:
            names = sorted(self._awaited)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"build_training_func: it reuses variables that nothing makes: {', '.join(names[:3])}{more}; expected "
                "reuse=tf.AUTO_REUSE, or reuse=True in one of the two build functions only"
            )

    def _get_for_training(self, getter, name, *arguments, **options):
        if options.get("reuse") is not True:
            return getter(name, *arguments, **options)
        try:
            return getter(name, *arguments, **options)
        except ValueError:
            # Another reason than its absence, such as a wrong shape, comes up again here.
            variable = getter(name, *arguments, **dict(options, reuse=tf.AUTO_REUSE))
        self._awaited.add(name)
        self._promised.add(name)
        return variable

    def _get_for_validation(self, getter, name, *arguments, **options):
        if options.get("reuse") is not True:
            self._awaited.discard(name)
        if name in self._promised and not options.get("reuse"):
            # Once: a second variable of that name is as wrong as ever.
            self._promised.discard(name)
            options["reuse"] = True
        return getter(name, *arguments, **options)


@contextlib.contextmanager
def _custom_getter(custom):
    """Let `custom` make the variables of the current scope and those below; a getter of the user's stays at work."""
    scope = tf.get_variable_scope()
    before = scope.custom_getter

    def get(getter, *arguments, **options):
        return custom(getter if before is None else functools.partial(before, getter), *arguments, **options)

    scope.set_custom_getter(get)
    try:
        yield
    finally:
        scope.set_custom_getter(before)
