"""`Trainer(compile=...)`: one graph a step, the numbers of a run that is not compiled, and a module that stays what it was."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import ModelCheckpoint
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from trainer import (
    DDPStrategy,
    MisconfigurationException,
    ModelParallelDDPStrategy,
    SingleDeviceStrategy,
    TrainModule,
)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Deep(TrainModule):
    """Logs before and after it computes on, reads counters of the trainer, and validates."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first, self.last = torch.nn.Linear(4, width), torch.nn.Linear(width, 1)
            self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(3)))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.last(self.blocks(self.first(batch[:, :4]))), batch[:, 4:])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict({"loss": loss, "size": float(len(batch))}, on_epoch=True)
        total = loss * (1 + self.global_step / 100)
        loss.detach().zero_()  # what was logged is the number of before
        self.log("total", total)
        return total

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Graphs:
    """A backend that runs what Dynamo captures as it is, and counts the graphs and the calls in each."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward


def rows(count: int = 30) -> torch.Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def fit(compile: Any, module: Any = None, **settings: Any) -> tuple[Any, dict[str, float]]:
    module = Deep() if module is None else module
    trainer = quiet(**{"max_epochs": 3, "precision": "64-true", "accumulate_grad_batches": 2, "compile": compile, **settings})
    trainer.fit(module, loader(rows(), batch_size=4), loader(rows(10), batch_size=4))
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_step_with_its_logging_is_one_graph_and_the_numbers_are_those_of_the_plain_run() -> None:
    """30 samples: 7 full batches and one of 2. One graph for the first batch, then those with sizes and counters as inputs."""
    graphs, (plain, numbers) = Graphs(), fit(False)
    module, found = fit({"backend": graphs, "fullgraph": True})
    assert_same(weights(module), weights(plain), atol=1e-12)
    assert found == pytest.approx(numbers, rel=1e-12) and found["size_epoch"] == pytest.approx(116 / 30) and found["loss_epoch"] > 0
    assert len(graphs.sizes) <= 6  # training: first, later, short batch; validation: full, short
    assert len(set(graphs.sizes)) <= 4 and min(graphs.sizes) >= 13  # each holds the layers and the loss
    again = len(graphs.sizes)
    fit({"backend": graphs, "fullgraph": True})
    assert len(graphs.sizes) == again  # a further fit compiles nothing anew


def test_the_default_compiler() -> None:
    """The one test of Inductor, which writes and builds C++ on the CPU; with what keeps it from probing the machine and from more processes."""
    options = {"options": {"cpp.simdlen": 0, "cpp_cache_precompile_headers": False}}
    with torch._inductor.config.patch({"compile_threads": 1}):
        plain, module = (quiet_fit(compile) for compile in (False, options))
    assert_same(weights(module), weights(plain), atol=1e-12)


def quiet_fit(compile: Any) -> Net:
    module = Net()
    quiet(max_epochs=1, precision="64-true", compile=compile).fit(module, loader(Net.rows(12, torch.float64), batch_size=4))
    return module


def test_the_module_is_as_before_and_nothing_holds_it() -> None:
    module = Deep()
    module.blocks[0].compile(backend="eager")  # the user's own; it is part of the step's graph now, and his again afterwards
    own = module.blocks[0]._compiled_call_impl
    keys, before = list(module.state_dict()), [set(vars(m)) for m in module.blocks.modules()]
    dynamic = torch._dynamo.config.allow_unspec_int_on_nn_module
    plain = weights(fit(False)[0])
    fit({"backend": Graphs()}, module)
    assert_same(weights(module), plain, atol=1e-12)
    assert [set(vars(m)) for m in module.blocks.modules()] == before and list(module.state_dict()) == keys
    assert module.blocks[0]._compiled_call_impl is own and module.training_step.__func__ is Deep.training_step
    assert torch._dynamo.config.allow_unspec_int_on_nn_module == dynamic
    module.compile(backend="eager")  # the whole module, by hand: pickles and copies, which go to other processes, leave it out
    assert "_compiled_call_impl" not in vars(pickle.loads(pickle.dumps(module)))
    gone = weakref.ref(module)
    del module, own
    gc.collect()
    assert gone() is None


def test_checkpoints_go_from_compiled_runs_to_plain_ones_and_back(tmp_path: Path) -> None:
    options = {"backend": Graphs()}
    plain = weights(fit(False, max_epochs=3)[0])
    for first, second in ((options, False), (False, options)):
        folder = tmp_path / str(bool(first))
        fit(first, max_epochs=1, callbacks=ModelCheckpoint(dirpath=folder, save_last=True))
        module = Deep()
        trainer = quiet(max_epochs=3, precision="64-true", accumulate_grad_batches=2, compile=second)
        trainer.fit(module, loader(rows(), batch_size=4), loader(rows(10), batch_size=4), ckpt_path=folder / "last.ckpt")
        assert_same(weights(module), plain, atol=1e-12)


def test_evaluation_by_itself_is_compiled() -> None:
    graphs, module = Graphs(), Deep()
    expected = quiet().validate(module, loader(rows(10).float(), batch_size=4), verbose=False)
    assert quiet(compile={"backend": graphs}).validate(module, loader(rows(10).float(), batch_size=4), verbose=False) == expected
    assert 1 <= len(graphs.sizes) <= 2


class Manual(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


def test_in_manual_optimization_layers_are_compiled() -> None:
    graphs = Graphs()
    plain, module = fit(False, Manual(), accumulate_grad_batches=1)[0], fit({"backend": graphs}, Manual(), accumulate_grad_batches=1)[0]
    assert_same(weights(module), weights(plain), atol=1e-12)
    assert 2 <= len(graphs.sizes) <= 6 and min(graphs.sizes) == 12  # the stack of three blocks, with four calls in each


def test_single_layers_of_torch_are_left_alone_with_a_warning() -> None:
    class Line(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.Identity()

    with pytest.warns(UserWarning, match="finds nothing to compile"):
        fit({"backend": Graphs()}, Line(), accumulate_grad_batches=1, max_steps=1)


class Normed(Deep):
    """Draws, and moves statistics, inside of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(
            *(torch.nn.Sequential(block, torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)) for block in self.blocks)
        )


