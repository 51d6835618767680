"""The deprecated names: specs, the hooks, and a real cluster of parameter server, master, workers and evaluator."""

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

import trainer
from tests.trainer.launch import ROOT, WORKERS
from trainer.compat import tf
from trainer.legacy_spec import spec_of_environment

pytestmark = pytest.mark.filterwarnings("ignore:trainer.*deprecated:DeprecationWarning")

LIMIT_S = 150
PS, WORKER, MASTER = ["h1:1", "h2:1"], ["h3:1", "h4:1", "h5:1"], "h6:1"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("TF_CONFIG", "JOB_NAME", "TASK_INDEX", "PS_HOSTS", "WORKER_HOSTS", "MASTER_HOST"):
        monkeypatch.delenv(name, raising=False)


# id, arguments, (is_ps, is_worker, is_master, is_evaluator), (num_workers, num_ps, shard_index)
SPECS = [
    ("alone", {}, (0, 0, 1, 0), (1, 0, 0)),
    ("ps", {"task_type": "ps", "index": 1, "ps_hosts": PS, "worker_hosts": WORKER}, (1, 0, 0, 0), (3, 2, 1)),
    (
        "chief worker",
        {"task_type": "worker", "ps_hosts": PS, "worker_hosts": WORKER},
        (0, 1, 1, 0),
        (3, 2, 0),
    ),
    (
        "worker",
        {"task_type": "worker", "index": 2, "ps_hosts": PS, "worker_hosts": WORKER},
        (0, 1, 0, 0),
        (3, 2, 2),
    ),
    ("master", {"ps_hosts": PS, "worker_hosts": WORKER, "master": MASTER}, (0, 0, 1, 0), (4, 2, 0)),
    (
        "master in a list",
        {"ps_hosts": PS, "worker_hosts": WORKER, "master": [MASTER]},
        (0, 0, 1, 0),
        (4, 2, 0),
    ),
    (
        "worker of a master",
        {"task_type": "worker", "index": 0, "ps_hosts": PS, "worker_hosts": WORKER, "master": MASTER},
        (0, 1, 0, 0),
        (4, 2, 1),
    ),
    ("master and ps", {"ps_hosts": PS, "master": MASTER}, (0, 0, 1, 0), (1, 2, 0)),
]


@pytest.mark.parametrize(("arguments", "kinds", "numbers"), [r[1:] for r in SPECS], ids=[r[0] for r in SPECS])
@pytest.mark.parametrize("as_text", [False, True])
def test_spec(arguments, kinds, numbers, as_text):
    if as_text:
        arguments = {k: ", ".join(v) if isinstance(v, list) else v for k, v in arguments.items()}
    spec = trainer.TaskSpecDef(**arguments)
    assert (spec.is_ps(), spec.is_worker(), spec.is_master(), spec.is_evaluator()) == kinds
    assert (spec.num_workers, spec.num_ps, spec.shard_index) == numbers
    assert spec.ps_hosts == (PS if "ps_hosts" in arguments else None)
    assert spec.worker_hosts == (WORKER if "worker_hosts" in arguments else None)


@pytest.mark.parametrize("master", [None, MASTER])
def test_last_worker_as_evaluator(master):
    specs = [trainer.TaskSpecDef("worker", i, "t", PS, WORKER, master) for i in range(3)]
    reduced = [spec.use_last_worker_as_evaluator() for spec in specs]
    assert [spec.is_evaluator() for spec in specs] == [False] * 3
    assert [spec.is_evaluator() for spec in reduced] == [False, False, True]
    assert [spec.worker_hosts for spec in reduced] == [WORKER[:2]] * 3
    assert [spec.num_workers for spec in reduced] == [3 if master else 2] * 3
    assert [spec.trial for spec in reduced] == ["t"] * 3
    assert reduced[2].target() is None
    assert reduced[2].device_fn() is None


def test_no_worker_to_spare():
    one = trainer.TaskSpecDef("worker", 0, ps_hosts=PS, worker_hosts=WORKER[:1])
    for spec in (trainer.TaskSpecDef(), one):
        with pytest.raises(ValueError, match="expected at least 2"):
            spec.use_last_worker_as_evaluator()


