"""`python -m trainer.migrate`: names change, everything else stays to the byte, and what could not be changed is told."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.migrate.__main__ import main

pytest.importorskip("libcst")  # a machine that runs the GPU tests alone may lack it

from trainer.migrate import names, texts

ROOT = Path(__file__).resolve().parents[2]


def ported(code: str, by_hand: tuple[str, ...] = ()) -> str:
    """Return the rewritten program; what is told must be `by_hand` ("line: beginning of the text"), no more and no less."""
    new, notes = texts.program(code)
    told = [f"{note.place}: {note.text}" for note in notes]
    assert len(told) == len(by_hand) and all(one.startswith(other) for one, other in zip(told, by_hand, strict=True)), told
    if not by_hand:
        assert texts.program(new) == (new, []), "a second run finds nothing"
    return new


IMPORTS = {
    "import pytorch_lightning as pl\nx = pl.Trainer()\n": "from trainer import Trainer\nx = Trainer()\n",
    "import lightning as L\nx = L.LightningModule, L.Callback\n": (
        "from callbacks import Callback\nfrom trainer import TrainModule\nx = TrainModule, Callback\n"
    ),
    "import lightning\nx = lightning.pytorch.callbacks.Timer, lightning.Trainer\n": (
        "from callbacks import Timer\nfrom trainer import Trainer\nx = Timer, Trainer\n"
    ),
    "import lightning.pytorch as pl\nclass M(pl.LightningModule): pass\n": "from trainer import TrainModule\nclass M(TrainModule): pass\n",
    "from lightning import pytorch as pl\npl.seed_everything(1)\n": "from trainer import seed_everything\nseed_everything(1)\n",
    "import pytorch_lightning.callbacks\nx = pytorch_lightning.callbacks.early_stopping.EarlyStopping\n": (
        "from callbacks import EarlyStopping\nx = EarlyStopping\n"
    ),
    "import pytorch_lightning.loggers as logs\nx = logs.CSVLogger('a')\n": "from callbacks import CSVLogger\nx = CSVLogger('a')\n",
    "from pytorch_lightning import Trainer, LightningModule as LM, Callback  # all\nx = LM, Trainer, Callback\n": (
        "from callbacks import Callback\nfrom trainer import TrainModule as LM, Trainer  # all\nx = LM, Trainer, Callback\n"
    ),
    "from lightning.pytorch.callbacks import (\n    Timer,  # time\n    ModelCheckpoint as MC,\n)\n": (
        "from callbacks import (\n    Timer,  # time\n    ModelCheckpoint as MC,\n)\n"
    ),
    "from pytorch_lightning import LightningModule\nx = [LightningModule, LightningModule.log]\n": (
        "from trainer import TrainModule\nx = [TrainModule, TrainModule.log]\n"
    ),
    "from pytorch_lightning.strategies import DDPStrategy\n": "from trainer import DDPStrategy\n",
    "from pytorch_lightning.utilities.rank_zero import rank_zero_only\nf = rank_zero_only(g)\n": (
        "from trainer import rank_zero_only\nf = rank_zero_only(g)\n"
    ),
    "from lightning.fabric.utilities.seed import seed_everything\n": "from trainer import seed_everything\n",
    "from pytorch_lightning.utilities.types import STEP_OUTPUT\ndef f() -> STEP_OUTPUT: ...\n": "from typing import Any\ndef f() -> Any: ...\n",
    "from typing import Any\nfrom pytorch_lightning.utilities.types import STEP_OUTPUT\ndef f() -> STEP_OUTPUT: ...\n": (
        "from typing import Any\ndef f() -> Any: ...\n"
    ),
    "import os, pytorch_lightning as pl; x = pl.Trainer\n": "import os; from trainer import Trainer; x = Trainer\n",
    "def f():\n    import pytorch_lightning as pl\n    return pl.Trainer, pl.callbacks.Timer\n": (
        "def f():\n    from callbacks import Timer\n    from trainer import Trainer\n    return Trainer, Timer\n"
    ),
    "import pytorch_lightning as pl\n\nprint(1)\n": "\nprint(1)\n",
    "if x:\n    import pytorch_lightning as pl\n": "if x:\n    pass\n",
    "from pytorch_lightning import (  # all\n    Trainer,\n    # mine\n    Callback,  # and\n)\n": (
        "# all\n# mine\n# and\nfrom callbacks import Callback\nfrom trainer import Trainer\n"
    ),
    "if a: import pytorch_lightning as pl; x = pl.Trainer, pl.Callback\n": (
        "if a: from callbacks import Callback; from trainer import Trainer; x = Trainer, Callback\n"
    ),
    "def f():\r\n\timport lightning as L\r\n\treturn L.Trainer, L.Callback\r\n": (
        "def f():\r\n\tfrom callbacks import Callback\r\n\tfrom trainer import Trainer\r\n\treturn Trainer, Callback\r\n"
    ),
    "try:\n    from lightning import LightningModule\nexcept ImportError:\n    LightningModule = object\nclass M(LightningModule): pass\n": (
        "try:\n    from trainer import TrainModule as LightningModule\nexcept ImportError:\n    LightningModule = object\n"
        "class M(LightningModule): pass\n"
    ),
    "try:\n    from pytorch_lightning.utilities.rank_zero import rank_zero_only as f\nexcept ImportError:\n"
    "    from pytorch_lightning.utilities import rank_zero_only as f\nf(g)\n": (
        "try:\n    from trainer import rank_zero_only as f\nexcept ImportError:\n    from trainer import rank_zero_only as f\nf(g)\n"
    ),
    "try:\n    import lightning.pytorch as pl\nexcept ImportError:\n    import pytorch_lightning as pl\nx = pl.Trainer\n": (
        "try:\n    from trainer import Trainer\nexcept ImportError:\n    from trainer import Trainer\nx = Trainer\n"
    ),
    "import pytorch_lightning as pl\n\x0c\nclass M(pl.LightningModule): x = 'a\x0cb'\n\x0cx = pl.Trainer\n": (
        "from trainer import TrainModule, Trainer\n\x0c\nclass M(TrainModule): x = 'a\x0cb'\n\x0cx = Trainer\n"
    ),
    "trainer.fit_loop.max_epochs += 1; self.trainer.fit_loop.epoch_loop.max_steps = 3  # lightning\n": (
        "trainer.max_epochs += 1; self.trainer.max_steps = 3  # lightning\n"
    ),
    "x = {'class_path': 'lightning.pytorch.callbacks.Timer', \"_target_\": r\"pytorch_lightning.Trainer\"}\n": (
        "x = {'class_path': 'callbacks.Timer', \"_target_\": r\"trainer.Trainer\"}\n"
    ),
    "import pytorch_lightning as pl\nfrom pytorch_lightning import Trainer\nx = pl.Trainer, Trainer\n": "from trainer import Trainer\nx = Trainer, Trainer\n",
}  # fmt: skip


@pytest.mark.parametrize("before", IMPORTS)
def test_every_form_of_import(before: str) -> None:
    assert ported(before) == IMPORTS[before]


def test_uses_in_annotations_strings_and_scopes() -> None:
    before = '''\
import pytorch_lightning as pl
from typing import TYPE_CHECKING, List, cast
if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

def f(a: "pl.Trainer", b: "List[pl.Callback]", c: List["LightningModule"], é: pl.LightningModule = None) -> "pl.LightningDataModule":
    """pl.Trainer in a docstring stays."""
    trainer = pl.Trainer(max_epochs=1)  # pl.Trainer in a comment, too
    assert isinstance(a, (pl.LightningModule, pl.Trainer)), "pl.Trainer"
    return cast("pl.Trainer", trainer), f"{pl.LightningModule.__name__}", a.pl.Trainer

def g(pl):
    return pl.Trainer

Maybe = Optional["pl.Trainer"], d["pl"]["a b"]
'''
    after = ported(before)
    assert after.splitlines()[:2] == ["from callbacks import Callback", "from trainer import DataModule, TrainModule, Trainer"]
    assert after.splitlines()[4] == "    from trainer import TrainModule"
    body = after[after.index("def f") :]
    assert body == (
        before[before.index("def f") :]
        .replace('"pl.Trainer", b: "List[pl.Callback]", c: List["LightningModule"]', '"Trainer", b: "List[Callback]", c: List["TrainModule"]')
        .replace('é: pl.LightningModule = None) -> "pl.LightningDataModule"', 'é: TrainModule = None) -> "DataModule"')
        .replace("trainer = pl.Trainer(", "trainer = Trainer(")
        .replace("(pl.LightningModule, pl.Trainer)", "(TrainModule, Trainer)")
        .replace('Optional["pl.Trainer"], d["pl"]', 'Optional["Trainer"], d["pl"]')
        .replace('cast("pl.Trainer"', 'cast("Trainer"')
        .replace("{pl.LightningModule.", "{TrainModule.")
    )


def test_names_of_the_program_are_not_taken() -> None:
    code = "import pytorch_lightning as pl\nclass Timer(pl.callbacks.Timer): pass\nx = pl.Trainer\nTrainer = 3\n"
    assert ported(code) == (
        "from callbacks import Timer as _Timer\nfrom trainer import Trainer as _Trainer\nclass Timer(_Timer): pass\nx = _Trainer\nTrainer = 3\n"
    )
    code = "from pytorch_lightning import LightningModule\nclass TrainModule(LightningModule): pass\n"
    assert ported(code) == "from trainer import TrainModule as LightningModule\nclass TrainModule(LightningModule): pass\n"
    code = "from pytorch_lightning import LightningModule\n__all__ = ['LightningModule']\n"
    assert ported(code) == "from trainer import TrainModule as LightningModule\n__all__ = ['LightningModule']\n"


def test_what_has_no_counterpart_stays_and_is_told() -> None:
    code = (
        "import pytorch_lightning as pl\n"
        "from pytorch_lightning.loggers import CSVLogger, WandbLogger\n"
        "from lightning.fabric import Fabric\n"
        "from pytorch_lightning.callbacks import *\n"
        "t = pl.Trainer(plugins=[pl.plugins.DeepSpeedPrecision()])\n"
        "getattr(pl, 'Trainer')\n"
    )
    told = (
        "2: loggers.WandbLogger has no counterpart", "3: fabric.Fabric has no counterpart", "4: from pytorch_lightning.callbacks import *: ",
        "5: plugins.DeepSpeedPrecision has no counterpart", "6: pl is used as an object",
    )  # fmt: skip
    assert ported(code, told) == (
        "from trainer import Trainer\n"
        "import pytorch_lightning as pl\n"
        "from pytorch_lightning.loggers import WandbLogger\n"
        "from callbacks import CSVLogger\n"
        "from lightning.fabric import Fabric\n"
        "from pytorch_lightning.callbacks import *\n"
        "t = Trainer(plugins=[pl.plugins.DeepSpeedPrecision()])\n"
        "getattr(pl, 'Trainer')\n"
    )
    code = "if x:\r\n\tfrom pytorch_lightning import (  # mine\r\n\t\tcallbacks as cb,\r\n\t)\r\n\tf(cb, cb.Timer)\r\nimport lightning; f(lightning, lightning.Trainer)\r\n"
    assert ported(code, ("5: cb is used", "6: lightning is used")) == (
        code.replace("\tfrom", "\tfrom callbacks import Timer\r\n\tfrom").replace("cb.Timer", "Timer")
        .replace("import lightning;", "from trainer import Trainer; import lightning;").replace("lightning.Trainer", "Trainer")
    )  # fmt: skip
    code = "def f():\n    global pl, LightningModule\n    import pytorch_lightning as pl\n    from pytorch_lightning import LightningModule\nf(pl.Trainer, LightningModule)\n"
    assert ported(code, ("3: pl is used outside of",)) == code.replace("pytorch_lightning import L", "trainer import TrainModule as L")
    code = "class A:\n    import pytorch_lightning as pl\n    def f(self): return self.pl.Trainer\n"
    assert ported(code, ("2: pl is used outside of",)) == code
    code = "import pytorch_lightning as pl\nif x:\n    pl = None\npl.Trainer()\n"
    assert ported(code, ("3: pl may be", "4: pl may be")) == code


ADVICE = {
    "pl.Trainer(gpus=2)": "Trainer has no argument 'gpus'. Use accelerator='gpu', devices=...",
    "pl.Trainer(max_epoch=2)": "Trainer has no argument 'max_epoch'. Did you mean 'max_epochs'?",
    "pl.Trainer(logger)": "Trainer takes keyword arguments only",
    "pl.Trainer(strategy='deepspeed_stage_2')": "strategy='deepspeed_stage_2': DeepSpeed is not supported",
    "pl.Trainer(strategy='ddp_sharded')": "strategy='ddp_sharded'",
    "pl.Trainer(accelerator='tpu')": "accelerator='tpu' is not supported",
    "pl.Trainer(precision='transformer-engine')": "precision='transformer-engine' is unknown",
    "pl.Trainer(val_check_interval=100, accumulate_grad_batches=4)": (
        "val_check_interval counts optimizer steps, not batches: with accumulate_grad_batches 4, 100 steps are 400 batches; write 25 to validate as often as before."
    ),
    "pl.Trainer(val_check_interval=10, accumulate_grad_batches=4)": (
        "val_check_interval counts optimizer steps, not batches: with accumulate_grad_batches 4, 10 steps are 40 batches; 10 batches are no whole number of steps of 4 batches."
    ),
    "pl.Trainer(val_check_interval=every, accumulate_grad_batches=n)": "val_check_interval counts optimizer steps",
    "trainer.fit_loop.epoch_progress": "trainer.fit_loop does not exist: use trainer.max_epochs",
    "pl.strategies.DDPStrategy(process_group_backend='gloo')": "DDPStrategy has no argument 'process_group_backend'. Use nothing: it follows",
    "pl.strategies.SingleDeviceStrategy('cpu')": "SingleDeviceStrategy takes no arguments",
    "pl.callbacks.EarlyStopping('a', patients=3)": "EarlyStopping has no argument 'patients'. Did you mean 'patience'?",
    "self.trainer._results": "trainer._results is internal to Lightning",
    "model.to_torchscript()": "TrainModule has no to_torchscript: use torch.export",
    "self.log('a', 1, reduce_fx=torch.median)": "reduce_fx is 'mean', 'sum', 'min' or 'max'",
    "self.log('a', 1, sync_dist_group=g)": "There are no groups",
    "torch.load('lightning_logs/version_0/checkpoints/a.ckpt')": 'The default folder is "runs"',
    "patch('pytorch_lightning.Trainer')": "'pytorch_lightning.Trainer' names Lightning",
    "optimizer.toggle_model()": "toggle_model does not exist",
    "class M(pl.LightningModule):\n def training_epoch_end(self, outputs): ...": "training_epoch_end is never called: use ",
    "class M(pl.LightningModule):\n def on_train_epoch_end(self, outputs): ...": "on_train_epoch_end takes (outputs), and is called with ().",
    "class M(pl.LightningModule):\n def training_step(self, batch, batch_idx, optimizer_idx): ...": (
        "training_step takes (batch, batch_idx, optimizer_idx), and is called with (batch, batch_idx). optimizer_idx: for several optimizers set"
    ),
    "class M(pl.LightningModule):\n def training_step(self, dataloader_iter): ...": "training_step takes (dataloader_iter), and is called with",
    "class C(pl.Callback): ...\nclass D(C):\n def on_epoch_end(self, trainer, pl_module): ...": "on_epoch_end is never called: use on_train_epoch_end",
    "class C(pl.callbacks.Timer):\n def on_train_batch_ends(self): ...": "on_train_batch_ends is no hook. Did you mean 'on_train_batch_end'?",
}
FINE = (
    "pl.Trainer(val_check_interval=100)", "pl.Trainer(val_check_interval=0.5, accumulate_grad_batches=4)", "pl.Trainer(**settings)",
    "pl.strategies.DDPStrategy(static_graph=True)", "trainer.fit_loop.max_epochs += 1", "pl.AttributeDict(a=1)",
    "pl.Trainer(val_check_interval=100, accumulate_grad_batches=1)", "pl.Trainer(strategy='ddp_find_unused_parameters_true', precision='bf16')",
    "self.log('a', 1, sync_dist=True, reduce_fx='sum')", "self.log('a', 1, reduce_fx=torch.sum)", "self.log('a', 1, reduce_fx=max)", "trainer.callback_metrics['a']", "logger.log('a', reduce_fx=f)",
    "class M(pl.LightningModule):\n def on_train_batch_end(self, outputs, batch, batch_idx, unused=0): ...",
    "class M(pl.LightningModule):\n def training_step(self, batch): ...\n def on_train_epoch_end(self, *args): ...\n def helper(self, a, b, c, d, e): ...",
    "class M(pl.Callback):\n 'lightning_logs, pytorch_lightning'\n",
    "class Mine:\n def on_epoch_end(self, a): ...", "import torchmetrics\ntorchmetrics.Accuracy()",
)  # fmt: skip


@pytest.mark.parametrize("code", ADVICE)
def test_differences_in_meaning_are_told_with_their_line(code: str) -> None:
    _, notes = texts.program(f"import pytorch_lightning as pl\n{code}\n")
    assert [note.by_hand for note in notes] == [True]
    assert notes[0].text.startswith(ADVICE[code])
    assert int(notes[0].place) == 1 + len(code.splitlines())


@pytest.mark.parametrize("code", FINE)
def test_nothing_is_told_of_what_is_the_same(code: str) -> None:
    assert texts.program(f"import pytorch_lightning as pl\n{code}\n")[1] == []


def test_manual_optimization() -> None:
    code = (
        "import pytorch_lightning as pl\n"
        "class M(pl.LightningModule):\n"
        "    def __init__(self):\n"
        "        self.automatic_optimization = False\n"
        "    def training_step(this, batch, batch_idx):\n"
        "        a, b = this.optimizers()\n"
        "        with a.toggle_model():\n"
        "            a.step()\n"
        "        with b.toggle_model(sync_grad=False): ...\n"
    )
    new = ported(code, ("9: toggle_model does not exist: write `with self.toggled_optimizer(optimizer):`",))
    assert "        with this.toggled_optimizer(a):\n" in new and "b.toggle_model(sync_grad=False)" in new
    _, notes = texts.program(f"{code}pl.Trainer(max_steps=10)\n")
    assert [(n.place, n.by_hand) for n in notes] == [("4", False), ("9", True)]


def test_a_notebook_keeps_all_but_its_code() -> None:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["import pytorch_lightning as pl"]},
        {"cell_type": "code", "execution_count": 3, "metadata": {"é": 1}, "outputs": [{"text": ["pl.Trainer"]}],
         "source": ["%matplotlib inline\n", "!pip install é pytorch_lightning\n", "import pytorch_lightning as pl  # é\n", "x = !ls\n", "pl?"]},
        {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": "%%bash\nimport pytorch_lightning é\n"},
        {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": []},
        {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": ["%%time\n", "for é in 'a':\n", "    %time pl\n", "    pl.Trainer(gpus=1)"]},
    ]  # fmt: skip
    table = {"cells": cells, "metadata": {"kernelspec": {"name": "python3"}}, "nbformat": 4, "nbformat_minor": 5}
    text = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
    new, notes = texts.notebook(text)
    assert [(note.place, note.text) for note in notes] == [("code cell 4, line 4", "Trainer has no argument 'gpus'. Use accelerator='gpu', devices=....")]
    wanted = text.replace('"import pytorch_lightning as pl  # é\\n"', '"from trainer import Trainer  # é\\n"').replace("    pl.Trainer(g", "    Trainer(g")
    assert new == wanted
    crooked = text.replace('"nbformat": 4', '"nbformat":  4')
    unchanged, notes = texts.notebook(crooked)
    assert unchanged == crooked and notes[-1].text.startswith("the JSON of this notebook is laid out in an unusual way")
    assert texts.notebook("{}")[1][0].text.startswith("is no notebook")


def test_classes_that_yaml_files_name() -> None:
    text = (
        "# pytorch_lightning.callbacks.Timer\n"
        "trainer:\n"
        "  callbacks:\n"
        "    - class_path: pytorch_lightning.callbacks.EarlyStopping  # pytorch_lightning.x\n"
        "    - class_path: lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint\n"
        "  logger: {_target_: lightning.pytorch.loggers.WandbLogger}\n"
        "  strategy: 'pytorch_lightning.strategies.DDPStrategy'\n"
        "  url: https://lightning.ai/docs\n"
        "  dir: lightning_logs/a\n"
    )
    new, notes = texts.config(text)
    assert new == (
        text.replace("pytorch_lightning.callbacks.EarlyStopping", "callbacks.EarlyStopping")
        .replace("lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint", "callbacks.ModelCheckpoint")
        .replace("pytorch_lightning.strategies.DDPStrategy", "trainer.DDPStrategy")
    )
    assert [note.place for note in notes] == ["6", "9"] and "WandbLogger" in notes[0].text


# -- projects --------------------------------------------------------------------------------------------------------------

PROGRAM = "import pytorch_lightning as pl\n\n\ndef main():\n\tprint( 'é' )\n\treturn pl.Trainer ( max_epochs = 1 )  # so\n"
PORTED = PROGRAM.replace("import pytorch_lightning as pl", "from trainer import Trainer").replace("pl.Trainer ", "Trainer ")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_files_keep_all_that_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dos, latin = PROGRAM.replace("\n", "\r\n"), f"# -*- coding: latin-1 -*-\n{PROGRAM}"
    files = {"plain.py": PROGRAM.encode(), "dos.py": dos.encode(), "bom.py": b"\xef\xbb\xbf" + PROGRAM.encode(), "latin.py": latin.encode("latin-1")}
    for name in (".venv/lib/a.py", "env/a.py", "x/site-packages/a.py", ".hidden/a.py", "x/.a.d/a.py"):
        files[name] = PROGRAM.encode()
    for name, data in {**files, "env/pyvenv.cfg": b""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "bad.py").write_text("import pytorch_lightning\nprint 'x'\n")
    (tmp_path / "unread.py").write_bytes(b"# lightning \xff\n")
    (tmp_path / "other.py").write_text("print 'x'\n")
    (tmp_path / "real").mkdir()
    (tmp_path / "link.py").symlink_to(tmp_path / ".hidden/a.py")
    (tmp_path / "linked").symlink_to(tmp_path / ".hidden")
    (tmp_path / "plain.py").chmod(0o751)
    os.mkfifo(tmp_path / "pipe.py")  # reading it would wait for ever
    before = contents(tmp_path)

    assert main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert contents(tmp_path) == before
    assert out.count("\n+from trainer import Trainer") == 4 and f"--- {tmp_path}/plain.py\n" in out
    assert f"{tmp_path}/bad.py:2: is no Python" in err and f"{tmp_path}/unread.py:1: cannot be read" in err and "other.py" not in err
    assert "4 file(s) to change, 2 place(s) to change by hand.\nNothing was written; --write does.\n" in err
    assert main([str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().out == ""

    assert main([str(tmp_path), "--write"]) == 1
    after = contents(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"plain.py", "dos.py", "bom.py", "latin.py"} and after.keys() == before.keys()
    assert after["plain.py"] == PORTED.encode() and after["dos.py"] == PORTED.replace("\n", "\r\n").encode()
    assert after["bom.py"] == b"\xef\xbb\xbf" + PORTED.encode() and after["latin.py"] == f"# -*- coding: latin-1 -*-\n{PORTED}".encode("latin-1")
    assert (tmp_path / "plain.py").stat().st_mode & 0o777 == 0o751 and (tmp_path / "link.py").is_symlink()
    assert main([str(tmp_path / "plain.py"), "--check"]) == 0
    assert main([str(tmp_path / "link.py"), "--write"]) == 0  # named itself, it is followed
    assert (tmp_path / "link.py").is_symlink() and (tmp_path / ".hidden/a.py").read_bytes() == PORTED.encode()


def test_what_files_take_from_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "common.py").write_text("import pytorch_lightning as pl\nfrom pytorch_lightning import LightningModule, LightningDataModule\n")
    (package / "model.py").write_text("from .common import LightningModule\n\nclass M(LightningModule): ...\n")
    (package / "other.py").write_text("from package.common import np, pl\nx = pl.Trainer()\n")
    (package / "star.py").write_text("from .common import *\nclass D(LightningDataModule): ...\nx = pl.Trainer\n")
    (package / "callbacks.py").write_text("")
    assert main([str(tmp_path), "--write"]) == 1
    err = capsys.readouterr().err
    assert (package / "common.py").read_text() == (
        "from trainer import TrainModule as LightningModule, DataModule as LightningDataModule\n"
    )
    assert "LightningModule" in (package / "model.py").read_text()
    assert all(f"{package}/{name}.py:1: pl comes from another file of yours" in err for name in ("other", "star")) and "hides" not in err
    (tmp_path / "trainer.py").write_text("")
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "mine.py").write_text("import pytorch_lightning as pl\npl.Callback\n")
    main([str(tmp_path)])
    err = capsys.readouterr().err
    assert f"{tmp_path}/trainer.py:1: hides the package 'trainer'" in err and f"{tmp_path}/callbacks:1: hides the package 'callbacks'" in err


def test_a_write_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(PROGRAM)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main([str(tmp_path), "--write"]) == 1
    err = capsys.readouterr().err
    assert err == (
        f"{tmp_path}/a.py: cannot be written (No space left on device): it is as it was.\n"
        "0 file(s) changed, 1 place(s) to change by hand.\n"
    )
    assert contents(tmp_path) == {"a.py": PROGRAM.encode()}


def test_without_libcst_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "libcst" else find(name, *more))
    assert main([str(tmp_path)]) == 2
    assert "pip install 'torch-trainer-kit[migrate]'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path / "none")])
    assert error.value.code == 2


def test_a_program_it_makes_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program in the style of today's Lightning: its own logger and callback, subclassed hooks, names used through the module."""
    (tmp_path / "program.py").write_text(
        """\
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only


class ListLogger(Logger):
    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def name(self):
        return "list"

    @property
    def version(self):
        return "0"

    @rank_zero_only
    def log_hyperparams(self, params):
        pass

    @rank_zero_only
    def log_metrics(self, metrics, step):
        self.rows.append((step, sorted(metrics)))


class Print(Callback):
    def on_train_end(self, trainer: L.Trainer, pl_module: "L.LightningModule") -> None:
        print("done", trainer.global_step, isinstance(pl_module, L.LightningModule))


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    L.seed_everything(1)
    logger = ListLogger()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy="auto", max_epochs=2, logger=logger, log_every_n_steps=1, enable_checkpointing=False,
        callbacks=[Print(), EarlyStopping("loss", check_on_train_epoch_end=True)], enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2))
    print(len([names for _, names in logger.rows if "loss" in names]), "rows")
"""
    )
    assert main([str(tmp_path), "--write"]) == 0
    capsys.readouterr()
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-2:] == ["done 4 True", "4 rows"]


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer.migrate", str(tmp_path / "none")]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and f"there is no {tmp_path}/none" in done.stderr


