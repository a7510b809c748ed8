"""A project of runs with every kind of data, and the same runs as one of several processes or alone.

`python project.py RUNS_DIR` runs all of `RUNS` in this process, as a launcher's process if it is one.
"""

import sys

CODE = '''
import numpy
import ipurun

class Net(torch.nn.Module):
    """Two layers with dropout and batch norm, and so random numbers and statistics of each replica."""
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(8, 3)
    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))

def points(samples, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=random)
    return torch.utils.data.TensorDataset(x, x.argmax(1) % 3)

class Augmented(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data
    def __len__(self):
        return len(self.data)
    def __getitem__(self, index):
        x, y = self.data[index]
        open(f"seen-{os.environ.get('RANK', 'alone')}", "a").write(f"{index}\\n")
        return x + 0.1 * torch.randn(4), y

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data = data
    def __iter__(self):
        return iter([self.data[index] for index in range(len(self.data))])

class Positions(Stream):
    def __len__(self):
        return len(self.data)
    def read(self, start, stop):
        return [self.data[index] for index in range(start, min(stop, len(self.data)))]

class Damaged(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data
    def __len__(self):
        return len(self.data)
    def __getitem__(self, index):
        if index % 15 == 7:
            raise OSError("truncated")
        return self.data[index]

class DamagedPositions(Positions):
    def read(self, start, stop):
        for index in range(start, min(stop, len(self.data))):
            yield Damaged(self.data)[index]

KINDS = {"tensors": lambda data: data, "augmented": Augmented, "stream": Stream, "positions": Positions,
         "damaged": Damaged, "damaged_positions": DamagedPositions}

def splits(kind="tensors"):
    wrap = KINDS[kind]
    return {"train": wrap(points(100, 1)), "test": wrap(points(37, 2)) if kind != "augmented" else points(37, 2)}

class TopTwo:
    """A metric that cannot be merged: it must see the outputs of all processes."""
    higher_is_better = True
    def __init__(self):
        self.reset()
    def reset(self):
        self.seen = []
    def update(self, outputs, targets):
        self.seen += (outputs.topk(2, dim=1).indices == targets[:, None]).any(1).tolist()
    def compute(self):
        return float(numpy.mean(self.seen)) + len(self.seen)

class FailsInOne(ipurun.Callback):
    """Raises an error in one of several processes."""
    def on_step(self, event):
        if os.environ.get("RANK") == "1" and event.step > 3:
            raise ValueError("a bad day")
'''

KEYS = """\
epochs: 2
devices: 4
seed: 3
micro_batch_size: 3
optimizer: {_target_: poptorch.optim.AdamW, lr: 0.01}
metrics:
  accuracy: {_target_: ipurun.metrics.Accuracy, on: [train, eval]}
  f1: {_target_: ipurun.metrics.F1}
  top_two: {_target_: dist_code.TopTwo}
"""

EXACT = "distributed.deterministic=true"
RUNS = {
    "tensors": [EXACT],
    "deep": [EXACT, "device_iterations=2", "gradient_accumulation=2"],
    "pipelined": [
        EXACT,
        "pipeline.split=[last]",
        "devices=8",
        "gradient_accumulation=3",
        "inference.device_iterations=2",
    ],
    "augmented": [EXACT, "data.kind=augmented", "loader.workers=1"],
    "stream": [EXACT, "data.kind=stream", "max_steps=12"],
    "positions": [EXACT, "data.kind=positions"],
    # Adam would enlarge the rounding of the bias before the batch norm, whose gradient is zero.
    "quick": ["gradient_accumulation=2", "optimizer._target_=poptorch.optim.SGD"],
    "damaged": [EXACT, "data.kind=damaged", "loader.on_error=skip"],
    "damaged_workers": [EXACT, "data.kind=damaged", "loader.on_error=skip", "loader.workers=2"],
    "damaged_positions": [EXACT, "data.kind=damaged_positions", "loader.on_error=skip"],
    "callback": [EXACT, "+callbacks.mine._target_=dist_code.FailsInOne", "on_callback_error=continue"],
    "averaged": [
        *[EXACT, "averaging.kind=ema", "averaging.decay=0.9", "device_iterations=2", "schedule=one_cycle"],
        *["freeze=[first]", "unfreeze.first=4", "early_stopping.patience=9"],
    ],
    "half": [EXACT, "max_steps=4", "eval.at_end=false"],
}
LIGHTNING = {"steps": "Peaks", "lists": "Lists"}  # of `lightning_duck`


def words_of(name, runs_dir):
    """Return the words of one of the runs."""
    words = [f"name={name}", f"runs_dir={runs_dir}"]
    if name not in LIGHTNING:
        return ["+recipe=tiny", *words, *RUNS[name]]
    words += [f"model._target_=lightning_duck.{LIGHTNING[name]}", "data._target_=lightning_duck.Loaders"]
    return [*words, EXACT, "devices=4", "epochs=2", "micro_batch_size=2", "gradient_accumulation=2", "data.samples=70"]


if __name__ == "__main__":
    from ipurun.interface import train_words
    from ipurun.module_search import append_working_folder

    append_working_folder()
    for run in (*RUNS, *LIGHTNING):
        train_words(words_of(run, sys.argv[1]), quiet=True)
