"""Models of timm, which needs torchvision: trained as they are, and planned."""

import pytest

timm = pytest.importorskip("timm", reason="timm is not installed, or torchvision, which it imports, is not")

from ipurun.cli.main import main  # noqa: E402

SAMPLE = "sample=[{name: x, shape: [3, 64, 64]}, {name: label, shape: [], dtype: int64, high: 4}]"


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "mobilenetv3_small_050"])
def test_a_model_of_timm_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["model._target_=timm.create_model", f"+model.model_name={name}", "+model.num_classes=4", "data=synthetic"]
    words += [SAMPLE, "loss.name=CrossEntropyLoss", "micro_batch_size=2", "limit.eval_calls=1", "--quiet"]
    assert main(["train", *words, "max_steps=2"]) == 0
    assert main(["plan", *words]) == 0
