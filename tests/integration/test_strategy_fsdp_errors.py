"""What FSDP cannot do is refused on every rank, with a message that says what to do."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import EveryStep
from trainer import FSDPStrategy, MisconfigurationException
from trainer.devices import Devices


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Quasi(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Early(Net):
    def __init__(self):
        super().__init__()
        self.kept = (list(self.parameters()),)

    def configure_optimizers(self):
        return torch.optim.SGD(self.kept[0], lr=0.1)


class Elsewhere(Net):
    def configure_model(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.layers[0], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))


class Listed(Net):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.ModuleList([torch.nn.Linear(2, 2)])


CASES = [
    (Manual, {}, "cannot do manual optimization"),
    (Quasi, {}, "cannot run LBFGS"),
    (Early, {}, "holds parameters that are not the module's"),
    (Scalar, {}, r"without a dimension: w\. Give it the shape \(1,\)"),
    (Elsewhere, {}, r"layers\.0\.weight was sharded on another mesh"),
    (Net, {"wrap": torch.nn.Conv2d}, "fits no part of Net"),
    (Listed, {"wrap": [torch.nn.ModuleList]}, "chose a ModuleList, which is never called"),
]


def test_what_fsdp_cannot_do_is_refused_on_every_rank():
    def task():
        for cls, settings, message in CASES:
            module = cls()
            with pytest.raises(MisconfigurationException, match=message):
                quiet(strategy=FSDPStrategy(**settings), devices=2, max_steps=1).fit(module, loader(Net.rows(4), 2))
            assert type(module) is cls and not any(p.is_meta for p in module.parameters()), cls
            assert cls is Elsewhere or all(type(p) is torch.nn.Parameter for p in module.parameters())

    run_ranks(task)


class Factored(Net):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


def test_an_optimizer_state_of_another_shape_is_refused(tmp_path):
    quiet(max_steps=1, callbacks=[EveryStep(tmp_path)]).fit(Factored(), loader(Net.rows(4), 2))

    def task():
        with pytest.raises(MisconfigurationException, match="'row_var' of parameter 0 has the shape"):
            quiet(strategy="fsdp", devices=2, max_steps=2).fit(Factored(), loader(Net.rows(4), 2), ckpt_path=tmp_path / "step=1.ckpt")

    run_ranks(task)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard_size": 0}, "must be a number of ranks >= 1"),
        ({"reshard_after_forward": 2}, "must be True or False"),
        ({"wrap": "blocks"}, "must be module classes, a function"),
    ],
)
def test_arguments(settings, message):
    with pytest.raises(MisconfigurationException, match=message):
        FSDPStrategy(**settings)


def test_devices_that_do_not_fit():
    with pytest.raises(MisconfigurationException, match="does not divide the 3 ranks"):
        quiet(strategy=FSDPStrategy(shard_size=2), devices=3, accelerator="cpu")
    with pytest.raises(MisconfigurationException, match="the device is the CPU already"):
        FSDPStrategy(cpu_offload=True).device(Devices("cpu", (0,)), 0)
    with pytest.raises(MisconfigurationException, match="on mps use one device"):
        FSDPStrategy().device(Devices("mps", (0,)), 0)


def test_one_device_is_a_single_device(tmp_path):
    strategy = FSDPStrategy(cpu_offload=False)
    trainer, module = quiet(strategy=strategy, devices=1, max_epochs=1, accumulate_grad_batches=2), Scalar()
    trainer.fit(module, loader([1.0, 2.0]))
    assert module.w.item() == -1.5 and strategy.mesh is None
    trainer.save_checkpoint(tmp_path / "end.ckpt")  # optimizers are plain, so it is whole
    assert "optimizer_states" in torch.load(tmp_path / "end.ckpt", weights_only=True)


def test_an_older_torch_is_told():
    def task():
        from torch.distributed.fsdp import FSDPModule

        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            del FSDPModule.set_reduce_scatter_unused_params
        with pytest.raises(MisconfigurationException, match="needs a newer torch"):
            quiet(strategy=FSDPStrategy(find_unused_parameters=True), devices=2, max_steps=1).fit(Net(), loader(Net.rows(4), 2))

    run_ranks(task)


class Unfinished(FSDPStrategy):
    def finish(self):
        if self.dist.world.rank == 1:
            raise OSError("no room")
        super().finish()


def test_weights_that_cannot_come_together_on_one_rank_end_all():
    def task():
        quiet(strategy=Unfinished(), devices=2, max_epochs=1).fit(Net(), loader(Net.rows(8), 2))

    with pytest.raises(OSError, match="no room"):
        run_ranks(task)
