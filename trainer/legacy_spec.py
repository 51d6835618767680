"""What one process is in a cluster with parameter servers, for the deprecated names; TensorFlow's servers, no MPI."""

import copy
import json
import numbers
import os
import socket
import threading
import warnings

from trainer.compat import tf

TASK_TYPES = ("master", "worker", "ps")

_warned = set()


def warn_once(name):
    """Warn the caller of the caller that `name` is deprecated, once in a process."""
    if name not in _warned:
        _warned.add(name)
        message = (
            f"trainer.{name} is deprecated since 2018-10-30: use trainer.Trainer, which needs no servers"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=3)


def _hosts(name, value):
    """Return addresses, given as a list or as text with commas, as a new list; None is an empty one."""
    if value is None:
        return []
    hosts = value.split(",") if isinstance(value, str) else value
    if not isinstance(hosts, (list, tuple)) or not all(isinstance(host, str) for host in hosts):
        # TF_CONFIG may be met with tables {"1": "h1:2222"} or with null where a task has no address.
        raise TypeError(
            f"{name}: got {value!r}, expected a list of addresses or text such as 'h1:2222,h2:2222'; sparse arrays "
            "(tables from index to address, lists with holes) are not supported: list the address of every task"
        )
    return [host.strip() for host in hosts if host.strip()]


def _index(value):
    """Return a task's index, which an environment variable gives as text."""
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, str)):
        raise TypeError(f"index: got {value!r}, expected an integer >= 0")
    try:
        index = int(value)
    except ValueError:
        index = -1
    if index < 0:
        raise ValueError(f"index: got {value!r}, expected an integer >= 0")
    return index


class TaskSpecDef:
    """Says what this process is in a cluster of parameter servers, workers and perhaps a master.

    A cluster has at least one parameter server, and a worker or a master. Without hosts the process trains alone.
    Deprecated since 2018-10-30: use `Trainer`.

    Args:
        task_type: "master", "worker" or "ps".
        index: this task's place in the hosts of its type, counted from 0.
        trial: the number of the trial in a search for hyperparameters, for the caller's use.
        ps_hosts, worker_hosts: addresses `host:port`, as a list or as text with commas.
        master: address of the master, which trains like a worker; without one the first worker is the chief.

    Attributes:
        num_workers: processes that train, the master included; 1 without hosts.
        num_ps: parameter servers.
        shard_index: which of the `num_workers` shards of the data is this task's: 0 is the master's, and where there
            is one worker i has shard i + 1.

    Raises:
        TypeError, ValueError: an argument is wrong by itself. Whether task and hosts fit together is checked when the
            spec is used.
    """

    def __init__(
        self, task_type="master", index=0, trial=None, ps_hosts=None, worker_hosts=None, master=None
    ):
        warn_once("TaskSpecDef")
        self._set_up(task_type, index, trial, ps_hosts, worker_hosts, master)

    def _set_up(self, task_type, index, trial, ps_hosts, worker_hosts, master):
        if task_type not in TASK_TYPES:
            raise ValueError(f"task_type: got {task_type!r}, expected 'master', 'worker' or 'ps'")
        masters = _hosts("master", master)
        if len(masters) > 1:
            raise ValueError(f"master: got {master!r}, expected the address of one process")
        self.type = task_type
        self.trial = trial
        self.ps_hosts = _hosts("ps_hosts", ps_hosts) or None
        self.worker_hosts = _hosts("worker_hosts", worker_hosts) or None
        self.master = master
        self._index = _index(index)
        self._jobs = {"ps": self.ps_hosts or [], "worker": self.worker_hosts or [], "master": masters}
        self._server = None
        self.num_ps = len(self._jobs["ps"])
        self.num_workers = max(1, len(self._jobs["worker"]) + len(masters))
        self.shard_index = self._index + 1 if masters and self.is_worker() else self._index

    def is_ps(self):
        """Say whether this task is a parameter server."""
        return self.type == "ps"

    def is_worker(self):
        """Say whether this task is a worker (the master is not called one, though it trains)."""
        return self.type == "worker"

    def is_master(self):
        """Say whether this task is the chief: the master, else the first worker, or a process that trains alone."""
        if not self._has_cluster():
            return True
        return (self.type, self._index) == ("master" if self._jobs["master"] else "worker", 0)

    def is_evaluator(self):
        """Say whether this is the worker behind the last one that trains."""
        return self._has_cluster() and self.is_worker() and self._index == len(self._jobs["worker"])

    def use_last_worker_as_evaluator(self):
        """Return a new spec of the same task in the cluster without its last worker, which is free to evaluate.

        Raises:
            ValueError: fewer than two processes train.
            RuntimeError: this task's server runs already, as a member of the whole cluster.
        """
        if self.num_workers < 2 or not self._jobs["worker"]:
            raise ValueError(
                f"use_last_worker_as_evaluator: got {self.num_workers} process that trains, expected at least 2, as "
                "the last worker would train no more"
            )
        if self._server is not None:
            raise RuntimeError(
                "use_last_worker_as_evaluator: the server of this task has been created; expected the call before "
                "create_server() and target()"
            )
        spec = copy.copy(self)
        spec._set_up(
            self.type, self._index, self.trial, self.ps_hosts, self._jobs["worker"][:-1], self.master
        )
        return spec

    def device_fn(self):
        """Return what `tf.device` needs to put variables on the parameter servers and the rest on this task.

        None (no device) for a process that trains alone and for the evaluator.

        Raises:
            ValueError: this task has no place in the cluster.
        """
        if not self._in_cluster():
            return None
        return tf.train.replica_device_setter(
            ps_device="/job:ps", worker_device=self.device(), cluster=self._cluster_spec()
        )

    def create_server(self):
        """Start this task's server, once; a parameter server serves in this call until its process is ended.

        Nothing to start for a process that trains alone and for the evaluator.

        Raises:
            ValueError: this task has no place in the cluster.
            RuntimeError: the server cannot start, for instance because its port is taken.
        """
        if self._server is not None or not self._in_cluster():
            return
        address = self._jobs[self.type][self._index]
        try:
            _check_port(address)
            self._server = tf.train.Server(self._cluster_spec(), job_name=self.type, task_index=self._index)
        except (OSError, tf.errors.OpError) as error:
            raise RuntimeError(
                f"{self}: its server cannot start at {address} ({error}); expected host:port with a port that is free "
                "on this host"
            ) from error
        if self.is_ps():
            # Joining never returns and hears no signal; the main thread waits where Ctrl-C reaches it.
            serving = threading.Thread(target=self._server.join, daemon=True)
            serving.start()
            serving.join()

    def target(self):
        """Return the address of this task's server for a session, starting the server if need be; None without one."""
        self.create_server()
        return None if self._server is None else self._server.target

    def device(self):
        """Return the TensorFlow device of this task."""
        return f"/job:{self.type}/task:{self._index}"

    def chief(self):
        """Return type, index and address of the chief of the cluster in words."""
        job = "master" if self._jobs["master"] else "worker"
        return f"{job} 0 at {self._jobs[job][0]}"

    def __str__(self):
        return f"{self.type} {self._index}"

    def _cluster_spec(self):
        return tf.train.ClusterSpec({job: hosts for job, hosts in self._jobs.items() if hosts})

    def _has_cluster(self):
        return bool(self._jobs["ps"] and (self._jobs["worker"] or self._jobs["master"]))

    def _in_cluster(self):
        """Say whether this task is one of several; check that it can be."""
        hosts = {job: ",".join(self._jobs[job]) for job in TASK_TYPES}
        if not self._has_cluster():
            if self.is_ps() or self.num_ps or self.num_workers > 1:
                raise ValueError(
                    f"{self}: got ps_hosts {hosts['ps']!r}, worker_hosts {hosts['worker']!r} and "
                    f"master {hosts['master']!r}, expected at least one parameter server, and a worker or a master"
                )
            return False
        if self.is_evaluator():
            return False
        if self._index >= len(self._jobs[self.type]):
            raise ValueError(
                f"{self}: got {len(self._jobs[self.type])} hosts of this type "
                f"({hosts[self.type]!r}), expected this task's own address among them"
            )
        return True


