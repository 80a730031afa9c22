"""Profilers by themselves: what they count, what they write, what they refuse."""

from __future__ import annotations

import json
import pickle
import pstats
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trainer import (
    AdvancedProfiler,
    MisconfigurationException,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
    Trainer,
)
from trainer.profilers import simple


class Clock:
    """A clock that tests move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(simple.time, "perf_counter", lambda: self.now)


def work():
    return sum(range(10))


def test_simple_counts_calls_and_seconds(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    profiler = SimpleProfiler()
    profiler.setup("fit")
    for seconds in (1.0, 3.0):
        with profiler.profile("outer"):
            clock.now += seconds
            with profiler.profile("inner"):
                clock.now += 0.5
    clock.now += 5.0
    assert profiler.recorded == {"inner": [2, 1.0, 0.5], "outer": [2, 5.0, 3.5]}
    profiler.describe()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FIT Profiler Report"
    assert [line.split() for line in lines if not line.startswith("-")][2:] == [
        ["Total", "-", "10", "-", "-", "100"], ["outer", "2.5", "5", "2", "3.5", "50"], ["inner", "0.5", "1", "2", "0.5", "10"],
    ]  # fmt: skip
    profiler.extended = False
    assert [line.split() for line in profiler.summary().splitlines()][4:6] == [["Total", "-", "10"], ["outer", "2.5", "5"]]
    assert "Calls" not in profiler.summary()
    profiler.setup("test")  # a report a run
    assert profiler.summary() == ""


def test_simple_stops_on_an_exception_and_refuses_nonsense():
    profiler = SimpleProfiler()
    with pytest.raises(KeyError), profiler.profile("part"):
        raise KeyError
    assert profiler.recorded["part"][0] == 1
    with pytest.raises(MisconfigurationException, match="'part' stopped, but was not started"):
        profiler.stop("part")
    with pytest.raises(MisconfigurationException, match="'part' was started and has not stopped"), profiler.profile("part"):
        profiler.start("part")


@pytest.mark.parametrize("kind", [SimpleProfiler, PyTorchProfiler])
def test_threads_have_actions_of_their_own(kind):
    profiler = kind()
    profiler.start("part")
    with ThreadPoolExecutor(1) as pool:
        for method in (profiler.start, profiler.stop):
            pool.submit(method, "part").result()
    profiler.stop("part")
    if kind is SimpleProfiler:
        assert profiler.recorded["part"][0] == 2


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
def test_reports_go_to_a_file_of_the_rank(kind, tmp_path, capsys):
    for rank in (0, 1):
        profiler = kind(tmp_path / "new", "my:run")
        profiler.setup("fit", local_rank=rank, log_dir="elsewhere")
        with profiler.profile("part"):
            work()
        profiler.describe()
        profiler.describe()  # is appended
        text = (tmp_path / "new" / f"fit-my_run-{rank}.txt").read_text()
        assert text.count("FIT Profiler Report") == 2 and "part" in text
    profiler.filename = None
    profiler.describe()  # rank 1 prints nothing
    assert capsys.readouterr().out == ""


def test_advanced_gives_each_action_its_own_functions(tmp_path):
    profiler = AdvancedProfiler(tmp_path, "calls", line_count_restriction=5, dump_stats=True)
    profiler.setup("fit", local_rank=3)
    with profiler.profile("outer"):
        work()
        with profiler.profile("in/ner"):
            sorted(range(3))
        work()
    report = profiler.summary()
    outer, inner = report.split("Profile stats for: ")[1:]
    assert outer.startswith("outer rank: 3") and "(work)" in outer and "sorted" not in outer
    assert "sorted" in inner and "(work)" not in inner
    stats = pstats.Stats(str(tmp_path / "fit-calls-3-outer.prof"))
    assert {where[2]: numbers[1] for where, numbers in stats.stats.items()}["work"] == 2
    assert (tmp_path / "fit-calls-3-in_ner.prof").exists()
    with pytest.raises(MisconfigurationException, match="not started"):
        profiler.stop("outer")
    copy = pickle.loads(pickle.dumps(profiler))
    assert copy.profiled_actions == {} and copy.line_count_restriction == 5
    profiler.teardown("fit")
    assert profiler.summary() == ""
    with pytest.raises(MisconfigurationException, match="line_count_restriction=-1"):
        AdvancedProfiler(line_count_restriction=-1)


def steps(profiler, count, ahead=None):
    profiler.setup("fit", local_rank=1)
    profiler.module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for _ in range(count):
        profiler.step(ahead)
        with profiler.profile("training_step"):
            profiler.module(torch.ones(1, 2))


def names(path):
    return [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]


@pytest.mark.parametrize(
    ("kwargs", "count", "ahead", "recorded"),
    [
        ({}, 7, None, [2, 3, 4]),
        ({}, 2, 2, [0, 1]),
        ({"schedule": None}, 2, None, [0, 1]),
        ({"schedule": torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)}, 4, 4, [1]),
    ],
)
def test_pytorch_records_a_window(kwargs, count, ahead, recorded, tmp_path):
    profiler = PyTorchProfiler(tmp_path, row_limit=-1, **kwargs)
    steps(profiler, count, ahead)
    report = profiler.summary()
    (trace,) = tmp_path.glob("fit-1.*.pt.trace.json")
    found = names(trace)
    assert [name for name in dict.fromkeys(found) if str(name).startswith("ProfilerStep")] == [f"ProfilerStep#{n}" for n in recorded]
    assert found.count("training_step") == found.count("Linear: 0") == len(recorded)
    assert "aten::addmm" in report and "training_step" in report
    assert not profiler.module[0]._forward_hooks and not profiler.module[0]._forward_pre_hooks
    profiler.teardown("fit")
    assert profiler.module is None


def test_pytorch_says_when_nothing_was_recorded(tmp_path):
    profiler = PyTorchProfiler(tmp_path, record_module_names=False)
    steps(profiler, 1)
    assert "No step was recorded" in profiler.summary()
    profiler.teardown("fit")
    assert PyTorchProfiler().summary() == ""
    assert list(tmp_path.iterdir()) == []


def test_pytorch_takes_the_users_arguments(tmp_path):
    ready = []
    profiler = PyTorchProfiler(
        tmp_path, group_by_input_shapes=True, sort_by_key="self_cpu_time_total", table_kwargs={"header": "Mine"}, on_trace_ready=ready.append
    )
    assert profiler.profiler_kwargs["record_shapes"] is True
    steps(profiler, 3, 3)
    report = profiler.summary()
    assert "Mine" in report and "Input Shapes" in report and "[1, 2]" in report
    assert len(ready) == 1 and list(tmp_path.iterdir()) == []
    copy = pickle.loads(pickle.dumps(PyTorchProfiler(tmp_path, activities=[torch.profiler.ProfilerActivity.CPU])))
    steps(copy, 1, 1)
    assert "aten::addmm" in copy.summary()
    copy.teardown("fit")


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"with_stak": True}, "no such argument. Did you mean 'with_stack'"),
        ({"table_kwargs": {"sort_by": "count"}}, "choose from"),
        ({"sort_by_key": "cpu_time_totl"}, "Did you mean 'cpu_time_total'"),
        ({"schedule": 3}, "schedule=3 must be a function"),
        ({"schedule": lambda step: step}, "must be a function from the number"),
    ],
)
def test_pytorch_refuses_what_torch_does_not_have(kwargs, match):
    with pytest.raises(MisconfigurationException, match=match):
        PyTorchProfiler(**kwargs)


def test_the_argument_of_the_trainer():
    kinds = {None: PassThroughProfiler, "simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    for given, kind in kinds.items():
        assert type(Trainer(accelerator="cpu", profiler=given).profiler) is kind
    own = SimpleProfiler()
    assert Trainer(accelerator="cpu", profiler=own).profiler is own
    with pytest.raises(MisconfigurationException, match="Did you mean 'simple'"):
        Trainer(accelerator="cpu", profiler="simpel")
    with pytest.raises(MisconfigurationException, match="or a Profiler object"):
        Trainer(accelerator="cpu", profiler=SimpleProfiler)
    with pytest.raises(MisconfigurationException, match="barebones=True"):
        Trainer(accelerator="cpu", profiler="simple", barebones=True)


def test_the_base_measures_nothing_by_itself():
    nothing = PassThroughProfiler()
    assert nothing.profile("a") is nothing.profile("b")
    with nothing.profile("a"):
        nothing.start("a")
        nothing.stop("a")
    nothing.describe()
    for name in ("start", "stop"):
        with pytest.raises(NotImplementedError):
            getattr(Profiler(), name)("part")