def test_device_fn_puts_variables_on_the_ps():
    spec = trainer.TaskSpecDef("worker", 1, ps_hosts=PS, worker_hosts=WORKER)
    with tf.Graph().as_default(), tf.device(spec.device_fn()):
        variables = [tf.get_variable(name, []) for name in "abc"]
        total = tf.add_n(variables)
    assert [v.device for v in variables] == ["/job:ps/task:0", "/job:ps/task:1", "/job:ps/task:0"]
    assert total.device == "/job:worker/task:1"
    assert trainer.TaskSpecDef().device_fn() is None


# id, arguments of TaskSpecDef, error, part of its text
BAD = [
    ("type", {"task_type": "chief"}, ValueError, "'chief'"),
    ("index word", {"index": "one"}, ValueError, "'one'"),
    ("index negative", {"index": -1}, ValueError, "-1"),
    ("index float", {"index": 1.5}, TypeError, "1.5"),
    ("sparse table", {"worker_hosts": {"1": "h1:1"}}, TypeError, "sparse"),
    ("sparse list", {"ps_hosts": ["h1:1", None]}, TypeError, "sparse"),
    ("two masters", {"master": "h1:1,h2:1"}, ValueError, "one process"),
]
# The same for specs that are refused when they are used.
UNFIT = [
    ("ps alone", {"task_type": "ps"}, "at least one parameter server"),
    ("no workers", {"ps_hosts": PS}, "at least one parameter server"),
    ("no ps", {"task_type": "worker", "worker_hosts": WORKER}, "at least one parameter server"),
    ("beyond", {"task_type": "worker", "index": 4, "ps_hosts": PS, "worker_hosts": WORKER}, "got 3 hosts"),
    ("master unknown", {"ps_hosts": PS, "worker_hosts": WORKER}, "got 0 hosts"),
    ("ps beyond", {"task_type": "ps", "index": 2, "ps_hosts": PS, "worker_hosts": WORKER}, "got 2 hosts"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_wrong_spec_is_refused(arguments, error, text):
    with pytest.raises(error) as caught:
        trainer.TaskSpecDef(**arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(("arguments", "text"), [row[1:] for row in UNFIT], ids=[row[0] for row in UNFIT])
def test_unfit_spec_is_refused_when_used(arguments, text):
    spec = trainer.TaskSpecDef(**arguments)
    for use in (spec.device_fn, spec.create_server, spec.target):
        with pytest.raises(ValueError, match=text):
            use()
    with tf.Graph().as_default(), pytest.raises(ValueError, match=text):
        trainer.DistributedSession(spec)


def test_tf_config(monkeypatch):
    cluster = {"ps": PS, "worker": WORKER, "master": [MASTER]}
    task = {"type": "worker", "index": 1, "trial": 7}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setenv("JOB_NAME", "ps")  # TF_CONFIG comes first
    for make in (trainer.TaskSpec, trainer.create_task_spec_def):
        spec = make()
        assert isinstance(spec, trainer.TaskSpecDef)
        assert (spec.type, spec.shard_index, spec.num_workers, spec.num_ps, spec.trial) == (
            "worker",
            2,
            4,
            2,
            7,
        )
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert trainer.TaskSpec().is_master()


def test_environment_variables(monkeypatch):
    for name, value in (("JOB_NAME", "worker"), ("TASK_INDEX", "2"), ("PS_HOSTS", ",".join(PS))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORKER_HOSTS", ",".join(WORKER))
    spec = trainer.TaskSpec()
    assert (spec.type, spec.shard_index, spec.num_workers, spec.num_ps, spec.trial) == (
        "worker",
        2,
        3,
        2,
        None,
    )
    monkeypatch.setenv("MASTER_HOST", MASTER)
    assert (trainer.TaskSpec().shard_index, trainer.TaskSpec().num_workers) == (3, 4)


# id, environment, error, part of its text
BAD_ENVIRONMENTS = [
    ("nothing", {}, ValueError, "neither TF_CONFIG nor JOB_NAME"),
    ("no index", {"JOB_NAME": "ps"}, ValueError, "TASK_INDEX is not set"),
    ("other job", {"JOB_NAME": "nightly", "TASK_INDEX": "0"}, ValueError, "'nightly'"),
    ("no JSON", {"TF_CONFIG": "{"}, ValueError, "not JSON"),
    ("sparse, no JSON", {"TF_CONFIG": '{"cluster": {"ps": {1: "h"}}}'}, ValueError, "sparse"),
    ("sparse", {"TF_CONFIG": '{"cluster": {"ps": {"1": "h"}}}'}, TypeError, "sparse"),
    ("list", {"TF_CONFIG": "[1]"}, ValueError, "expected JSON such as"),
    ("task no table", {"TF_CONFIG": '{"task": 3}'}, ValueError, "expected JSON such as"),
]


@pytest.mark.parametrize(
    ("values", "error", "text"), [r[1:] for r in BAD_ENVIRONMENTS], ids=[r[0] for r in BAD_ENVIRONMENTS]
)
def test_wrong_environment_is_refused(values, error, text, monkeypatch):
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error) as caught:
        spec_of_environment()
    assert text in str(caught.value)


def test_defaults():
    expected = {
        "task_spec": None,
        "checkpoint_dir": None,
        "scaffold": None,
        "hooks": None,
        "chief_only_hooks": None,
        "save_checkpoint_secs": 600,
        "config": None,
        "stop_grace_period_secs": 120,
        "log_step_count_steps": 100,
    }
    for function in (trainer.DistributedSession, trainer.create_distributed_session):
        parameters = inspect.signature(function).parameters
        given = {name: p.default for name, p in parameters.items() if not name.startswith("save_summaries")}
        assert given == expected
        assert list(parameters)[6:8] == ["save_summaries_steps", "save_summaries_secs"]


# ---- a process of its own, with no server ---------------------------------------------------------------------


def _counter():
    """Return (step, variable) of a graph in which each step adds 1 to the variable and the global step."""
    tf.train.get_or_create_global_step()
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    return tf.group(tf.assign_add(w, 1), tf.assign_add(tf.train.get_global_step(), 1)), w


def test_session_alone_writes_and_restores(tmp_path):
    for start in (0, 3):
        with tf.Graph().as_default():
            step, w = _counter()
            tf.summary.scalar("w", w)
            with trainer.DistributedSession(checkpoint_dir=tmp_path) as session:
                assert session.run(w) == start
                for _ in range(3):
                    session.run(step)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-6")
    assert any("tfevents" in path.name for path in tmp_path.iterdir())


def test_stop_at_time():
    with tf.Graph().as_default():
        step, w = _counter()
        with trainer.DistributedSession(hooks=[trainer.StopAtTimeHook(0.4)]) as session:
            started_s = time.monotonic()
            while not session.should_stop():
                session.run(step)
                last = session._tf_sess().run(w)
                time.sleep(0.02)
                assert time.monotonic() - started_s < LIMIT_S
    # begin() comes before the session is made, so less than 0.4 s of it may be left; more is for slow machines.
    assert last >= 1
    for wrong, error in ((-1, ValueError), (float("nan"), ValueError), ("3", TypeError)):
        with pytest.raises(error, match="time_running"):
            trainer.StopAtTimeHook(wrong)


class _Preempted(tf.train.SessionRunHook):
    """Loses the session once."""

    def __init__(self):
        self.lost = False

    def before_run(self, run_context):
        if not self.lost:
            self.lost = True
            raise tf.errors.AbortedError(None, None, "the parameter server is gone")


def test_load_checkpoint_restores_once(tmp_path):
    with tf.Graph().as_default():
        _, w = _counter()
        saver = tf.train.Saver([w])
        with tf.Session() as session:
            session.run(w.assign(7))
            path = saver.save(session, str(tmp_path / "model"))
    for hooks, expected in (([], 7), ([_Preempted()], 0)):
        with tf.Graph().as_default():
            _, w = _counter()
            hooks = [trainer.LoadCheckpoint(tf.train.Saver([w]), path), *hooks]
            with trainer.DistributedSession(hooks=hooks) as session:
                # A session made anew begins with the initial value: the checkpoint is not loaded a second time.
                assert session.run(w) == expected
    for wrong in ((None, path), (saver, None)):
        with pytest.raises(TypeError, match="expected"):
            trainer.LoadCheckpoint(*wrong)


def test_wrong_session_is_refused():
    with tf.Graph().as_default(), pytest.raises(TypeError, match="task_spec: got 3"):
        trainer.DistributedSession(3)
    if tf.executing_eagerly():
        with pytest.raises(RuntimeError, match="eagerly"):
            trainer.DistributedSession()


def test_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        spec = trainer.TaskSpecDef("worker", 0, ps_hosts="127.0.0.1:1", worker_hosts=address)
        with pytest.raises(RuntimeError, match=address):
            spec.create_server()


# ---- a cluster -------------------------------------------------------------------------------------------------


def _free_addresses(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    finally:
        for each in sockets:
            each.close()


class _Cluster:
    """Processes of the worker script, and the files with which they and the test speak."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = {}

    def start(self, name, **environment):
        kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        kept.update(environment, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        with open(str(self.folder / (name + ".log")), "w") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(WORKERS / "parameter_server.py"), name, str(self.folder)],
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, name):
        return (self.folder / (name + ".log")).read_text()

    def wait_for(self, condition, name):
        """Wait until `condition()`; `name` must not have ended before."""
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            ended = self.processes[name].poll() is not None
            assert condition() or (not ended and time.monotonic() < end_s), self.log(name)
            time.sleep(0.05)

    def end(self, name, how):
        process = self.processes[name]
        process.send_signal(how)
        return process.wait(timeout=30)

    def close(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(timeout=30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Run the cluster; return what each process told, the statuses, and the checkpoint's step after the first run."""
    cluster = _Cluster(tmp_path_factory.mktemp("cluster"))
    ps, master, *workers = _free_addresses(5)
    hosts = {"PS_HOSTS": ps, "WORKER_HOSTS": ",".join(workers), "MASTER_HOST": master}
    described = {"ps": [ps], "worker": workers, "master": [master]}

    def config(kind, index):
        return json.dumps({"cluster": described, "task": {"type": kind, "index": index, "trial": 4}})

    try:
        cluster.start("ps", JOB_NAME="ps", TASK_INDEX="0", **hosts)
        cluster.start("master", TF_CONFIG=config("master", 0))
        cluster.start("worker0", JOB_NAME="worker", TASK_INDEX="0", **hosts)
        cluster.start("worker1", TF_CONFIG=config("worker", 1))
        cluster.start("evaluator", JOB_NAME="worker", TASK_INDEX="2", **hosts)
        cluster.wait_for((cluster.folder / "master.first").exists, "master")
        cluster.start("ps2", TF_CONFIG=config("ps", 0))
        step = int(tf.train.latest_checkpoint(str(cluster.folder / "checkpoints")).rpartition("-")[2])
        statuses = {}
        for name in ("worker0", "worker1", "evaluator"):
            statuses[name] = cluster.processes[name].wait(timeout=LIMIT_S)
        # The second run: the parameter server, and with it all it held, is another one.
        statuses["ps"] = cluster.end("ps", signal.SIGKILL)
        (cluster.folder / "again").write_text("")
        cluster.wait_for(lambda: "still waiting" in cluster.log("master"), "master")
        (cluster.folder / "go").write_text("")
        statuses["master"] = cluster.processes["master"].wait(timeout=LIMIT_S)
        statuses["ps2"] = cluster.end("ps2", signal.SIGINT)
    finally:
        cluster.close()
    logs = "\n".join(f"== {name}\n{cluster.log(name)}" for name in cluster.processes)
    told = {}
    for name in cluster.processes:
        assert (cluster.folder / name).exists(), logs
        told[name] = json.loads((cluster.folder / name).read_text())
    return {"told": told, "statuses": statuses, "step": step, "logs": logs, "ps": ps}


def test_tasks_end_and_servers_serve(cluster):
    statuses = dict(cluster["statuses"])
    assert statuses.pop("ps") == -signal.SIGKILL
    assert statuses.pop("ps2") != 0
    assert set(statuses.values()) == {0}, cluster["logs"]
    # Ctrl-C reached the parameter server, which served until then.
    assert "KeyboardInterrupt" in cluster["logs"].partition("== ps2")[2]
    assert "came back" not in cluster["logs"]


def test_specs_of_the_cluster(cluster):
    told = cluster["told"]
    kinds = {"ps": 0, "ps2": 0, "worker0": 1, "worker1": 1, "master": 2, "evaluator": 3}
    for name, facts in told.items():
        expected = [False] * 4
        expected[kinds[name]] = True
        if name == "evaluator":
            expected[1] = True
        assert facts["is"] == expected, name
        assert facts["numbers"][:2] == [3, 1]
        assert facts["whole"] == [4, False]
        assert facts["trial"] == (4 if name in ("master", "worker1", "ps2") else None)
    shards = [told[name]["numbers"][2] for name in ("master", "worker0", "worker1")]
    assert shards == [0, 1, 2]
    assert told["evaluator"]["target"] is None


def test_cluster_trains_one_variable(cluster):
    tasks = {"master": "/job:master/task:0", "worker0": "/job:worker/task:0", "worker1": "/job:worker/task:1"}
    firsts = {name: cluster["told"][name]["first"] for name in tasks}
    for name, device in tasks.items():
        assert firsts[name]["w_device"] == "/job:ps/task:0"
        assert firsts[name]["loss_device"] == device
        # Every task made its part, and saw that of the others.
        assert firsts[name]["own"] >= 15
        assert firsts[name]["w"] >= firsts[name]["own"] + 30
    made = sum(first["own"] for first in firsts.values())
    assert 45 <= cluster["step"] <= made
    assert max(first["w"] for first in firsts.values()) <= made
    assert not any(cluster["told"][name]["horovod"] for name in tasks)


def test_evaluator_reads_and_writes_nothing(cluster):
    evaluator = cluster["told"]["evaluator"]
    assert evaluator["value"][1] == cluster["step"]
    assert evaluator["value"][0] == pytest.approx(cluster["step"], abs=3)
    assert evaluator["same_files"]


def test_second_run_restores(cluster):
    # By now both workers have ended; the session needs none of them.
    again, evaluated = cluster["told"]["master"]["again"], cluster["told"]["evaluator"]["value"]
    assert again["restored"] == evaluated
    assert again["after"] == [value + 5 for value in evaluated]
    assert "parameter servers {} to be up".format(cluster["ps"]) in cluster["logs"]


def test_names_warn_once_where_they_are_used(cluster):
    for facts in cluster["told"].values():
        ((message, category, filename),) = facts["warnings"]
        assert category == "DeprecationWarning"
        assert filename == "parameter_server.py"
        assert "TaskSpec" in message
        assert "2018-10-30" in message
        assert "trainer.Trainer" in message


NAMES = """
import warnings, trainer
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        trainer.TaskSpecDef(ps_hosts="h1:1", worker_hosts="h2:1,h3:1").use_last_worker_as_evaluator()
        for name in ("TaskSpec", "create_task_spec_def"):
            getattr(trainer, name)().use_last_worker_as_evaluator()
        for name in ("StopAtTimeHook", "LoadCheckpoint", "DistributedSession", "create_distributed_session"):
            try:
                getattr(trainer, name)(*["wrong"] * (1 + (name == "LoadCheckpoint")))
            except (TypeError, RuntimeError):
                pass
said = [str(w.message).split()[0] for w in caught if w.filename == __file__]
deprecated = set(trainer.__all__) - {"Trainer", "data"}
assert sorted(said) == sorted("trainer." + name for name in deprecated), said
assert len(said) == sum("2018-10-30" in str(w.message) for w in caught), [str(w.message) for w in caught]
"""


def test_each_name_warns_once_at_its_caller(tmp_path):
    script = tmp_path / "names.py"
    script.write_text(NAMES)
    cluster = {"ps": PS, "worker": WORKER}
    environment = dict(os.environ, PYTHONPATH=str(ROOT), TF_CONFIG=json.dumps({"cluster": cluster}))
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=LIMIT_S)
