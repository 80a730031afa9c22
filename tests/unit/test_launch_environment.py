"""Which launcher started a process, read from variables alone (case C23)."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from trainer import ModelParallelDDPStrategy, Trainer, idle
from trainer.dist import Dist
from trainer.errors import MisconfigurationException
from trainer.launchers import InProcessLauncher, SlurmLauncher, TorchrunLauncher, detect
from trainer.world import World

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}
SRUN = {
    "SLURM_JOB_ID": "1000",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[03-04,09],extra1",
}


@pytest.fixture
def environment(monkeypatch):
    """Replace the launchers' variables of this process by the given ones."""
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith(("SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)

    def put(*groups, drop=(), **more):
        for name, value in {**{k: v for group in groups for k, v in group.items()}, **more}.items():
            if name not in drop:
                monkeypatch.setenv(name, value)

    return put


def test_nobody_started_us(environment):
    assert detect() is None
    assert detect("auto") is None


def test_torchrun(environment):
    environment(TORCHRUN)
    launcher = detect()
    assert launcher.name == "torchrun"
    assert launcher.launch(lambda world: world) == World(3, 4, 1, 2, 1, 2, "env://")


def test_one_process_a_machine_without_local_variables(environment):
    environment(TORCHRUN, drop=("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"))
    assert detect().world == World(3, 4, 0, 1, 3, 4, "env://")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_of_torchruns_variables_are_no_launch(environment, name):
    environment(TORCHRUN, drop=(name,))
    assert detect() is None
    with pytest.raises(MisconfigurationException, match=f"launcher='torchrun' needs {name} in"):
        detect("torchrun")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "4"}, r"RANK=4 must be in 0\.\.3"),
        ({"RANK": "-1"}, r"RANK=-1 must be in 0\.\.3"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, got 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be at least 1"),
        ({"LOCAL_RANK": "2"}, r"LOCAL_RANK=2 must be in 0\.\.1"),
        ({"LOCAL_WORLD_SIZE": "8"}, r"LOCAL_WORLD_SIZE=8 must be in 1\.\.4"),
    ],
)
def test_variables_that_contradict_each_other(environment, changed, message):
    environment(TORCHRUN, changed)
    with pytest.raises(MisconfigurationException, match=message):
        detect()


def test_a_missing_local_size_is_named(environment):
    environment(TORCHRUN, drop=("LOCAL_WORLD_SIZE",))
    with pytest.raises(MisconfigurationException, match="LOCAL_WORLD_SIZE is missing"):
        detect()


def test_srun_on_two_nodes(environment):
    environment(SRUN)
    launcher = detect()
    assert launcher.name == "slurm"
    assert launcher.world == World(3, 4, 1, 2, 1, 2, "tcp://node03:16002")  # 15000 + (1000 * 31 + 2) % 15000


def test_srun_on_one_node_meets_at_loopback(environment):
    environment(SRUN, SLURM_NNODES="1", SLURM_NODEID="0", SLURM_LOCALID="3", SLURM_TASKS_PER_NODE="4")
    assert detect().world == World(3, 4, 3, 4, 0, 1, "tcp://127.0.0.1:16002")


def test_srun_with_uneven_nodes_and_own_address(environment):
    environment(SRUN, SLURM_TASKS_PER_NODE="3,1", SLURM_LOCALID="0", MASTER_ADDR="head", MASTER_PORT="1234")
    assert detect().world == World(3, 4, 0, 1, 1, 2, "tcp://head:1234")


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_JOB_NAME": "bash"},
        {"SLURM_JOB_NAME": "interactive"},
        {"SLURM_PTY_PORT": "33333"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty python in an allocation of four tasks
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_an_interactive_shell_is_no_launch(environment, shell):
    environment(SRUN, shell)
    assert detect() is None


def test_salloc_and_batch_scripts_are_no_launch(environment):
    environment(SRUN, drop=("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"))  # a shell made by salloc
    assert detect() is None
    environment(SLURM_PROCID="0", SLURM_LOCALID="0")  # what a batch script sees besides
    assert detect() is None


def test_torchrun_wins_over_slurm(environment):
    environment(SRUN, TORCHRUN)
    assert isinstance(detect(), TorchrunLauncher)
    assert isinstance(detect("slurm"), SlurmLauncher)


def test_one_switch_turns_detection_off(environment):
    environment(SRUN, TORCHRUN)
    assert detect(False) is None
    assert detect("local") is None
    assert detect("in-process").world == World()


def test_a_launcher_object_is_taken(environment):
    environment(TORCHRUN)
    launcher = InProcessLauncher()
    assert detect(launcher) is launcher


def test_unknown_and_absent_launchers(environment):
    with pytest.raises(MisconfigurationException, match="unknown launcher 'torchun'.* Did you mean 'torchrun'"):
        detect("torchun")
    with pytest.raises(MisconfigurationException, match="needs a process started by srun"):
        detect("slurm")


def test_slurm_without_a_host_to_meet_at(environment):
    environment(SRUN, drop=("SLURM_JOB_NODELIST",))
    with pytest.raises(MisconfigurationException, match="set MASTER_ADDR"):
        detect()


@pytest.mark.parametrize(
    ("processes", "nodes", "message"),
    [(3, 2, r"devices=3, but torchrun started 2 process\(es\)"), (2, 1, r"num_nodes=1, but torchrun started 2 node\(s\)")],
)
def test_a_mismatch_is_named_before_anyone_waits(environment, processes, nodes, message):
    environment(TORCHRUN)
    launcher = detect()
    launcher.check(2, 2)
    launcher.check()
    with pytest.raises(MisconfigurationException, match=message):
        launcher.check(processes, nodes)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("auto", 2), ("ddp", 2), ("model_parallel_ddp", 4), (ModelParallelDDPStrategy(devices_per_replica=3), 6)],
)
def test_devices_auto_are_those_of_the_processes_that_exist(environment, strategy, devices):
    environment(TORCHRUN)
    assert Trainer(accelerator="cpu", strategy=strategy, num_nodes=2).num_devices == devices


def test_devices_auto_of_one_process_that_owns_all(environment, monkeypatch):
    environment({**TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": "0", "GROUP_RANK": "0"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(idle, "ask", lambda: pytest.fail("a rank does not look for idle GPUs"))
    assert Trainer(accelerator="cuda", strategy="model_parallel", num_nodes=2).device_ids == [0, 1, 2]
    assert Trainer(accelerator="cuda", strategy="ddp", num_nodes=2).device_ids == [0]
    assert Trainer(accelerator="cuda", strategy="ddp", devices=1, launcher="local").device_ids == [0]


def test_devices_auto_that_do_not_exist(environment, monkeypatch):
    environment(TORCHRUN)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(MisconfigurationException, match=r"2 process\(es\) of this node take 4 device\(s\) with devices='auto'. .* has 3 cuda"):
        Trainer(accelerator="cuda", strategy="model_parallel_ddp", num_nodes=2)
    with pytest.raises(MisconfigurationException, match="'model_parallel' is one process a node, but 2 were started. Start one, or use"):
        Trainer(accelerator="cpu", strategy="model_parallel", num_nodes=2)


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(MisconfigurationException, match=f"meet .{where}. is taken by another program. Set MASTER_PORT .* --resv-ports"):
            Dist(World(0, 2, init_method=where)).open()