# What Lightning 2.6 has in the `__all__` of its sub-packages.
PUBLIC = {
    "": "Trainer LightningDataModule LightningModule Callback seed_everything",
    "callbacks": (
        "BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Callback Checkpoint DeviceStatsMonitor EarlyStopping "
        "GradientAccumulationScheduler LambdaCallback LearningRateFinder LearningRateMonitor ModelCheckpoint ModelPruning ModelSummary "
        "OnExceptionCheckpoint ProgressBar RichModelSummary RichProgressBar StochasticWeightAveraging SpikeDetection ThroughputMonitor Timer "
        "TQDMProgressBar EMAWeightAveraging WeightAveraging"
    ),
    "loggers": "LitLogger CometLogger CSVLogger Logger MLFlowLogger TensorBoardLogger WandbLogger",
    "strategies": "DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy ParallelStrategy SingleDeviceStrategy Strategy",
    "profilers": "Profiler AdvancedProfiler PassThroughProfiler PyTorchProfiler SimpleProfiler XLAProfiler",
    "tuner": "Tuner",
    "cli": "LightningCLI LightningArgumentParser SaveConfigCallback OptimizerCallable LRSchedulerCallable ReduceLROnPlateau ArgsType",
    "utilities": (
        "AttributeDict CombinedLoader disable_possible_user_warnings find_shared_parameters grad_norm GradClipAlgorithmType is_picklable "
        "is_shared_filesystem LightningEnum measure_flops move_data_to_device rank_zero_deprecation rank_zero_info rank_zero_only "
        "rank_zero_warn set_shared_parameters suggested_max_num_workers"
    ),
    "plugins": (
        "AsyncCheckpointIO CheckpointIO TorchCheckpointIO XLACheckpointIO BitsandbytesPrecision DeepSpeedPrecision DoublePrecision "
        "HalfPrecision MixedPrecision Precision TransformerEnginePrecision FSDPPrecision XLAPrecision LayerSync TorchSyncBatchNorm"
    ),
    "accelerators": "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator find_usable_cuda_devices",
}  # fmt: skip


