"""Exported weights, read by safetensors and transformers themselves."""

import numpy
import pytest
import safetensors.torch
import torch
import transformers

import ipurun
from ipurun.cli.main import main

TINY = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}


def _trained(recipe, **keys):
    words = ["hydra.run.dir=run"]
    return ipurun.train(
        recipe, overrides=words, max_steps=2, eval={"at_end": False, "every_epochs": None}, quiet=True, **keys
    )


def test_plain_torch_loads_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _trained("gpt", model=TINY)
    exported = ipurun.export("run", "weights.safetensors", quiet=True)
    loaded = ipurun.load("run").model
    weights = safetensors.torch.load_file("weights.safetensors")
    assert exported.tensors == len(weights)
    loaded.load_state_dict(weights)  # strict: tied weights are there under each of their names
    for name, value in loaded.state_dict().items():
        assert torch.equal(weights[name], value)


def test_transformers_computes_the_same_as_the_gpt_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _trained("gpt", model=TINY)
    ipurun.export("run", "exported", quiet=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained("exported").eval()
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ipurun.load("run").model(tokens), atol=1e-5, rtol=1e-5)
    ipurun.export("run", "halves", half=True, quiet=True)
    assert transformers.AutoModelForCausalLM.from_pretrained("halves", dtype="auto").dtype == torch.float16


def test_transformers_computes_the_same_as_the_bert_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _trained("bert", model=TINY)
    ipurun.export("run", "exported", quiet=True)
    theirs = transformers.AutoModelForPreTraining.from_pretrained("exported").eval()
    ours = ipurun.load("run").model
    tokens, kinds = torch.arange(5, 25).reshape(2, 10), torch.tensor([[0] * 5 + [1] * 5] * 2)
    mask = torch.tensor([[1] * 10, [1] * 7 + [0] * 3])
    positions = torch.tensor([[1, 4], [2, 6]])
    with torch.no_grad():
        words, follows, _ = ours(tokens, kinds, mask, positions, torch.tensor([0, 1]), torch.tensor([[1, 2], [3, 4]]))
        out = theirs(tokens, attention_mask=mask, token_type_ids=kinds)
    chosen = out.prediction_logits[torch.arange(2)[:, None], positions]
    torch.testing.assert_close(chosen, words, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.seq_relationship_logits, follows, atol=1e-5, rtol=1e-4)


def test_a_model_of_transformers_comes_back_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrapped.py").write_text(
        "import torch, transformers\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i):\n"
        "        t = (torch.arange(16) * (i + 1)) % 96\n"
        "        return {'input_ids': t, 'labels': t}\n"
        "def model(): return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_positions=64, "
        "n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = {"model": {"_target_": "wrapped.model"}, "data": {"_target_": "wrapped.Data"}, "max_steps": 2}
    ipurun.train(None, overrides=["hydra.run.dir=run"], micro_batch_size=2, quiet=True, **keys)
    assert main(["export", "run", "--out", "exported", "--quiet"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained("exported").eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        expected = ipurun.load("run").model(tokens).logits
        torch.testing.assert_close(theirs(tokens).logits, expected)


def test_parquet_holds_every_column(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    _trained("mnist")
    columns = "index,input,target,output"
    words = ["predict", "run", "eval.max_samples=30", "--out", "p.parquet", "--columns", columns, "--quiet"]
    assert main(words) == 0
    table = parquet.read_table("p.parquet")
    found = ipurun.predict("run", overrides=["eval.max_samples=30"], columns=columns.split(","), quiet=True)
    assert table.column_names == columns.split(",") and table["index"].to_pylist() == list(range(30))
    for name in ("input", "target", "output"):
        numpy.testing.assert_allclose(numpy.array(table[name].to_pylist()), found.columns[name].numpy())
