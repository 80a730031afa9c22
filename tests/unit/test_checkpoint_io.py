"""Checkpoint files under faults: kills at chosen and at random moments, full disks, damaged and foreign files."""

from __future__ import annotations

import enum
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch

from tests.helpers.ranks import RankError, run_ranks
from trainer.checkpoint import check_plain, clean, io, leftovers, load, plain, save, strip_prefixes, temporary
from trainer.errors import CheckpointError

ROOT = pathlib.Path(__file__).resolve().parents[2]


def child(script: str, *args: object, prefix: tuple[str, ...] = ()) -> str:
    """Run a script in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Color(enum.Enum):
    RED = 1


class Label(torch.Tensor):
    """A tensor subclass that is only a name."""


# ---------------------------------------------------------------------------------------------------- whole or not at all


def test_round_trip_keeps_values_types_and_leaves_one_file(tmp_path):
    state = {
        "none": None, "flag": True, "n": 3, "x": 0.1, "z": 1 + 2j, "s": "é", "b": b"\xff", "dtype": torch.bfloat16,
        "device": torch.device("cpu"), "size": torch.Size([2, 3]), "list": [1, [2]], "tuple": (1, (2,)), "set": {1, 2},
        "ordered": OrderedDict(a=1), "counter": Counter("aab"), "tensor": torch.arange(6.0).view(2, 3), 7: "int key",
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    path = tmp_path / "deep" / "er" / "a.ckpt"
    save(state, path)
    loaded = load(path)
    assert list(loaded) == list(state)
    for key, value in state.items():
        assert type(loaded[key]) is type(value)
        assert torch.equal(loaded[key], value) if isinstance(value, torch.Tensor) else loaded[key] == value
    assert torch.load(path, weights_only=True)["n"] == 3
    assert os.listdir(path.parent) == ["a.ckpt"]


def test_saving_over_a_link_replaces_the_link_not_its_target(tmp_path):
    save({"n": 1}, tmp_path / "best.ckpt")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    save({"n": 2}, str(tmp_path / "last.ckpt"))
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert load(tmp_path / "best.ckpt") == {"n": 1}
    assert load(tmp_path / "last.ckpt") == {"n": 2}


def test_names_of_the_greatest_length_and_with_odd_characters(tmp_path):
    for name in ("é" * 127, "a b=1.5 [x].ckpt", ".hidden"):
        save({"n": 1}, tmp_path / name)
        assert load(tmp_path / name) == {"n": 1}
    assert len(os.listdir(tmp_path)) == 3


def killed_at(moment, path):
    """Save, and be killed at a moment of it."""

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def half(state, file):
        file.write(b"PK" * 5000)
        file.flush()
        die()

    owner, name = {"half written": (torch, "save"), "written": (os, "fsync"), "synced": (os, "replace"), "renamed": (io, "sync_folder")}[moment]
    setattr(owner, name, half if name == "save" else die)
    save({"n": 2, "t": torch.full((1000,), 2.0)}, path)


@pytest.mark.parametrize(
    ("moment", "n", "left"), [("half written", 1, 1), ("written", 1, 1), ("synced", 1, 1), ("renamed", 2, 0)]
)
def test_c06_kill_at_each_stage_of_a_save(tmp_path, moment, n, left):
    path = tmp_path / "a.ckpt"
    save({"n": 1, "t": torch.full((1000,), 1.0)}, path)
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(killed_at, 1, moment=moment, path=path)
    state = load(path)
    assert state["n"] == n and torch.equal(state["t"], torch.full((1000,), float(n)))
    found = leftovers(tmp_path)
    assert len(found) == left == len(os.listdir(tmp_path)) - 1
    assert clean(tmp_path) == found
    assert os.listdir(tmp_path) == ["a.ckpt"]
    save({"n": 3}, path)  # the next save goes on as if nothing had been
    assert load(path) == {"n": 3}


KILLED_OFTEN = """
    import os, random, signal, sys, time, torch
    from trainer.checkpoint import clean, load, save
    torch.set_num_threads(1)
    path, kills = sys.argv[1], int(sys.argv[2])
    random.seed(0)
    save({"n": 0, "t": torch.zeros(200_000)}, path)
    for kill in range(kills):
        started = load(path)["n"]
        pid = os.fork()
        if pid == 0:
            for n in range(started + 1, started + 10_000):
                save({"n": n, "t": torch.full((200_000,), float(n))}, path)
            os._exit(1)
        while kill == 0 and load(path)["n"] == started:
            time.sleep(0.01)  # so that one at least is whole, however slow the machine is
        time.sleep(0.01 + 0.05 * random.random())
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        state = load(path)
        assert state["n"] >= started and bool((state["t"] == state["n"]).all()), state
    temporaries = [name for name in os.listdir(os.path.dirname(path)) if name.endswith(".tmp")]
    assert len(clean(os.path.dirname(path))) == len(temporaries)
    print(sorted(os.listdir(os.path.dirname(path))), state["n"] > 0)
