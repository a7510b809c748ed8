import pytest
import torch
from torch.utils.data import TensorDataset

from ipurun.datasets.resized import resized

GREY = TensorDataset(torch.arange(8.0).reshape(2, 1, 2, 2), torch.tensor([3, 4]))


def test_data_of_the_right_shape_stay_as_they_are():
    assert resized(GREY, image_size=2, in_channels=1) is GREY


def test_images_are_scaled_and_channels_repeated():
    data = resized(GREY, image_size=4, in_channels=3)
    image, label = data[1]
    assert (len(data), image.shape, label) == (2, (3, 4, 4), 4)
    # Bilinear: the corners stay, and a quarter of the way between 4 and 5 is 4.25.
    assert (image[0, 0, 0], image[0, 0, 1], image[2, 3, 3]) == (4, 4.25, 7)


def test_channels_that_cannot_be_repeated_are_refused():
    colours = TensorDataset(torch.zeros(1, 3, 2, 2), torch.zeros(1))
    with pytest.raises(ValueError, match="images with 3 channels cannot be expanded to 1"):
        resized(colours, image_size=2, in_channels=1)
