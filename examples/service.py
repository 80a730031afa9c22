"""Training inside a web service: each request trains in a child process, whose memory is back with the system when it is done.

    python examples/service.py --port 8000
    curl -X POST 'http://127.0.0.1:8000/train?lr=0.003&epochs=3'     # {"accuracy": ..., "weights": "..."}
    curl 'http://127.0.0.1:8000/memory'                              # of the service itself, in MB
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit


def train(folder: str, lr: float, epochs: int) -> dict[str, object]:
    """Train in this process, a fresh one: torch and all it allocates are here only."""
    import torch  # loaded here, so that the service stays small
    from sklearn.datasets import load_digits
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from trainer import Trainer, TrainModule

    class Classifier(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=lr)

    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    split = torch.utils.data.random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, seed=0, default_root_dir=folder, enable_progress_bar=False)
    trainer.fit(Classifier(), DataLoader(split[0], 32, shuffle=True), DataLoader(split[1], 360))
    return {"accuracy": trainer.callback_metrics["accuracy"].item(), "weights": trainer.checkpoint_callback.best_model_path}


class Handler(BaseHTTPRequestHandler):
    """POST /train?lr=&epochs= and GET /memory."""

    def do_POST(self) -> None:
        wish = dict(parse_qsl(urlsplit(self.path).query))
        folder = tempfile.mkdtemp(prefix="run-", dir=self.server.folder)
        # A pool of one that is new for each request: its end is the end of the process. "spawn", since threads run here already.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            try:
                self.answer(200, child.submit(train, folder, float(wish.get("lr", 0.003)), int(wish.get("epochs", 3))).result())
            except Exception as error:  # of any kind: the service goes on
                self.answer(500, {"error": f"{type(error).__name__}: {error}"})

    def do_GET(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])  # in memory now (Linux)
        self.answer(200, {"megabytes": pages * resource.getpagesize() >> 20})

    def answer(self, status: int, content: dict[str, object]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--folder", type=Path, default=Path("service_runs"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.folder = str(args.folder.absolute())
    print(f"listening at http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
