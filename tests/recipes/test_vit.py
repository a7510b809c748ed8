import pytest
import torch
from recipe_runs import assert_learns, assert_same_training, parameters_of
from torch.nn import functional

from ipurun.config.compose import one
from ipurun.datasets.synthetic import parse_sample
from ipurun.recipes.mnist.dataset import splits as mnist_splits
from ipurun.recipes.vit.dataset import splits
from ipurun.recipes.vit.model import Attention, PatchEmbedding, VisionTransformer

SMALL = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "dropout": 0.0}


@pytest.mark.parametrize(
    ("option", "published"),
    [("vit_tiny", 5_717_416), ("vit_small", 22_050_664), ("vit_base", 86_567_656), ("vit_large", 304_326_632)],
)
def test_sizes_are_the_published_ones(option, published):
    assert parameters_of(option) == published


def test_attention_equals_torch():
    torch.manual_seed(0)
    attention = Attention(16, 4, 0.0)
    hidden = torch.randn(3, 5, 16)
    query, key, value = (part.view(3, 5, 4, 4).transpose(1, 2) for part in attention.qkv(hidden).split(16, dim=-1))
    mixed = functional.scaled_dot_product_attention(query, key, value)
    expected = attention.proj(mixed.transpose(1, 2).reshape(3, 5, 16))
    torch.testing.assert_close(attention(hidden), expected)


def test_patches_go_row_by_row():
    embed = PatchEmbedding(4, 2, 1, 1)
    torch.nn.init.ones_(embed.proj.weight)
    torch.nn.init.zeros_(embed.proj.bias)
    image = torch.tensor([[1.0, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]])
    assert embed(image[None, None]).flatten().tolist() == [4, 8, 12, 16]


def test_only_position_embeddings_depend_on_the_order_of_patches():
    torch.manual_seed(0)
    model = VisionTransformer(**SMALL).eval()
    image = torch.randn(2, 3, 8, 8)
    swapped = image.roll(4, dims=3)
    assert not torch.allclose(model(image), model(swapped))
    torch.nn.init.zeros_(model.pos_embed)
    torch.testing.assert_close(model(image), model(swapped))


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="image_size 28 cannot be cut into patches of 5"):
        VisionTransformer(image_size=28, patch_size=5)
    with pytest.raises(ValueError, match="16 cannot be divided among 3 heads"):
        VisionTransformer(hidden_size=16, num_heads=3)


def test_digits_are_unscaled_or_scaled_to_the_model():
    plain = mnist_splits()["test"]
    digit, label = splits()["test"][3]
    assert torch.equal(digit, plain[3][0]) and label == plain[3][1]
    large, label = splits(image_size=56, in_channels=3)["test"][3]
    assert large.shape == (3, 56, 56) and label == plain[3][1]
    expected = functional.interpolate(plain[3][0][None], size=(56, 56), mode="bilinear", align_corners=False)[0]
    for colour in large:
        torch.testing.assert_close(colour[None], expected)
    assert splits(image_size=56)["train"].notes == mnist_splits()["train"].notes


@pytest.mark.parametrize("words", [[], ["model=vit_base"], ["model=vit_cifar", "data=cifar10"]])
def test_the_declared_sample_matches_the_data(words):
    config = one(["+recipe=vit", *words]).config
    declared = parse_sample(config.sample)
    size, colours = config.data["image_size"], config.data["in_channels"]
    assert declared[0].shape == (colours, size, size)
    assert declared[1].high >= 10
    if not words:
        assert tuple(splits()["train"][0][0].shape) == declared[0].shape


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("strategy", ["pipelined", "sharded"])
def test_training_over_several_ipus_equals_plain_torch(strategy):
    layout = ["pipeline.layers_per_ipu=[1,1,1,1]", f"pipeline.strategy={strategy}"]
    sizes = ["model.hidden_size=16", "micro_batch_size=2", "gradient_accumulation=7"]
    assert_same_training(["+recipe=vit", *layout, *sizes], loss_of)


@pytest.mark.usefixtures("empty_folder")
def test_it_learns_digits():
    assert_learns(["+recipe=vit"], steps=150, falls_by=0.5)
