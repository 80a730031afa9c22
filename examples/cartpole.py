"""Reinforcement learning: a pole on a cart, balanced by double deep Q-learning. The data are what the agent has lived through so far.

The replay memory is an IterableDataset: to fetch a batch, the agent first acts a few times, with the network as it is at that moment.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from trainer import Trainer, TrainModule, seed_everything


class CartPole:
    """The classic task (Barto, Sutton and Anderson 1983): push left or right every 20 ms; over at 12 degrees, 2.4 m or 500 pushes."""

    def reset(self) -> torch.Tensor:
        self.state, self.pushes = [(torch.rand(()).item() - 0.5) / 10 for _ in range(4)], 0
        return torch.tensor(self.state)

    def step(self, action: int) -> tuple[torch.Tensor, bool]:
        x, v, angle, spin = self.state
        force, sin, cos = 10.0 if action else -10.0, math.sin(angle), math.cos(angle)
        shared = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * shared) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        push = shared - 0.05 * turn * cos / 1.1
        self.state, self.pushes = [x + 0.02 * v, v + 0.02 * push, angle + 0.02 * spin, spin + 0.02 * turn], self.pushes + 1
        return torch.tensor(self.state), abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12) or self.pushes >= 500


class Replay(IterableDataset):
    """A ring of the newest `size` moments (state, action, next state, fell); yields `steps` batches of random ones, 4 new moments each."""

    def __init__(self, agent: Agent, size: int = 10_000, steps: int = 100) -> None:
        self.agent, self.steps = agent, steps
        self.ring, self.written = torch.zeros(size, 10), 0
        self.world, self.lengths = CartPole(), [0.0]
        self.state = self.world.reset()

    def live(self, times: int) -> None:
        for _ in range(times):
            action = self.agent.act(self.state, explore=max(0.05, 1 - self.written / 3000))
            after, over = self.world.step(action)
            fell = over and self.world.pushes < 500
            self.ring[self.written % len(self.ring)] = torch.tensor([*self.state, action, *after, fell])
            self.written += 1
            if over:
                self.lengths = [*self.lengths[-19:], float(self.world.pushes)]
            self.state = self.world.reset() if over else after

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.steps):
            self.live(4 if self.written else 500)
            yield self.ring[torch.randint(min(self.written, len(self.ring)), (64,))]


class Agent(TrainModule):
    """Q-values of the two pushes; `target`, a slowly following copy, values the next state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def act(self, state: torch.Tensor, explore: float = 0.0) -> int:
        return int(torch.randint(2, ())) if torch.rand(()) < explore else int(self.net(state.to(self.device)).argmax())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        state, action, after, fell = batch[:, :4], batch[:, 4:5].long(), batch[:, 5:9], batch[:, 9:]
        with torch.no_grad():
            best = self.target(after).gather(1, self.net(after).argmax(1, keepdim=True))
        loss = F.smooth_l1_loss(self.net(state).gather(1, action), 1 + 0.99 * best * (1 - fell))
        self.log("loss", loss, prog_bar=True)
        self.log("pushes", sum(self.memory.lengths) / len(self.memory.lengths), prog_bar=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs: object, batch: torch.Tensor, batch_idx: int) -> None:
        torch._foreach_lerp_(list(self.target.parameters()), list(self.net.parameters()), 0.01)

    def train_dataloader(self) -> DataLoader:
        self.memory = Replay(self)
        return DataLoader(self.memory, batch_size=None)  # it makes batches itself

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40, help="of 100 steps")
    args = parser.parse_args()
    torch.set_num_threads(1)  # what there is to compute is too small to share
    seed_everything(0)
    agent = Agent()
    Trainer(accelerator="cpu", max_epochs=args.epochs, seed=0, log_every_n_steps=20).fit(agent)
    world, lengths = CartPole(), []
    for _ in range(10):
        state, over = world.reset(), False
        while not over:
            state, over = world.step(agent.act(state))
        lengths.append(world.pushes)
    print(f"the pole stands for {sum(lengths) / len(lengths):.0f} pushes (mean of 10; at most 500)")


if __name__ == "__main__":
    main()
