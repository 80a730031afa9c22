"""The local launcher with real processes: results, failures, signals, deaths, and nothing left (cases C21, C22)."""

from __future__ import annotations

import logging
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from callbacks import Callback
from tests.helpers.modules import Net, quiet
from tests.helpers.waiting import gone, wait_for
from trainer.errors import MisconfigurationException, SIGTERMException
from trainer.launchers import InProcessLauncher, LocalLauncher, ProcessError, local
from trainer.launchers.local import _first_failure
from trainer.launchers.supervisor import Event
from trainer.world import World

ROOT = Path(__file__).resolve().parents[2]


class OwnError(Exception):
    """An exception that keeps data, for the way back."""

    def __init__(self, number):
        super().__init__(f"number {number}")
        self.number = number

    def __reduce__(self):
        return OwnError, (self.number,)


class OtherArguments(Exception):
    """Python alone cannot unpickle it: its `__init__` takes other arguments than `args` holds."""

    def __init__(self, one, two):
        super().__init__(f"{one}{two}")
        self.two = two


@pytest.fixture(autouse=True)
def temp_folder(monkeypatch, tmp_path_factory):
    """A temp folder of the test's own, which must be empty again at its end. (Short: it holds a socket.)"""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
        assert [path.name for path in Path(folder).iterdir() if path.name.startswith(("trainer-", "torchelastic"))] == []


def joined(world, body=None):
    """Open a gloo group, run `body(world)` and close it."""
    dist.init_process_group("gloo", init_method=world.init_method, rank=world.rank, world_size=world.world_size)
    dist.barrier()  # one that leaves at once would cut off another that still connects to it
    try:
        return body(world) if body is not None else None
    finally:
        dist.destroy_process_group()


def test_in_process():
    assert InProcessLauncher().launch(lambda world: world) == World(0, 1, 0, 1, 0, 1, None)
    with pytest.raises(MisconfigurationException, match="one process cannot act as 2 nodes"):
        InProcessLauncher().check(1, 2)


def listening():
    """Where this process and its parent listen."""
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # LISTEN
                addresses.add((fields[9], fields[1].split(":")[0]))
    owned = set()
    for pid in (os.getpid(), os.getppid()):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                owned.add(os.readlink(fd)[8:-1])
            except OSError:
                pass
    return {address for inode, address in addresses if inode in owned}


def test_two_ranks_meet_on_loopback_only_and_rank_zero_answers(temp_folder, tmp_path):
    offset, weight = 10, torch.arange(3.0)

    class Local:
        def __init__(self, value):
            self.value = value

    def task(world):
        def body(world):
            total = torch.tensor(float(world.rank + offset))
            dist.all_reduce(total)
            return total.item(), listening()

        private = [p for p in temp_folder.iterdir() if p.name.startswith("trainer-")]
        modes = [stat.S_IMODE(p.stat().st_mode) for p in private]
        return Local(joined(world, body)), world, weight + 1, modes, os.getcwd(), sys.path, os.environ["OMP_NUM_THREADS"]

    value, world, tensor, modes, cwd, path, threads = LocalLauncher(2).launch(task)
    assert isinstance(value, Local) and value.value == (21.0, {"0100007F"})  # 127.0.0.1: the store in the launcher, gloo in the rank
    assert world == World(0, 2, 0, 2, 0, 1, "env://")
    assert tensor.tolist() == [1.0, 2.0, 3.0]
    assert modes == [0o700]
    assert cwd == str(tmp_path) and path == sys.path
    assert threads == os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))


def test_the_first_exception_keeps_type_data_rank_and_traceback():
    def task(world):
        def body(world):
            if world.rank == 1:
                raise OwnError(7)
            dist.barrier()

        joined(world, body)

    with pytest.raises(OwnError, match="number 7") as caught:
        LocalLauncher(2).launch(task)
    assert caught.value.number == 7
    note = getattr(caught.value, "__notes__", [str(caught.value.__cause__)])[-1]
    assert "Rank 1 raised it at:" in note
    assert note.rstrip().endswith("OwnError: number 7")
    assert "raise OwnError(7)" in note  # the source line: file names survive the journey


