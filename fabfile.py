"""`fab` looks for a fabfile; the tasks themselves are in tasks.py."""

from invoke.collection import Collection

import tasks

namespace = Collection.from_module(tasks)
