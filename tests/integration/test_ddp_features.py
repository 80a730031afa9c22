"""Options of DDP: communication hooks by name, bucket views, static graphs, BatchNorm over all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from callbacks import GradientSync
from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import train_by_hand
from trainer import DDPStrategy, MisconfigurationException
from trainer.strategies.batchnorm import synced_batchnorm

ROWS = 14  # on two ranks with batches of 2: 4 batches, the last one short


def fit(dtype: torch.dtype = torch.float64, strategy: Any = "ddp", module: Any = None, **settings: Any) -> Any:
    module = (module or Net()).to(dtype)
    trainer = quiet(**{"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 3, "seed": 0, **settings})
    trainer.fit(module, loader(Net.rows(ROWS, dtype), 2))
    return {key: tensor.clone() for key, tensor in module.state_dict().items()}


def by_hand(accumulate: int = 1, clip: float | None = None, dtype: torch.dtype = torch.float64) -> Any:
    steps = 3 * -(-4 // accumulate)
    return train_by_hand(Net().to(dtype), Net.rows(ROWS, dtype).split(4), steps, accumulate, clip).state_dict()


def assert_equal(ranks: list[Any], wanted: Any, atol: float = 1e-12) -> None:
    for state in ranks:
        assert state.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(state[key], tensor, rtol=0, atol=atol)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_that_are_views_of_buckets(accumulate: int) -> None:
    ranks = run_ranks(
        fit, strategy=DDPStrategy(gradient_as_bucket_view=True), accumulate_grad_batches=accumulate, gradient_clip_val=0.05
    )
    assert_equal(ranks, by_hand(accumulate, 0.05))


@pytest.mark.parametrize("view", [False, True])
def test_static_graph(view: bool) -> None:
    assert_equal(run_ranks(fit, strategy=DDPStrategy(static_graph=True, gradient_as_bucket_view=view)), by_hand())


@pytest.mark.parametrize("how", [{"accumulate_grad_batches": 2}, {"callbacks": [GradientSync({0: 1, 2: 2})]}])
def test_static_graph_with_accumulation_is_refused_ahead_of_step_1(how: dict[str, Any]) -> None:
    def run() -> Any:
        module = Net()
        start = {key: tensor.clone() for key, tensor in module.state_dict().items()}
        with pytest.raises(MisconfigurationException, match="static_graph=True"):
            fit(torch.float32, DDPStrategy(static_graph=True), module, **how)
        return all(torch.equal(start[key], tensor) for key, tensor in module.state_dict().items())

    assert run_ranks(run) == [True, True]


# -- communication hooks -----------------------------------------------------------------------------------------------------


def ddp_by_hand(hook: str | None, state: Any = None) -> Any:
    """A hand-written DDP loop with torch's own hook; batches as the data layer deals them."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    torch.distributed.init_process_group("gloo")
    rank, module = torch.distributed.get_rank(), Net()
    ddp = DistributedDataParallel(module.layers)
    if hook == "powersgd":
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, **state), powerSGD_hook.powerSGD_hook)
    elif hook is not None:
        ddp.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
    optimizer = module.configure_optimizers()
    for _ in range(3):
        for batch in Net.rows(16).split(4):
            optimizer.zero_grad()
            mine = batch[rank::2]
            torch.nn.functional.mse_loss(ddp(mine[:, :4]), mine[:, 4:]).backward()
            optimizer.step()
    return module.state_dict()  # the group stays open: a thread of gloo may still hold closures of the hook, which hold the group


def with_hook(**arguments: Any) -> Any:
    module = Net()
    quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, seed=0, callbacks=[GradientSync(**arguments)]).fit(
        module, loader(Net.rows(16), 2)
    )
    return module.state_dict()


OPTIONS = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 3, "min_compression_rate": 0.5}


@pytest.mark.parametrize("hook", ["bf16", "fp16", "powersgd"])
def test_hooks_by_name_are_torchs_own(hook: str) -> None:
    options = OPTIONS if hook == "powersgd" else None
    wanted, plain = run_ranks(ddp_by_hand, hook=hook, state=options), run_ranks(ddp_by_hand, hook=None)
    found = run_ranks(with_hook, comm_hook=hook, comm_options=options)
    assert_equal(found, wanted[0], atol=1e-6 if hook == "powersgd" else 0)  # 32 bits: its matrix products may round in another way
    assert any(not torch.equal(plain[0][key], tensor) for key, tensor in found[0].items())  # the hook did something