def test_an_exception_with_other_arguments_keeps_its_type():
    def task(world):
        raise OtherArguments(1, 2)

    with pytest.raises(OtherArguments, match="12") as caught:
        LocalLauncher(1).launch(task)
    assert caught.value.two == 2


def test_an_exception_that_cannot_travel_becomes_a_runtime_error():
    def task(world):
        raise OtherArguments(1, threading.Lock())

    with pytest.raises(RuntimeError, match=r"rank 0 raised .*OtherArguments: 1<unlocked") as caught:
        LocalLauncher(1).launch(task)
    assert type(caught.value) is RuntimeError


def test_exit_codes_come_back():
    with pytest.raises(SystemExit) as caught:
        LocalLauncher(2).launch(lambda world: sys.exit(5) if world.rank else time.sleep(60))
    assert caught.value.code == 5


def test_all_ranks_stopped_by_sigterm_end_in_their_own_time():
    def task(world):
        if world.rank == 0:
            time.sleep(0.5)  # clean-up of rank 0, which rank 1's end must not cut off
            Path("cleaned").touch()
        raise SIGTERMException

    with pytest.raises(SIGTERMException) as caught:
        LocalLauncher(2).launch(task)
    assert caught.value.code == 143
    assert Path("cleaned").exists()


def test_the_one_who_lost_its_peer_is_not_the_one_to_blame(temp_folder):
    def task(world):
        try:
            dist.init_process_group("gloo", init_method="env://")
            if world.rank == 1:
                raise OwnError(1)
            dist.barrier()
        finally:
            dist.destroy_process_group()
            if world.rank == 1:  # a slow clean-up: rank 0 fails and reports first
                wait_for(lambda: list(temp_folder.glob("trainer-*/report.0")))

    with pytest.raises(OwnError, match="number 1") as caught:
        LocalLauncher(2).launch(task)
    said = "\n".join(getattr(caught.value, "__notes__", [str(caught.value.__cause__)]))
    assert "Also rank 0: RuntimeError, since its connection to another rank broke\n" in said and "gloo" not in said.partition("Rank 1 raised")[0]


def test_a_rank_killed_with_its_data_workers_ends_all():
    def task(world):
        import torch.utils.data

        loader = torch.utils.data.DataLoader(range(1000), num_workers=2)
        batches = iter(loader)
        next(batches)
        Path(f"pids.{world.rank}").write_text(" ".join(str(w.pid) for w in batches._workers) + f" {os.getpid()}")

        def body(world):
            dist.barrier()
            if world.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()

        joined(world, body)

    with pytest.raises(ProcessError, match=r"rank 0 was killed by signal 9 \(SIGKILL\)"):
        LocalLauncher(2).launch(task)
    pids = [int(pid) for rank in (0, 1) for pid in Path(f"pids.{rank}").read_text().split()]
    assert len(pids) == 6
    wait_for(lambda: all(gone(pid) for pid in pids))


def test_a_rank_that_ignores_sigterm_is_killed_by_us_and_not_left_to_torchelastic(monkeypatch):
    supervisors = []

    class Watched(local.Supervisor):
        def __enter__(self):
            supervisors.append(self)
            return super().__enter__()

    def task(world):
        if world.rank == 1:
            wait_for(Path("ready").exists)
            raise OwnError(2)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path("ready").touch()
        time.sleep(60)

    monkeypatch.setattr(local, "Supervisor", Watched)
    with pytest.raises(OwnError, match="number 2"):
        LocalLauncher(2).launch(task)
    assert supervisors[0].killed == {0}


def test_a_rank_that_leaves_without_a_word():
    with pytest.raises(ProcessError, match=r"rank 1 left without a result \(exit code 3\)"):
        LocalLauncher(2).launch(lambda world: os._exit(3) if world.rank else time.sleep(60))
    with pytest.raises(ProcessError, match=r"rank 0 left without a result \(exit code 0\)"):
        LocalLauncher(1).launch(lambda world: os._exit(0))


def test_what_cannot_be_sent_is_said_before_anything_starts():
    lock = threading.Lock()
    with pytest.raises(MisconfigurationException, match="cannot be sent to the ranks: cannot pickle '_thread.lock' object; it is lock. Make"):
        LocalLauncher(2).launch(lambda world: lock)