def test_every_public_name_has_a_counterpart_or_an_advice() -> None:
    for part, listed in PUBLIC.items():
        for name in listed.split():
            path = (part, name) if part else (name,)
            assert names.object_of(path) == path and not names.is_module(path)
            target = names.find(path)
            if target is None:
                assert ": " in names.advice(path), path
            else:
                assert hasattr(importlib.import_module(target.module), target.name), target


def test_a_class_of_another_meaning_is_not_taken_for_one_of_the_same_name() -> None:
    assert names.find(("utilities", "model_summary", "ModelSummary")) is None
    assert names.find(("fabric", "strategies", "DDPStrategy")) is None and names.find(("fabric", "loggers", "CSVLogger")) is None


def test_lists_of_requirements_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(PROGRAM)
    (tmp_path / "requirements-dev.txt").write_text("torch\nlightning>=2\npytorch-lightning[extra]\nlightning-utilities\n# lightning\n")
    (tmp_path / "pyproject.toml").write_text('dependencies = [\n  "lightning",\n]\n')
    assert main([str(tmp_path)]) == 0
    told = [line.split(": note")[0] for line in capsys.readouterr().err.splitlines() if "asks for Lightning" in line]
    assert told == [f"{tmp_path}/pyproject.toml:2", f"{tmp_path}/requirements-dev.txt:2", f"{tmp_path}/requirements-dev.txt:3"]