"""


def test_c06_kill_at_random_moments_never_leaves_a_part_under_the_final_name(tmp_path):
    assert child(KILLED_OFTEN, tmp_path / "a.ckpt", 25).strip() == "['a.ckpt'] True"


FILLED = """
    import errno, json, os, sys, torch
    from trainer.checkpoint import load, save
    from trainer.errors import CheckpointError
    folder, limit = sys.argv[1], int(sys.argv[2])
    if limit:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    path = os.path.join(folder, "a.ckpt")
    save({"n": 1, "t": torch.ones(1000)}, path)
    for size in (100_000, 1_000_000, 70_000):  # fails within one tensor, in the first of several, at the end
        try:
            save({"n": 2, "t": [torch.ones(size) for _ in range(3)]}, path)
            print("saved")
        except CheckpointError as error:
            print(str(error).replace(folder, "FOLDER"))
    print(load(path)["n"], os.listdir(folder))
    save({"n": 3}, path)
    print(load(path)["n"])
"""


@pytest.mark.parametrize(
    ("limit", "reason"), [(300_000, "File too large"), (0, "No space left on device")], ids=["file limit", "full tmpfs"]
)
def test_c06_a_full_disk_keeps_the_former_file_and_names_the_path(tmp_path, limit, reason):
    prefix: tuple[str, ...] = ()
    if not limit:  # a mount of our own, seen by nobody else, that goes with the process
        mount = "mount -t tmpfs -o size=300k tmpfs \"$0\" && exec \"$@\""
        prefix = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount, str(tmp_path))
        if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
            pytest.skip("this machine does not let us mount a tmpfs; the file limit covers the same path")
    lines = child(FILLED, tmp_path, limit, prefix=prefix).splitlines()
    assert lines == [f"Could not save the checkpoint to FOLDER/a.ckpt: {reason}."] * 3 + ["1 ['a.ckpt']", "3"]


def test_a_signal_in_the_middle_of_a_save_goes_through_and_removes_the_temporary(tmp_path, monkeypatch):
    def interrupted(state, file):
        file.write(b"PK")
        raise KeyboardInterrupt

    save({"n": 1}, tmp_path / "a.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save({"n": 2}, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"] and load(tmp_path / "a.ckpt") == {"n": 1}


def test_targets_that_cannot_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=r"folder: it is a folder"):
        save({"n": 1}, tmp_path / "folder")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"file/a\.ckpt: (Not a directory|File exists)"):
        save({"n": 1}, tmp_path / "file" / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"/proc/nowhere/a\.ckpt: No such file or directory"):
        save({"n": 1}, "/proc/nowhere/a.ckpt")
    with pytest.raises(CheckpointError, match="File name too long"):
        save({"n": 1}, tmp_path / ("x" * 300))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


# ------------------------------------------------------------------------------------------------------------- leftovers


def test_leftovers_are_those_of_dead_processes_only(tmp_path, monkeypatch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: dead.pid)
        gone = tmp_path / temporary.temporary_name("a.ckpt")
        patch.setattr(os, "getpid", os.getppid)  # somebody who lives
        alive, old = (tmp_path / temporary.temporary_name("a.ckpt") for _ in range(2))
        patch.setattr(temporary, "_host", lambda: "0" * 8)
        elsewhere_new, elsewhere_old = (tmp_path / temporary.temporary_name("b.ckpt") for _ in range(2))
    former = tmp_path / temporary.temporary_name("a.ckpt")  # of a process that had our number before us, as after a restart of a container
    link = tmp_path / f".last.ckpt.{dead.pid}.0123abcd.tmp"  # a link of ModelCheckpoint's: nobody knows which machine's
    others = [tmp_path / name for name in ("a.ckpt", ".a.ckpt.tmp", f".a.{dead.pid}.xyz.tmp", "notes.txt")]
    with temporary.temporary_beside(tmp_path / "a.ckpt") as mine:
        for file in (gone, alive, elsewhere_new, elsewhere_old, mine, former, *others):
            file.write_text("x")
        old.mkdir()  # the parts of a sharded checkpoint
        (old / "part").write_text("x")
        link.symlink_to("nowhere")
        for file in (elsewhere_old, old):
            os.utime(file, (time.time() - 2 * 86400,) * 2)
        assert set(leftovers(tmp_path)) == {gone, elsewhere_old, former, old}
        os.utime(link, (time.time() - 2 * 86400,) * 2, follow_symlinks=False)
        assert set(clean(str(tmp_path))) == {gone, elsewhere_old, former, old, link}
        assert set(tmp_path.iterdir()) == {elsewhere_new, alive, mine, *others}
    assert leftovers(tmp_path / "nowhere") == [] == clean(tmp_path)
    assert set(tmp_path.iterdir()) == {elsewhere_new, alive, *others}


# ---------------------------------------------------------------------------------------------------------------- loading


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    save({"n": 1}, tmp_path / "epoch=1-step=20.ckpt")
    with pytest.raises(CheckpointError, match=r"epoch=1-step=2\.ckpt: there is no such file\. Did you mean 'epoch=1-step=20\.ckpt'\?"):
        load(tmp_path / "epoch=1-step=2.ckpt")
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path / "none" / "a.ckpt")
    with pytest.raises(CheckpointError, match="it is a folder"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "index", "empty", "text"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_damaged_file_is_named(tmp_path, damage, weights_only):
    path = tmp_path / "a.ckpt"
    save({"t": torch.ones(10_000)}, path)
    content = bytearray(path.read_bytes())
    content[-30:-20] = bytes(10) if damage == "index" else content[-30:-20]
    path.write_bytes({"cut": content[:5000], "index": content, "empty": b"", "text": b"hello\n" * 9}[damage])
    with pytest.raises(CheckpointError, match=r"a\.ckpt: it is damaged(:|, or no file written by torch\.save \()"):
        load(path, weights_only=weights_only)


def test_objects_need_trust_and_a_dictionary_is_needed(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"color": Color.RED}, path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt.*test_checkpoint_io\.Color.*weights_only=False if you trust"):
        load(path)
    assert load(path, weights_only=False) == {"color": Color.RED}
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt is no checkpoint: it holds a list"):
        load(path)


def test_a_class_that_is_not_here_and_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    save({}, path)
    for error, words in (
        (ModuleNotFoundError("No module named 'theirs'"), "a class in it cannot be imported here .*theirs"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
    ):
        def fail(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(torch, "load", fail)
        with pytest.raises(CheckpointError, match=rf"a\.ckpt: {words}"):
            load(path, weights_only=False)


def test_map_location(tmp_path):
    save({"t": torch.ones(3)}, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt", map_location="meta")["t"].device.type == "meta"


# ---------------------------------------------------------------------------------------------------------- plain values


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (pathlib.Path("x"), "pathlib.PosixPath"), (Color.RED, "test_checkpoint_io.Color"), (torch.nn.ReLU(), "ReLU"),
        (np.float64(1.5), "numpy.float64"), (np.zeros(2), "numpy.ndarray"), (frozenset(), "builtins.frozenset"),
        (range(3), "builtins.range"), (defaultdict(int), "collections.defaultdict"), (print, "builtin_function"),
        (torch.ones(1).as_subclass(Label), "Label"),
    ],
)
def test_c11_what_is_not_plain_is_refused_with_its_key(tmp_path, value, kind):
    with pytest.raises(CheckpointError, match=rf"Could not save callbacks\.A\.x\[1\]: it is a .*{kind}"):
        save({"state_dict": {}, "callbacks": {"A": {"x": [0, value]}}}, tmp_path / "a.ckpt")
    suggestion = r"hyper_parameters\.net\b.* save_hyperparameters\(ignore=\['net'\]\)"
    with pytest.raises(CheckpointError, match=suggestion):
        save({"hyper_parameters": {"lr": 0.1, "net": value}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=suggestion):
        check_plain({"net": {"deep": value}}, "datamodule_hyper_parameters")
    assert os.listdir(tmp_path) == []


def test_c11_odd_corners_of_the_check():
    with pytest.raises(CheckpointError, match=r"a\.1 \(the key itself\): it is a enum|a\.Color\.RED \(the key itself\)"):
        check_plain({"a": {Color.RED: 1}})
    marked = torch.ones(1)
    marked.origin = pathlib.Path("x")
    with pytest.raises(CheckpointError, match=r"Could not save t\.origin"):
        check_plain({"t": marked})
    with pytest.raises(CheckpointError, match=r"Could not save n: the integer has more than 2000 bits"):
        check_plain({"n": 2**5000})
    with pytest.raises(CheckpointError, match="Could not save the state: it is a builtins.object"):
        check_plain(object())
    check_plain({"n": 2**1999, "module": torch.nn.BatchNorm1d(3).state_dict()})
    ring: list = [1]
    ring.append(ring)
    check_plain(ring)  # torch's pickler can do it, so it is no business of the check


def test_plain_copies_and_converts_without_changing_meaning(tmp_path):
    class Attributes(dict):
        pass

    weight = torch.ones(2, requires_grad=True)
    state = {
        "attributes": Attributes(lr=0.1, deep=Attributes(n=np.int64(3))), "scalar": np.float32(0.5), "flag": np.bool_(True),
        "array": np.arange(3, dtype=np.int32), "text": np.array(["a", "b"]), "swapped": np.array([1, 2], dtype=">i4"),
        "pair": (np.float64(2.0), [weight]), "default": defaultdict(int, a=1), "set": {np.int64(1)}, "name": np.str_("n"),
        "label": torch.ones(1).as_subclass(Label), "counter": Counter("aa"), np.int64(4): 5,
    }
    copy = plain(state)
    save(copy, tmp_path / "a.ckpt")
    loaded = load(tmp_path / "a.ckpt")
    assert loaded["attributes"] == {"lr": 0.1, "deep": {"n": 3}} and type(loaded["attributes"]) is dict
    assert (loaded["scalar"], loaded["flag"], loaded["text"], loaded["swapped"]) == (0.5, True, ["a", "b"], [1, 2])
    assert torch.equal(loaded["array"], torch.arange(3, dtype=torch.int32))
    assert loaded["pair"][0] == 2.0 and torch.equal(loaded["pair"][1][0], torch.ones(2))
    assert (loaded["default"], loaded["set"], loaded["name"], loaded[4]) == ({"a": 1}, {1}, "n", 5)
    assert type(loaded["label"]) is torch.Tensor and type(loaded["counter"]) is Counter
    copy["attributes"]["lr"] = 9.0
    assert state["attributes"]["lr"] == 0.1
    assert copy["pair"][1][0].data_ptr() == weight.data_ptr() and not copy["pair"][1][0].requires_grad
    kept = {"path": pathlib.Path("x"), "color": Color.RED}
    assert plain(kept) == kept and type(plain(kept)["path"]) is type(kept["path"])
    versions = torch.nn.BatchNorm1d(3).state_dict()
    assert plain(versions)._metadata == versions._metadata


def test_plain_refuses_a_container_within_itself():
    ring: list = []
    ring.append({"ring": ring})
    with pytest.raises(CheckpointError, match="A list contains itself"):
        plain(ring)
    twice = [1]
    assert plain([twice, twice]) == [[1], [1]]


# ------------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("file", "own", "right"),
    [
        (["module.a.w", "module.b"], ["a.w", "b"], ["a.w", "b"]),
        (["_orig_mod.a.w"], ["a.w"], ["a.w"]),
        (["module._orig_mod.a.w"], ["a.w"], ["a.w"]),
        (["_orig_mod.module.module.a.w"], ["a.w"], ["a.w"]),
        (["net._orig_mod.w", "head.w"], ["net.w", "head.w"], ["net.w", "head.w"]),  # one layer compiled, or
        (["net.w", "head.w"], ["net._orig_mod.w", "head.w"], ["net._orig_mod.w", "head.w"]),  # the other way round
        (["a.w"], ["module.a.w"], ["module.a.w"]),
        (["module.w"], ["module.w"], ["module.w"]),  # a layer that is really called module
        (["module.module.w"], ["module.w"], ["module.w"]),
        (["module.module.w", "module.w"], ["module.w", "w"], ["module.w", "w"]),
        (["module.w", "w"], ["module.w", "w"], ["module.w", "w"]),
        (["module.w", "w"], ["w"], ["module.w", "w"]),  # would become one: left as they are
        (["module.a", "module.x"], ["a"], ["a", "x"]),  # the stranger keeps a name a strict load can report
        (["b", "c"], ["a"], ["b", "c"]),
        ([], ["a"], []),
        (["module.a"], [], ["module.a"]),
    ],
)
def test_c12_prefixes_of_wrappers(file, own, right):
    renamed = strip_prefixes(dict(zip(file, range(len(file)))), own)
    assert list(renamed.items()) == list(zip(right, range(len(right))))


def test_c12_files_of_wrapped_models_load_and_keep_layer_versions(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch.compile sets it for the process otherwise

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))

    source, target = make(), make()
    with torch.no_grad():
        source[1].running_mean.fill_(5.0)
    parallel = torch.nn.DataParallel(source)
    for wrapped in (parallel, torch.compile(source, backend="eager"), torch.compile(parallel, backend="eager")):
        renamed = strip_prefixes(wrapped.state_dict(), target.state_dict())
        assert list(renamed) == list(source.state_dict())
        assert renamed._metadata["1"] == {"version": 2}
        target.load_state_dict(renamed)
        assert torch.equal(target[1].running_mean, torch.full((3,), 5.0))
        wrapped.load_state_dict(strip_prefixes(source.state_dict(), wrapped.state_dict()))


def test_the_safe_unpickler_still_has_the_limit_we_state(tmp_path):
    torch.save({"n": 2**5000}, tmp_path / "a.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "a.ckpt", weights_only=True)
    save({"n": 2**1999}, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt")["n"] == 2**1999