class Slots:
    __slots__ = ("file",)


@pytest.mark.parametrize("where", ["job.module.layers.1.handle", "job.module.things['a'][1]", "trainer.callbacks[0].handle", "job.loaders['train'].dataset.file"])
def test_the_part_that_cannot_be_sent_is_named(where):
    module, callback, data, lock = Net(), Callback(), Slots(), threading.Lock()
    data.file = None
    if "layers" in where:
        module.layers[1].handle = lock
    elif "things" in where:
        module.things = {"a": [1, lock]}
    elif "callbacks" in where:
        callback.handle = lock
    else:
        data.file = lock
    loader = torch.utils.data.DataLoader(data, sampler=[0])
    with pytest.raises(MisconfigurationException, match=f"; it is {re.escape(where)}. Make open files"):
        quiet(strategy="ddp", accelerator="cpu", devices=2, callbacks=[callback], max_epochs=1).fit(module, loader)


def test_a_rank_stopped_from_outside_is_told_and_not_its_neighbour():
    def task(world):
        def body(world):
            dist.barrier()
            if world.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            dist.barrier()

        joined(world, body)

    with pytest.raises(ProcessError, match=r"rank 0 was killed by signal 15 \(SIGTERM\)"):
        LocalLauncher(2).launch(task)


def test_the_ranks_show_the_warnings_that_the_caller_shows_and_signal_handlers_are_put_back(capfd):
    class Mine(UserWarning):
        pass

    def task(world):
        warnings.warn("hidden", Mine)
        try:
            warnings.warn("an error", FutureWarning)
        except FutureWarning:
            return [entry[0] for entry in warnings.filters[:2]]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=FutureWarning)
        warnings.filterwarnings("ignore", message="hid", category=Mine)
        before = signal.signal(signal.SIGTERM, handler := lambda number, frame: None)
        try:
            assert LocalLauncher(1).launch(task) == ["ignore", "error"]
            assert signal.getsignal(signal.SIGTERM) is handler
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGTERM, before)
    assert "hidden" not in capfd.readouterr().err


def test_a_result_that_cannot_be_sent():
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock'"):
        LocalLauncher(1).launch(lambda world: threading.Lock())


@pytest.mark.parametrize(("processes", "devices", "nodes", "message"), [(2, 2, 2, "torchrun or srun"), (2, 3, 1, "devices=3")])
def test_check(processes, devices, nodes, message):
    with pytest.raises(MisconfigurationException, match=message):
        LocalLauncher(processes).check(devices, nodes)


def test_no_processes():
    with pytest.raises(MisconfigurationException, match="at least 1 process"):
        LocalLauncher(0)


def test_from_a_thread_and_two_at_once():
    results = {}

    def run(name):
        results[name] = LocalLauncher(2).launch(lambda world: joined(world, lambda world: (name, world.world_size)))

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": ("a", 2), "b": ("b", 2)}
    assert not logging.getLogger("torch.distributed.elastic.agent.server.api").disabled


def test_which_failure_is_told():
    died, fault, victim = Event(0, "died"), Event(1, "fault"), Event(1, "victim")
    assert _first_failure([], set(), {}) is None
    assert _first_failure([died, victim], set(), {0: -9, 1: 1}) is died
    assert _first_failure([victim, died], set(), {0: -9, 1: 1}) is died
    stopped = Event(0, "died", after_end=True)
    assert _first_failure([victim, stopped], set(), {0: -15, 1: 1}) is victim  # stopped because of the other
    assert _first_failure([victim, died], set(), {0: -15, 1: 1}) is died  # stopped by somebody else, which is why the other failed
    assert _first_failure([fault, died], {0}, {0: -9, 1: 1}) is fault
    assert _first_failure([], set(), {1: 1}) == Event(1, "died")  # the interpreter did not even start


# Programs: what a user's script sees, and what happens to it from outside.

SLOW = """
    import os, sys, time
    from pathlib import Path
    from trainer.launchers import LocalLauncher

    def task(world):
        Path(f"pid.{world.rank}").write_text(str(os.getpid()))
        time.sleep(60)
"""


def start(script, **kwargs):
    """Run a script, in the test's directory, as a user does."""
    Path("script.py").write_text(textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "script.py"], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs
    )


