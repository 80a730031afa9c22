"""A small GPT that learns to write Python from the sources of Python's own library, under any strategy.

    python examples/gpt.py                                     # one process
    python examples/gpt.py --strategy fsdp --devices 2         # weights, gradients and optimizer state in shares
    python examples/gpt.py --strategy model_parallel_ddp --devices 4    # 2 processes of 2 devices each
    python examples/gpt.py --strategy pipeline --devices 2     # the blocks in two stages, on two ranks

Each prints the same losses: a strategy only says where the work is done.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from trainer import ModelParallelDDPStrategy, ModelParallelStrategy, Trainer, TrainModule, seed_everything


class Text(Dataset):
    """Pieces of `length` + 1 bytes of the library's files (or of --text FILE), one after the other; a token is a byte."""

    def __init__(self, file: Path | None, length: int, size: int = 400_000) -> None:
        files = [file] if file else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.text, self.length = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)[:size]), dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.text[index * self.length : (index + 1) * self.length + 1].long()


class Block(nn.Module):
    """Attention and a perceptron, each with a norm ahead of it and a way around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(TrainModule):
    """Embedding, `layers` blocks, and the scores of the 256 bytes that may come next."""

    def __init__(self, layers: int = 4, width: int = 64, heads: int = 4, length: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[-1]]
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", choices=["auto", "ddp", "fsdp", "model_parallel_ddp", "pipeline"])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", type=Path, help="a file to learn from (default: Python's library)")
    return parser.parse_args()


def train(args: argparse.Namespace) -> Trainer:
    seed_everything(0)
    special = {
        "model_parallel_ddp": lambda: ModelParallelDDPStrategy(2, stack="blocks", micro_batches=2),
        "pipeline": lambda: ModelParallelStrategy(pipeline_parallel_size=args.devices, stack="blocks", micro_batches=4),
    }
    strategy = special[args.strategy]() if args.strategy in special else args.strategy
    shares = {"pipeline": 1, "model_parallel_ddp": args.devices // 2}.get(args.strategy, args.devices)  # of a batch
    trainer = Trainer(accelerator="cpu", strategy=strategy, devices=args.devices, max_steps=args.steps, seed=0, log_every_n_steps=10)
    trainer.fit(GPT(), DataLoader(Text(args.text, 64), batch_size=32 // shares, shuffle=True))
    return trainer


def main() -> None:
    trainer = train(arguments())
    print(f"loss {trainer.callback_metrics['loss']:.4f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