def _check_port(address):
    """Raise OSError where another process listens: TensorFlow 2 would share the port with it."""
    port = address.rpartition(":")[2]
    if port.isdigit():  # else TensorFlow says what is wrong
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(port)))


def _spec(source, **arguments):
    """Make a spec without the warning of the class's own name; errors tell the source of the arguments."""
    spec = TaskSpecDef.__new__(TaskSpecDef)
    try:
        spec._set_up(**arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{source}: {error}") from error
    return spec


def _spec_of_tf_config(text):
    expected = (
        'expected JSON such as {"cluster": {"ps": ["h1:2222"], "worker": ["h2:2222"]}, '
        '"task": {"type": "worker", "index": 0}}'
    )
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"TF_CONFIG: got {text!r}, which is not JSON ({error}); {expected}; sparse arrays (numbers as keys, lists "
            "with holes) are not JSON and not supported: list the address of every task"
        ) from error
    parts = (
        [config] if not isinstance(config, dict) else [config.get(key) or {} for key in ("task", "cluster")]
    )
    if not all(isinstance(part, dict) for part in (config, *parts)):
        raise ValueError(f"TF_CONFIG: got {text!r}; {expected}")
    task, cluster = parts
    return _spec(
        "TF_CONFIG",
        task_type=task.get("type", "master"),
        index=task.get("index", 0),
        trial=task.get("trial"),
        ps_hosts=cluster.get("ps"),
        worker_hosts=cluster.get("worker"),
        master=cluster.get("master"),
    )


def spec_of_environment():
    """Return the `TaskSpecDef` that the environment describes.

    `TF_CONFIG` (JSON with `task` and `cluster`) if it is set, else `JOB_NAME`, `TASK_INDEX`, `PS_HOSTS`,
    `WORKER_HOSTS` and `MASTER_HOST`. Deprecated since 2018-10-30: use `Trainer`.

    Raises:
        TypeError, ValueError: neither is set, or what they say is wrong.
    """
    environment = os.environ
    if environment.get("TF_CONFIG"):
        return _spec_of_tf_config(environment["TF_CONFIG"])
    if not environment.get("JOB_NAME"):
        raise ValueError(
            "TaskSpec: neither TF_CONFIG nor JOB_NAME is set; expected TF_CONFIG (JSON with task and cluster), or "
            "JOB_NAME, TASK_INDEX, PS_HOSTS, WORKER_HOSTS and perhaps MASTER_HOST in the environment"
        )
    if "TASK_INDEX" not in environment:
        raise ValueError(
            f"TaskSpec: JOB_NAME is {environment['JOB_NAME']!r} and TASK_INDEX is not set; expected this task's index"
        )
    return _spec(
        "JOB_NAME, TASK_INDEX, PS_HOSTS, WORKER_HOSTS, MASTER_HOST",
        task_type=environment["JOB_NAME"],
        index=environment["TASK_INDEX"],
        trial=None,
        ps_hosts=environment.get("PS_HOSTS"),
        worker_hosts=environment.get("WORKER_HOSTS"),
        master=environment.get("MASTER_HOST"),
    )