def rank_pids():
    files = [Path("pid.0"), Path("pid.1")]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def test_a_plain_script_runs_once_and_launches_twice_and_its_output_is_in_order():
    process = start("""
        import os
        from trainer.launchers import LocalLauncher

        with open("lines", "a") as file:
            file.write("before\\n")
        lines = os.path.abspath("lines")

        class Model:
            def __init__(self):
                self.weight = 1
            def fit(self, world):
                if world.rank == 0:
                    print("rank", world.rank)
                return self.weight + world.world_size, os.getcwd(), type(self)

        print("before")
        first = LocalLauncher(2).launch(Model().fit)
        print("between")
        os.makedirs("other")
        os.chdir("other")
        second = LocalLauncher(2).launch(lambda world: Model().fit(world))
        assert first[0] == second[0] == 3 and first[2] is second[2] is Model
        assert first[1] == os.path.dirname(lines) and second[1] == os.getcwd()
        with open(lines, "a") as file:
            file.write("after\\n")
        print("after")
        """)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "before\nrank 0\nbetween\nrank 0\nafter\n", "")
    assert Path("lines").read_text() == "before\nafter\n"


def test_an_uncaught_exception_shows_the_ranks_traceback_last():
    process = start("""
        from trainer.launchers import LocalLauncher
        def task(world):
            if world.rank == 1:
                raise ValueError("boom on one")
        LocalLauncher(2).launch(task)
        """)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.rstrip().endswith("ValueError: boom on one")
    assert err.count("Traceback (most recent call last)") == 2
    assert 'raise ValueError("boom on one")' in err
    if sys.version_info >= (3, 11):
        assert err.index("Rank 1 raised it at:") > err.index("ValueError: boom on one")


def test_ctrl_c_reaches_the_caller_and_it_can_launch_again():
    process = start(SLOW + """
    try:
        LocalLauncher(2).launch(task)
    except KeyboardInterrupt:
        print("interrupted", LocalLauncher(2).launch(lambda world: world.world_size))
    """)
    pids = rank_pids()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "interrupted 2\n", "")
    assert all(gone(pid) for pid in pids)


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen():
    process = start("""
        import os, signal, time
        from pathlib import Path
        from trainer.launchers import LocalLauncher

        def task(world):
            signal.signal(signal.SIGINT, lambda *_: Path(f"asked.{world.rank}").touch())
            Path(f"pid.{world.rank}").write_text(str(os.getpid()))
            while True:
                time.sleep(60)

        LocalLauncher(2).launch(task)
        """)
    pids = rank_pids()
    process.send_signal(signal.SIGINT)
    wait_for(lambda: Path("asked.0").exists() and Path("asked.1").exists())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT and err.rstrip().endswith("KeyboardInterrupt")
    assert all(gone(pid) for pid in pids)


def test_sigterm_to_the_caller_ends_all_with_143():
    process = start(SLOW + """
    LocalLauncher(2).launch(task)
    """)
    pids = rank_pids()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (143, "", "")
    assert all(gone(pid) for pid in pids)


def test_a_killed_caller_leaves_no_orphan_and_no_file(temp_folder):
    process = start("""
        import os, signal, time
        import torch.utils.data
        from pathlib import Path
        from trainer.launchers import LocalLauncher

        def task(world):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            batches = iter(torch.utils.data.DataLoader(range(1000), num_workers=1))
            next(batches)
            Path(f"worker.{world.rank}").write_text(str(batches._workers[0].pid))
            Path(f"pid.{world.rank}").write_text(str(os.getpid()))
            time.sleep(60)

        LocalLauncher(2).launch(task)
        """)
    pids = rank_pids() + [int(Path(f"worker.{rank}").read_text()) for rank in (0, 1)]
    process.kill()
    process.communicate(timeout=120)
    wait_for(lambda: all(gone(pid) for pid in pids))
    wait_for(lambda: not list(temp_folder.glob("trainer-*")))


def test_a_rank_that_leaves_by_sys_exit_is_no_success():
    with pytest.raises(ProcessError, match=r"rank 1 left the run by sys.exit\(\)"):
        LocalLauncher(2).launch(lambda world: sys.exit(0) if world.rank == 1 else None)