def test_checkpointed_layers_inside_of_a_compiled_step() -> None:
    options = {"backend": "aot_eager", "fullgraph": True}
    plain = fit(False, Normed(), seed=3)[0]
    module = fit(options, Normed(), seed=3, activation_checkpointing="blocks.*")[0]
    assert_same(weights(module), weights(plain), atol=1e-12)
    with pytest.raises(MisconfigurationException, match="does not repeat random draws"):
        fit({"backend": "eager"}, Normed(), activation_checkpointing="blocks.*")


def in_rank(name: str) -> list[Any]:
    """Train plainly and compiled; return weights, numbers and graphs of both."""
    found = []
    for compile in (False, True):
        graphs = Graphs()
        strategy: Any = {
            "ddp": lambda: DDPStrategy(bucket_cap_mb=1),  # two or three blocks of 256
            "ddp, checkpointed": lambda: "ddp",
            "fsdp": lambda: "fsdp",
            "model_parallel_ddp": lambda: ModelParallelDDPStrategy(2, stack="blocks", micro_batches=2),
        }[name]()
        chosen = "blocks.*" if compile and name not in ("ddp", "model_parallel_ddp") else None
        module, numbers = fit(
            {"backend": graphs} if compile else None, Deep(256 if name == "ddp" else 8), accelerator="cpu",
            devices=4 if name == "model_parallel_ddp" else 2, strategy=strategy, activation_checkpointing=chosen, max_epochs=1,
        )  # fmt: skip
        found.append((weights(module), numbers, graphs.sizes))
    return found


@pytest.mark.parametrize("name", ["ddp", "ddp, checkpointed", "fsdp", "model_parallel_ddp"])
def test_same_numbers_on_ranks(name: str) -> None:
    for (plain, numbers, _), (compiled, found, sizes) in run_ranks(in_rank, name=name):
        assert_same(compiled, plain, atol=1e-12)
        assert found == pytest.approx(numbers, rel=1e-12)
        if name == "ddp":
            assert sum(size < 13 for size in sizes) >= 6, sizes  # torch cut the step where a bucket of gradients ends
        elif name in ("fsdp", "model_parallel_ddp"):
            assert 1 <= len(sizes) <= 6 and max(sizes) <= 4  # a graph for the blocks, which are alike; shapes make further ones


def test_what_cannot_work_is_said_ahead_of_step_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, message in (
        (3, "must be True, False, a dict"),
        ("max-autotun", "Did you mean 'max-autotune'"),
        ({"mode": "fast"}, "must be one of 'default'"),
        ({"fullgrph": True}, "Did you mean 'fullgraph'"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            quiet(compile=wrong)
    with pytest.raises(MisconfigurationException, match="strategy='dp' makes replicas anew"):
        quiet(compile=True, accelerator="cpu", devices=2, strategy="dp")

    class Interpreted(SingleDeviceStrategy):
        def called_apart(self) -> None:
            return None

    with pytest.raises(MisconfigurationException, match="strategy='single_device' cannot run compiled code"):
        fit(True, strategy=Interpreted())
    with pytest.raises(MisconfigurationException, match="torch.compile does not work here.*inductr"):
        fit({"backend": "inductr"})
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}),
        pytest.raises(MisconfigurationException, match="needs a C"),
    ):
        fit(True)