def test_a_hook_of_the_users() -> None:
    def doubled(factor, bucket):  # torch checks the annotations of a hook, where it has any
        future = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0] * factor)

    def run() -> Any:
        module = Scalar()
        sync = GradientSync(comm_hook=doubled, comm_state=2.0)
        quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[sync]).fit(module, loader([1.0, 2.0]))
        return module.w.item()

    assert run_ranks(run) == [-6.0, -6.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"comm_hook": "bf17"}, "'bf17' is unknown. Did you mean 'bf16'"),
        ({"comm_hook": 3}, "got int"),
        ({"comm_hook": "bf16", "comm_options": {"a": 1}}, "comm_options are those of"),
        ({"comm_hook": "bf16", "comm_state": 1}, "comm_state is the first argument"),
        ({"comm_hook": "powersgd", "comm_options": {"rank": 1}}, "do not fit torch's PowerSGDState.*rank"),
        ({"comm_hook": "powersgd", "comm_options": {"start_powerSGD_iter": 1}}, "start_powerSGD_iter"),
    ],
)
def test_hooks_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        GradientSync(**arguments)


def test_powersgd_says_that_a_resume_is_not_to_the_bit(tmp_path: Any) -> None:
    def run(epochs: int, ckpt_path: Any = None) -> Any:
        sync = GradientSync(comm_hook="powersgd")
        trainer = quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=epochs, callbacks=[sync])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Net(), loader(Net.rows(16), 2), ckpt_path=ckpt_path)
        trainer.save_checkpoint(str(tmp_path / "x.ckpt"))
        return sum("PowerSGD begins anew" in str(w.message) for w in caught)

    assert run_ranks(run, epochs=1) == [0, 0]
    assert 1 in run_ranks(run, epochs=2, ckpt_path=str(tmp_path / "x.ckpt"))


# -- BatchNorm over all ranks ----------------------------------------------------------------------------------------------------


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.BatchNorm1d(2))
        self.same = self.layers[1]


def test_sync_batchnorm_is_refused_on_the_cpu_with_its_name() -> None:
    with pytest.raises(MisconfigurationException, match="sync_batchnorm=True: .* not on cpu"):
        quiet(accelerator="cpu", devices=2, strategy="ddp", sync_batchnorm=True)
    assert not quiet(accelerator="cpu", devices=1, sync_batchnorm=True).settings.sync_batchnorm  # alone there is nothing to share


def test_sync_batchnorm_lasts_for_the_run_and_keeps_keys_and_objects() -> None:
    module = Normed()
    keys, layer = list(module.state_dict()), module.layers[1]
    restore = synced_batchnorm(module)
    assert type(module.layers[1]) is type(module.layers[3]) is torch.nn.SyncBatchNorm and module.layers[1] is module.same is layer
    assert list(module.state_dict()) == keys
    pictures = torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    synced = module.layers(pictures)  # without a process group SyncBatchNorm computes as BatchNorm does
    restore()
    assert type(module.layers[1]) is torch.nn.BatchNorm2d and type(module.layers[3]) is torch.nn.BatchNorm1d
    assert list(module.state_dict()) == keys and vars(layer).keys() == vars(torch.nn.BatchNorm2d(2)).keys()
    torch.testing.assert_close(module.layers(pictures), synced)


def test_sync_batchnorm_refuses_a_layer_with_a_forward_of_its_own() -> None:
    class Own(torch.nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), Own(2))
    with pytest.raises(MisconfigurationException, match="1 is a Own with a forward of its own"):
        synced_batchnorm(module)
    assert type(module[0]) is torch.nn.BatchNorm1d


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs cuda")
def test_sync_batchnorm_on_a_gpu() -> None:
    """One device: the layers are synchronised ones inside the fit and plain ones afterwards."""
    kinds = []

    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers.insert(1, torch.nn.BatchNorm1d(8))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kinds.append(type(self.layers[1]))
            return super().training_step(batch, batch_idx)

    module = Module()
    quiet(accelerator="gpu", devices=1, strategy="ddp", sync_batchnorm=True, max_epochs=1).fit(module, loader(Net.rows(8), 4))
    assert set(kinds) == {torch.nn.SyncBatchNorm} and type(module.layers[1]) is torch.nn.BatchNorm1d
