"""Several nodes, Slurm, a fit inside a rank, and two runs at once: as programs of this machine (C23).

The nodes are torchrun agents that meet on the loopback address, and where this machine allows it two network namespaces.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest
import torch

from tests.helpers.modules import Net
from tests.helpers.ports import free_port
from tests.helpers.reference import train_by_hand

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SRUN = [sys.executable, str(ROOT / "tests" / "helpers" / "srun.py")]

FIT = """
    import json, os, sys
    from pathlib import Path
    import torch
    from tests.helpers.modules import Net, loader, quiet

    class Told(Net):
        def prepare_data(self):
            with open("prepared", "a") as file:
                file.write(f"{self.trainer.node_rank}.{self.trainer.local_rank} ")

    options = json.loads(os.environ.get("OPTIONS", "{}"))
    module, name = Told(), os.environ.get("NAME", "rank")
    size = int(os.environ["SIZE"])
    trainer = quiet(strategy="ddp", accelerator="cpu", max_epochs=2, **options)
    trainer.fit(module, loader(Net.rows(24), 24 // 2 // size))
    place = [trainer.node_rank, trainer.local_rank, trainer.world_size, trainer.num_nodes, trainer.num_devices]
    torch.save([place, module.state_dict()], f"{name}.{trainer.global_rank}")
"""


def start(command, script=FIT, prefix=(), **variables):
    Path("script.py").write_text(textwrap.dedent(script))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen([*prefix, *command, "script.py"], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(*processes, seconds=150):
    """Wait for all; return their outputs. None of them is left, whatever happens."""
    try:
        found = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, found):
        assert process.returncode == 0, err[-3000:]
    return found


def check(size, nodes, name="rank"):
    """Every rank knows its place, and all hold the weights of a run by hand."""
    right = train_by_hand(Net(), Net.rows(24).split(12), 4).state_dict()
    per_node = size // nodes
    for rank in range(size):
        place, weights = torch.load(f"{name}.{rank}")
        assert place == [rank // per_node, rank % per_node, size, nodes, per_node]
        for key, value in right.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("rendezvous", "per_node"), [("static", 1), ("c10d", 1), ("c10d", 2)])
def test_two_torchrun_agents(rendezvous, per_node):
    port = free_port()
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", "--rdzv-id", uuid.uuid4().hex]
    if rendezvous == "static":
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = []
    for node in range(2):
        command = [*TORCHRUN, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(per_node), *meeting]
        agents.append(start(command, SIZE=str(2 * per_node), OPTIONS=json.dumps({"num_nodes": 2, "devices": per_node})))
    finish(*agents)
    check(2 * per_node, 2)
    assert sorted(Path("prepared").read_text().split()) == ["0.0", "1.0"]


@contextlib.contextmanager
def two_namespaces():
    """Two network namespaces that reach each other through a cable: nodes as apart as one machine can have them."""
    names = [f"trainer-{os.getpid()}-{i}" for i in range(2)]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    try:
        for name in names:
            ip("netns", "add", name)
        cable = [f"tr{os.getpid() % 100000}{i}" for i in "ab"]
        ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        for i, (name, end) in enumerate(zip(names, cable)):
            ip("-n", name, "addr", "add", f"10.93.7.{i + 1}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
    try:
        yield names, cable
    finally:
        for name in names:
            ip("netns", "del", name)


def test_two_nodes_in_network_namespaces():
    with two_namespaces() as (names, cable):
        agents = []
        for node, name in enumerate(names):
            command = [*TORCHRUN, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", "10.93.7.1", "--master-port", "29400"]
            variables = {"SIZE": "2", "GLOO_SOCKET_IFNAME": cable[node], "TP_SOCKET_IFNAME": cable[node]}
            agents.append(start(command, prefix=["ip", "netns", "exec", name], **variables))
        finish(*agents)
    check(2, 2)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (2, 1), (2, 2)])
def test_srun(nodes, per_node):
    process = start([*SRUN, "--nodes", str(nodes), "--ntasks-per-node", str(per_node), sys.executable], SIZE=str(nodes * per_node))
    finish(process)
    check(nodes * per_node, nodes)
    assert sorted(Path("prepared").read_text().split()) == [f"{node}.0" for node in range(nodes)]


def test_srun_ends_with_the_task_that_fails():
    process = start([*SRUN, "--ntasks-per-node", "2", sys.executable], """
        from tests.helpers.modules import Net, loader, quiet
        class Failing(Net):
            def training_step(self, batch, batch_idx):
                if self.global_rank == 1:
                    raise ValueError("mine")
                return super().training_step(batch, batch_idx)
        quiet(strategy="ddp", accelerator="cpu", max_epochs=1).fit(Failing(), loader(Net.rows(8), 2))
        """)  # fmt: skip
    out, err = process.communicate(timeout=150)
    assert process.returncode != 0 and "ValueError: mine" in err


def test_a_mismatch_is_named_before_any_rank_waits():
    process = start([*SRUN, "--ntasks-per-node", "2", sys.executable], SIZE="2", OPTIONS='{"devices": 3}')
    out, err = process.communicate(timeout=150)
    assert process.returncode in (1, 15)  # 15: of the task that srun ended because the other had failed
    assert "the Trainer asks for devices=3, but slurm started 2 process(es) on this node" in err


NESTED = """
    import os, sys
    from tests.helpers.modules import Net, loader, quiet
    from tests.helpers.reference import train_by_hand
    import torch

    class Outer(Net):
        def on_train_start(self):
            inner = Net()
            try:
                quiet(devices=1, num_nodes=1, max_epochs=1, accelerator="cpu", **INNER).fit(inner, loader(Net.rows(6), 2))
            except Exception as error:
                self.said = f"{type(error).__name__}: {error}"
            else:
                self.said = inner.state_dict()

    INNER = eval(os.environ["INNER"])
    outer = Outer()
    trainer = quiet(strategy="ddp", devices=2, accelerator="cpu", max_epochs=1)
    trainer.fit(outer, loader(Net.rows(8), 2))
    torch.save([outer.said, outer.state_dict()], f"rank.{trainer.global_rank}")
"""


def test_c23_a_fit_inside_a_rank():
    finish(start([*TORCHRUN, "--nproc-per-node", "2"], NESTED, INNER="{'launcher': False}"))
    right = train_by_hand(Net(), Net.rows(6).split(2), 3).state_dict()
    outer = train_by_hand(Net(), Net.rows(8).split(4), 2).state_dict()
    for rank in (0, 1):
        found, weights = torch.load(f"rank.{rank}")
        for key in right:
            torch.testing.assert_close(found[key], right[key], rtol=0, atol=1e-6)
            torch.testing.assert_close(weights[key], outer[key], rtol=0, atol=1e-6)


def test_c23_a_fit_inside_a_rank_without_the_switch_is_named():
    finish(start([*TORCHRUN, "--nproc-per-node", "2"], NESTED, INNER="{}"))
    for rank in (0, 1):
        said = torch.load(f"rank.{rank}")[0]
        assert said.startswith("MisconfigurationException: the Trainer asks for devices=1, but torchrun started 2 process(es)")
        assert "launcher='local'" in said


def test_c23_an_interactive_shell_and_torchrun_inside_slurm():
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2", "SLURM_LOCALID": "0"}
    finish(start([sys.executable], SIZE="1", OPTIONS='{"devices": 1}', NAME="shell", **slurm))
    check(1, 1, "shell")
    finish(start([*TORCHRUN, "--nproc-per-node", "2"], SIZE="2", NAME="both", **{**slurm, "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "1"}))
    check(2, 1, "both")
    step = {**slurm, "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "1"}
    finish(start([sys.executable], SIZE="1", OPTIONS='{"devices": 1, "launcher": false}', NAME="off", **step))
    check(1, 1, "off")


@pytest.mark.parametrize("way", ["local", "torchrun", "srun"])
def test_two_runs_at_once(way):
    command, options = {
        "local": ([sys.executable], '{"devices": 2}'),
        "torchrun": ([*TORCHRUN, "--standalone", "--nproc-per-node", "2"], "{}"),
        "srun": ([*SRUN, "--ntasks-per-node", "2", sys.executable], "{}"),
    }[way]
    finish(*(start(command, SIZE="2", OPTIONS=options, NAME=name) for name in ("one", "two")))
    ranks = (0,) if way == "local" else (0, 1)  # the caller is no rank, and reports as the first
    right = train_by_hand(Net(), Net.rows(24).split(12), 4).state_dict()
    for name, rank in itertools.product(("one", "two"), ranks):
        weights = torch.load(f"{name}.{rank}")[1]
        for key in right:
            torch.testing.assert_close(weights[key], right[key], rtol=0, atol=1e-6)
    assert Path("prepared").read_text().split() == ["0.0", "0.0"]
