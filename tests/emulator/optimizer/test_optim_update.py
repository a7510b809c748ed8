"""Updates on the device, compared with torch's optimizers or explicit arithmetic."""

import functools
import math

import pytest
import torch
from optim_harness import Device, assert_same, gradients_of, starting_weights, train_with_torch

from ipurun.emulator import enums, optim
from ipurun.emulator.options import Options
from ipurun.emulator.poptorch_core import Error

AS_TORCH = [
    (torch.optim.SGD, optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
    (torch.optim.SGD, optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}),
    (torch.optim.SGD, optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2}),
    (torch.optim.Adam, optim.Adam, {"lr": 0.1, "weight_decay": 0.2}),
    (torch.optim.Adam, optim.Adam, {"lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-3}),
    (torch.optim.AdamW, optim.AdamW, {"lr": 0.1, "weight_decay": 0.2}),
    (torch.optim.RMSprop, optim.RMSprop, {"lr": 0.1, "weight_decay": 0.2, "alpha": 0.8}),
    (torch.optim.RMSprop, optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
    (torch.optim.RMSprop, optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
]


@pytest.mark.parametrize(("torch_class", "poptorch_class", "arguments"), AS_TORCH)
@pytest.mark.parametrize("from_torch", [True, False])
def test_matches_torch(torch_class, poptorch_class, arguments, from_torch):
    expected = train_with_torch(lambda params: torch_class(params, **arguments), 6)
    make = torch_class if from_torch else poptorch_class
    assert_same(Device(lambda params: make(params, **arguments)).train(6), expected)


@pytest.mark.parametrize(("torch_class", "poptorch_class", "arguments"), AS_TORCH)
def test_loss_scaling_is_neutral_in_float32(torch_class, poptorch_class, arguments):
    expected = train_with_torch(lambda params: torch_class(params, **arguments), 4)
    device = Device(lambda params: poptorch_class(params, loss_scaling=64.0, **arguments))
    assert device.compiled.loss_scaling == 64.0
    assert_same(device.train(4), expected)


@pytest.mark.parametrize("velocity_scaling", [1.0, 16.0])
@pytest.mark.parametrize("loss_scaling", [1.0, 8.0])
def test_combined_sgd_equals_separate(velocity_scaling, loss_scaling):
    arguments = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
    expected = train_with_torch(lambda params: torch.optim.SGD(params, **arguments), 6)
    combined = functools.partial(
        optim.SGD, use_combined_accum=True, velocity_scaling=velocity_scaling, loss_scaling=loss_scaling
    )
    assert_same(Device(lambda params: combined(params, **arguments)).train(6), expected)


@pytest.mark.parametrize("arguments", [{}, {"momentum": 0.9}])
def test_dampening_applies_from_the_first_step(arguments):
    device = Device(lambda params: optim.SGD(params, lr=0.1, dampening=0.5, weight_decay=0.2, **arguments))
    before = starting_weights()
    gradients = gradients_of(before, 1.0)
    device.feed(gradients)
    expected = {name: w - 0.1 * 0.5 * (gradients[name] + 0.2 * w) for name, w in before.items()}
    assert_same(device.weights, expected)


def test_nesterov_gradient_is_not_averaged():
    device = Device(lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True), accumulation=4)
    before = starting_weights()
    gradients = gradients_of(before, 1.0)
    device.feed(gradients)
    expected = {name: w - 0.1 * (4 * gradients[name] + 0.9 * gradients[name]) for name, w in before.items()}
    assert_same(device.weights, expected)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_weight_norm", [None, 0.5])
def test_lamb(bias_correction, max_weight_norm):
    lr, beta1, beta2, eps, decay = 0.1, 0.9, 0.999, 1e-8, 0.01
    device = Device(
        lambda params: optim.LAMB(params, lr=lr, bias_correction=bias_correction, max_weight_norm=max_weight_norm)
    )
    weights = starting_weights()
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in (1, 2, 3):
        gradients = gradients_of(weights, 1.0)
        for name, w in weights.items():
            first[name] = beta1 * first[name] + (1 - beta1) * gradients[name]
            second[name] = beta2 * second[name] + (1 - beta2) * gradients[name] ** 2
            m_hat, v_hat = first[name], second[name]
            if bias_correction:
                m_hat, v_hat = m_hat / (1 - beta1**step), v_hat / (1 - beta2**step)
            x = m_hat / (v_hat.sqrt() + eps) + decay * w
            norm = min(float(w.norm()), 65500.0 if max_weight_norm is None else max_weight_norm)
            weights[name] = w - lr * norm / float(x.norm()) * x
    assert_same(device.train(3), weights)


def test_lamb_ratio_is_one_if_a_norm_is_zero():
    device = Device(lambda params: optim.LAMB(params, lr=0.1, max_weight_norm=0.0, bias_correction=False))
    before = starting_weights()
    gradients = gradients_of(before, 1.0)
    device.feed(gradients)
    new_share = 1 - torch.tensor([0.9, 0.999])  # the device holds the betas as float32
    expected = {}
    for name, w in before.items():
        x = new_share[0] * gradients[name] / ((new_share[1] * gradients[name] ** 2).sqrt() + 1e-8) + 0.01 * w
        expected[name] = w - 0.1 * x
    assert_same(device.weights, expected)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_step_on_the_host_is_the_same(bias_correction):
    make = functools.partial(optim.LAMB, lr=0.1, bias_correction=bias_correction)
    assert_same(Device(make).train(4), train_with_torch(make, 4))


def test_adamw_always_corrects_the_bias():
    expected = train_with_torch(lambda params: torch.optim.AdamW(params, lr=0.1), 4)
    assert_same(Device(lambda params: optim.AdamW(params, lr=0.1, bias_correction=False)).train(4), expected)


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_rmsprop_of_tensorflow(momentum):
    lr, alpha, eps = 0.1, 0.99, 1e-8
    device = Device(lambda params: optim.RMSprop(params, lr=lr, momentum=momentum, use_tf_variant=True))
    weights = starting_weights()
    squares = {name: torch.ones_like(w) for name, w in weights.items()}
    buffers = {name: torch.zeros_like(w) for name, w in weights.items()}
    for _ in range(3):
        gradients = gradients_of(weights, 1.0)
        for name, w in weights.items():
            squares[name] = alpha * squares[name] + (1 - alpha) * gradients[name] ** 2
            buffers[name] = (momentum or 0.0) * buffers[name] + lr * gradients[name] / (squares[name] + eps).sqrt()
            weights[name] = w - buffers[name]
    assert_same(device.train(3), weights)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_max_grad_norm_clips_like_torch(name):
    arguments = {"lr": 0.05, "eps": 1e-2} if name != "SGD" else {"lr": 0.05}
    expected = train_with_torch(lambda p: getattr(torch.optim, name)(p, **arguments), 5, max_norm=0.01)
    device = Device(lambda p: getattr(optim, name)(p, max_grad_norm=0.01, **arguments))
    assert_same(device.train(5), expected)


def test_large_max_grad_norm_changes_nothing():
    expected = train_with_torch(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 3)
    device = Device(lambda params: optim.SGD(params, lr=0.1, momentum=0.9, max_grad_norm=1e6))
    assert_same(device.train(3), expected)


def test_plain_sgd_clips_before_unscaling():
    device = Device(lambda params: optim.SGD(params, lr=1.0, loss_scaling=4.0, max_grad_norm=1.0))
    before = starting_weights()
    gradients = {name: torch.ones_like(w) for name, w in before.items()}
    device.feed({name: 4.0 * gradient for name, gradient in gradients.items()})
    norm = 4.0 * math.sqrt(sum(g.numel() for g in gradients.values()))
    expected = {name: w - 4.0 / norm / 4.0 * gradients[name] for name, w in before.items()}
    assert_same(device.weights, expected)


def test_momentum_sgd_clips_the_velocity():
    device = Device(lambda params: optim.SGD(params, lr=1.0, momentum=0.5, max_grad_norm=1.0))
    before = starting_weights()
    gradients = {name: torch.ones_like(w) for name, w in before.items()}
    device.feed(gradients)
    step = 1.0 / math.sqrt(sum(g.numel() for g in gradients.values()))
    assert_same(device.weights, {name: w - step for name, w in before.items()})


class TestReduction:
    @pytest.mark.parametrize("make", [optim.SGD, functools.partial(optim.SGD, momentum=0.9), optim.Adam])
    @pytest.mark.parametrize("strategy", [enums.MeanReductionStrategy.Post, enums.MeanReductionStrategy.Running])
    def test_mean_over_micro_batches_and_replicas(self, make, strategy):
        options = Options()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
        device = Device(lambda p: make(p, lr=0.1), options, accumulation=3, replicas=2)
        expected = Device(lambda p: make(p, lr=0.1))
        before = starting_weights()
        pieces = [{n: w * k for n, w in before.items()} for k in range(6)]
        for piece in pieces:
            device.compiled.accumulate(piece, 1)
        device.compiled.apply()
        expected.feed({name: w * 2.5 for name, w in before.items()})
        assert_same(device.weights, expected.weights)

    def test_sum(self):
        options = Options()
        options.Training.accumulationAndReplicationReductionType(enums.ReductionType.Sum)
        device = Device(lambda p: optim.SGD(p, lr=0.1), options, accumulation=3, replicas=2)
        before = starting_weights()
        device.feed(before)
        assert_same(device.weights, {name: w - 0.1 * 6 * w for name, w in before.items()})

    @pytest.mark.parametrize("strategy", [enums.MeanReductionStrategy.Post, enums.MeanReductionStrategy.Running])
    def test_micro_batches_summed_beforehand(self, strategy):
        options = Options()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
        device = Device(lambda p: optim.SGD(p, lr=0.1), options, accumulation=4)
        before = starting_weights()
        device.compiled.accumulate({name: 3 * w for name, w in before.items()}, 3)
        device.compiled.accumulate(before, 1)
        device.compiled.apply()
        assert_same(device.weights, {name: w - 0.1 * w for name, w in before.items()})

    @pytest.mark.parametrize("strategy", [enums.MeanReductionStrategy.Post, enums.MeanReductionStrategy.Running])
    def test_mean_counts_the_replicas_of_all_processes(self, strategy):
        options = Options()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
        device = Device(lambda p: optim.SGD(p, lr=0.1), options, accumulation=2, replicas=2)
        before = starting_weights()
        for _ in range(2):  # one of two replicas belongs to another process
            device.compiled.accumulate(before, 1)
        device.compiled.apply()
        assert_same(device.weights, {name: w - 0.1 * w / 2 for name, w in before.items()})

    def test_gradients_passed_in_are_not_changed(self):
        device = Device(lambda p: optim.SGD(p, lr=0.1), accumulation=2)
        gradients = gradients_of(starting_weights(), 1.0)
        kept = {name: gradient.clone() for name, gradient in gradients.items()}
        device.feed(gradients)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, kept[name])

    def test_post_and_loss_is_refused(self):
        options = Options()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(enums.MeanReductionStrategy.PostAndLoss)
        with pytest.raises(Error, match="PostAndLoss"):
            Device(lambda p: optim.SGD(p, lr=0.1), options)


class TestHalf:
    def test_half_accumulator_rounds(self):
        options = Options()
        device = Device(
            lambda p: optim.SGD(p, lr=1.0, accum_type=torch.float16),
            options,
            accumulation=2,
            weights={"w": torch.zeros(1)},
        )
        device.compiled.accumulate({"w": torch.tensor([1.0])}, 1)
        device.compiled.accumulate({"w": torch.tensor([1.0 / 4096])}, 1)
        device.compiled.apply()
        # 1 + 1/4096 cannot be represented in half: the small gradient is lost.
        assert device.weights["w"].item() == -0.5

    def test_half_weights_keep_their_type(self):
        device = Device(lambda p: optim.Adam(p, lr=0.1), weights={"w": torch.ones(3).half()})
        device.feed({"w": torch.tensor([1.0, -1.0, 2.0]).half()})
        assert device.weights["w"].dtype == torch.float16
        torch.testing.assert_close(device.weights["w"], torch.tensor([0.9, 1.1, 0.9]).half())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_state_has_the_declared_type(self, dtype):
        device = Device(
            lambda p: optim.Adam(
                p, lr=0.1, first_order_momentum_accum_type=dtype, second_order_momentum_accum_type=dtype
            )
        )
        device.train(1)
        state = device.compiled.read_state()["ipu_state"]
        assert state["Accl1___weight"].dtype == dtype
        assert state["Accl2___weight"].dtype == dtype

    def test_stochastic_rounding_keeps_the_expected_value(self):
        options = Options()
        options.Precision.enableStochasticRounding(True)
        options.randomSeed(7)
        step = 2.0**-13  # an eighth of the distance between 1 and the next half number
        device = Device(lambda p: optim.SGD(p, lr=step), options, weights={"w": torch.ones(4096, dtype=torch.float16)})
        device.feed({"w": -torch.ones(4096, dtype=torch.float16)})
        values = device.weights["w"].float().unique().tolist()
        assert values == [1.0, 1.0 + 2.0**-10]
        assert abs(float(device.weights["w"].float().mean()) - (1.0 + step)) < 2.0**-10 * 0.03


class TestAutomaticLossScaling:
    @staticmethod
    def device(gradient_type):
        options = Options()
        options.Training.setAutomaticLossScaling(True)
        return Device(
            lambda p: optim.SGD(p, lr=0.0, loss_scaling=8.0),
            options,
            weights={"w": torch.ones(4, dtype=gradient_type)},
        )

    def test_grows_while_gradients_are_small(self):
        device = self.device(torch.float16)
        for expected in (16.0, 32.0, 64.0):
            device.feed({"w": torch.ones(4, dtype=torch.float16)})
            assert device.compiled.loss_scaling == expected

    def test_shrinks_near_overflow(self):
        device = self.device(torch.float16)
        device.feed({"w": torch.tensor([1.0, 1.0, 1.0, 9000.0], dtype=torch.float16)})
        assert device.compiled.loss_scaling == 4.0
        assert device.compiled.read_state()["ipu_state"]["lossScaleUpdateFactor"].item() == 0.5

    def test_float32_gradients_are_ignored(self):
        device = self.device(torch.float32)
        device.feed({"w": torch.full((4,), 1e6)})
        assert device.compiled.loss_scaling == 8.0

    def test_update_is_unscaled_by_the_total_factor(self):
        options = Options()
        options.Training.setAutomaticLossScaling(True)
        device = Device(lambda p: optim.SGD(p, lr=0.5), options, weights={"w": torch.ones(2, dtype=torch.float16)})
        device.feed({"w": torch.zeros(2, dtype=torch.float16)})
        assert device.compiled.loss_scaling == 2.0
        device.feed({"w": torch.full((2,), 2.0, dtype=torch.float16)})
        assert device.weights["w"].tolist() == [0.5, 0.5]


def test_parameters_without_a_group_use_the_defaults():
    device = Device(lambda p: optim.SGD([{"params": p[:1], "lr": 0.0}], lr=0.1), group_of={"weight": 0})
    before = starting_weights()
    device.feed(before)
    assert torch.equal(device.weights["weight"], before["weight"])
    torch.testing.assert_close(device.weights["bias"], before["bias"] * 0.9)


def test_parameters_without_gradient_do_not_change():
    device = Device(lambda p: optim.SGD(p, lr=0.1, weight_decay=0.5))
    before = starting_weights()
    device.feed({"weight": before["weight"]})
    assert torch.equal(device.weights["bias"], before["bias"])


def test_names_of_the_update_operations():
    assert Device(lambda p: optim.SGD(p, lr=0.1)).compiled.operations() == ["SGD0VarUpdate"] * 2
    operations = Device(lambda p: torch.optim.AdamW(p, lr=0.1)).compiled.operations()
    assert operations.count("AdamUpdater") == operations.count("AdamVarUpdate") == 2
