"""Compose command lines: valid ones, and the messages for invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

import pytest

from ipurun.config.compose import from_yaml, one, points, to_yaml, with_words
from ipurun.config.overrides import each_key_once
from ipurun.errors import ConfigError, Problem


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_recipe(name: str, text: str) -> Path:
    path = Path("conf/recipe") / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problems_of(*argv: str) -> List[Problem]:
    try:
        found = points(argv)
    except ConfigError as error:
        return list(error.problems)
    return [problem for point in found.points for problem in point.problems]


class TestComposing:
    def test_a_recipe_and_an_override_make_a_typed_config(self) -> None:
        config = one(["+recipe=mnist", "devices=8"]).config
        assert config.devices == 8
        assert config.name == "mnist"
        assert config.loss.name == "CrossEntropyLoss"

    def test_recipe_works_without_the_plus(self) -> None:
        assert one(["recipe=mnist"]).recipes == ("mnist",)

    @pytest.mark.parametrize(("typed", "kept"), [("16.16", "16.16"), ("16.32", "16.32"), ("16", "16"), ("32", "32")])
    def test_precision_is_text_even_if_it_looks_like_a_number(self, typed: str, kept: str) -> None:
        assert one(["+recipe=mnist", f"precision={typed}"]).config.precision == kept

    @pytest.mark.parametrize("prefix", ["", "+", "++"])
    def test_open_and_closed_keys_take_any_of_hydras_prefixes(self, prefix: str) -> None:
        config = one(["+recipe=mnist", f"{prefix}devices=2", f"{prefix}model.anything=3"]).config
        assert config.devices == 2
        assert config.model["anything"] == 3

    def test_a_pattern_as_key_of_a_mapping_can_be_typed(self) -> None:
        config = one(["+recipe=mnist", 'precision_rules={"*.norm": 32}']).config
        assert config.precision_rules == {"*.norm": "32"}

    def test_a_group_chosen_on_the_command_line_wins_over_the_recipe(self) -> None:
        write_recipe(
            "mine",
            "# @package _global_\nsample: [{shape: [2]}]\ndata: {_target_: my.Data, folder: here}\n",
        )
        data = one(["+recipe=mine", "data=synthetic", "data.train_samples=7"]).config.data
        assert data["_target_"] == "ipurun.datasets.synthetic.splits"
        assert data["train_samples"] == 7
        assert "folder" not in data

    def test_a_key_can_be_removed_from_a_chosen_group(self) -> None:
        write_recipe("mine", "# @package _global_\nsample: [{shape: [2]}]\ndata: {_target_: my.Data}\n")
        data = one(["+recipe=mine", "data=synthetic", "~data.train_samples"]).config.data
        assert data["_target_"] == "ipurun.datasets.synthetic.splits" and "train_samples" not in data

    def test_changed_keys_name_their_origin(self) -> None:
        write_recipe("mine", "# @package _global_\n\nepochs: 3\nmodel:\n  _target_: a.B\n")
        changed = {change.key: change.origin for change in one(["+recipe=mine", "seed=5"]).changed}
        assert changed["epochs"] == "conf/recipe/mine.yaml:3"
        assert changed["model._target_"] == "conf/recipe/mine.yaml:5"
        assert changed["seed"] == "command line"
        assert "micro_batch_size" not in changed

    def test_the_key_on_is_not_read_as_true(self) -> None:
        write_recipe("mine", "# @package _global_\nmetrics:\n  mae:\n    _target_: a.B\n    on: [train, eval]\n")
        assert one(["+recipe=mine"]).config.metrics["mae"]["on"] == ["train", "eval"]

    def test_a_stored_config_reads_back_equal(self, tmp_path: Path) -> None:
        config = one(["+recipe=mnist", "devices=4", "precision=16.32"]).config
        stored = tmp_path / "config.yaml"
        stored.write_text(to_yaml(config))
        assert from_yaml(stored) == config


class TestSweeps:
    def test_every_combination_is_a_point(self) -> None:
        found = points(["-m", "+recipe=mnist", "device_iterations=1,8", "seed=1,2,3"])
        assert [(p.config.device_iterations, p.config.seed) for p in found.points] == [
            (1, 1), (1, 2), (1, 3), (8, 1), (8, 2), (8, 3),
        ]  # fmt: skip
        assert found.points[3].swept == {"device_iterations": "8", "seed": "1"}
        assert found.points[3].overrides == ("+recipe=mnist", "device_iterations=8", "seed=1")

    def test_the_flag_may_be_anywhere(self) -> None:
        assert len(points(["+recipe=mnist", "-m", "seed=1,2"]).points) == 2

    def test_glob_over_recipes(self) -> None:
        names = {point.recipes[0] for point in points(["-m", "+recipe=glob(*)"]).points}
        assert {"mnist", "fashion_mnist"} <= names

    def test_a_sweep_declared_in_a_recipe(self) -> None:
        write_recipe("mine", "# @package _global_\nmodel: {_target_: a.B}\nhydra: {sweeper: {params: {seed: '1,2'}}}\n")
        assert [p.config.seed for p in points(["-m", "+recipe=mine"]).points] == [1, 2]
        assert [p.config.seed for p in points(["-m", "+recipe=mine", "seed=9"]).points] == [9]

    def test_several_values_without_the_flag_are_refused(self) -> None:
        (problem,) = problems_of("+recipe=mnist", "seed=1,2")
        assert "sweep" in problem.what
        assert problem.fix.startswith("-m seed=1,2")

    def test_a_bad_value_in_any_point_is_found(self) -> None:
        assert [p.what for p in problems_of("-m", "+recipe=mnist", "engine=cpu,gpu")] == ["`engine` cannot be `gpu`"]


class TestBadInput:
    def test_an_unknown_key_suggests_similar_keys_and_the_corrected_command(self) -> None:
        (problem,) = problems_of("+recipe=mnist", "device=8")
        assert problem.what == "unknown key `device`"
        assert problem.where == "command line: device=8"
        assert problem.known.startswith("devices")
        assert problem.fix == "ipurun train +recipe=mnist devices=8"

    @pytest.mark.parametrize(
        ("typed", "better"),
        [
            ("accelerator=ipu", "engine=ipu"),
            ("ipus=8", "devices=8"),
            ("strategy=ipu_strategy", "engine=ipu"),
            ("accumulate_grad_batches=4", "gradient_accumulation=4"),
            ("gradient_clip_val=1.0", "optimizer.max_grad_norm=1.0"),
            ("trainer.max_epochs=3", "epochs=3"),
            ("limit_train_batches=100", "limit.train_calls=100"),
            ("accelerator=gpu", "engine=auto"),
            ("overfit_batches=1", "debug=overfit"),
            ("patience=3", "early_stopping.patience=3"),
            ("fast_dev_run=true", "debug=fast"),
            ("autoreport=true", "profile.kind=graph"),
            ("autoreport_dir=a/b", "profile.dir=a/b"),
            ("convert_model_to_half=true", "precision=16-true"),
            ("steps=20", "max_steps=20"),
            ("per_device_train_batch_size=4", "micro_batch_size=4"),
            ("learning_rate=1e-3", "optimizer.lr=1e-3"),
            ("num_train_epochs=3.0", "epochs=3"),
            ("lr_scheduler_type=cosine", "schedule=cosine"),
            ("pod_type=pod16", "devices=16"),
            ("optimizer_state_offchip=true", "memory.optimizer_state.on_chip=false"),
            ("deviceIterations=4", "device_iterations=4"),
            ("Training.gradientAccumulation=8", "gradient_accumulation=8"),
            ("logCycleCount=true", "options.logCycleCount=true"),
            ("nproc_per_node=8", "devices=8"),
            ("clip=1.0", "optimizer.max_grad_norm=1.0"),
            ("clip_grad_norm=1.0", "optimizer.max_grad_norm=1.0"),
            ("max_norm=1.0", "optimizer.max_grad_norm=1.0"),
            ("clipnorm=1.0", "optimizer.max_grad_norm=1.0"),
            ("ema=true", "averaging.kind=ema"),
            ("ema=0.99", "averaging.decay=0.99"),
            ("swa=true", "averaging.kind=tail"),
            ("warmup=10", "schedule.warmup_steps=10"),
            ("early_stop=3", "early_stopping.patience=3"),
            ("label_smoothing=0.1", "loss.args.label_smoothing=0.1"),
            ("lr_scheduler_type=cosine_with_restarts", "schedule=warm_restarts"),
            ("lr_scheduler_type=polynomial", "schedule=polynomial"),
            ("load_from_checkpoint=a/b.ckpt", "init_from=a/b.ckpt"),
        ],
    )
    def test_keys_of_other_tools_are_translated(self, typed: str, better: str) -> None:
        (problem,) = problems_of("+recipe=mnist", typed)
        assert problem.fix == f"ipurun train +recipe=mnist {better}"
        assert problems_of("+recipe=mnist", better) == []

    def test_a_list_is_suggested_as_it_is_typed(self) -> None:
        (problem,) = problems_of("+recipe=mnist", "frozen=conv1")
        assert problem.fix == "ipurun train +recipe=mnist 'freeze=[conv1]'"

    def test_a_foreign_value_without_a_counterpart_names_only_the_key(self) -> None:
        (problem,) = problems_of("+recipe=mnist", "lr_scheduler_type=odd")
        assert (problem.known, problem.fix) == ("schedule", "remove lr_scheduler_type=odd")

    @pytest.mark.parametrize(
        ("typed", "advice"),
        [
            ("limit_train_batches=0.1", "limit.train_calls is a number, not a share: 0.1 x the host calls of an epoch"),
            ("strategy=ddp", "devices=N makes N replicas in one process"),
            ("trainer.strategy=ddp_spawn", "distributed=torchrun on CPUs"),
        ],
    )
    def test_a_foreign_value_without_a_counterpart_says_what_to_do(self, typed: str, advice: str) -> None:
        (problem,) = problems_of("+recipe=mnist", typed)
        assert advice in problem.fix

    @pytest.mark.parametrize("value", ["[1,4]", "{0:1,5:4}"])
    def test_accumulation_that_changes_during_a_run_is_refused_with_the_reason(self, value: str) -> None:
        (problem,) = problems_of("+recipe=mnist", f"gradient_accumulation={value}")
        assert "compiled into the program and cannot change" in problem.what

    def test_flags_of_other_tools_are_translated(self) -> None:
        with pytest.raises(ConfigError) as caught:
            points(["+recipe=mnist", "--nproc-per-node=8"])
        assert caught.value.problems[0].fix == "devices=8, without dashes"

    def test_keys_of_other_tools_in_yaml_are_translated(self) -> None:
        text = "max_epochs: 3\ntrainer: {gradient_clip_val: 0.5}\npod_type: pod4\nfast_dev_run: true\n"
        write_recipe("mine", f"# @package _global_\n{text}")
        assert [problem.fix for problem in problems_of("+recipe=mine")] == [
            "write epochs: 3",
            "write optimizer: {max_grad_norm: 0.5}",
            "write devices: 4",
            "choose it in the defaults list: - override /debug: fast",
        ]

    @pytest.mark.parametrize("typed", ["weights=foo.pt", "shufle=soon", "strateg=none"])
    def test_suggested_keys_can_take_the_value(self, typed: str) -> None:
        (problem,) = problems_of("+recipe=mnist", typed)
        assert problem.fix == f"remove {typed}" and problem.known == "run `ipurun ls keys` to see every key"

    @pytest.mark.parametrize(
        "typed", [["+debug=fast"], ["debug=overfit", "+debug=fast"], ["debug=fast", "+debug=fast"], ["++debug=fast"]]
    )
    def test_a_plus_before_a_group_that_has_a_file_is_explained(self, typed: List[str]) -> None:
        (problem,) = problems_of("+recipe=mnist", *typed)
        assert "has a file already" in problem.what and problem.where == f"command line: {typed[-1]}"
        assert problem.fix == "debug=fast" and "overfit" in problem.known

    def test_a_group_chosen_twice_in_a_file_is_explained(self) -> None:
        write_recipe("mine", "# @package _global_\ndefaults:\n  - /debug: fast\n  - /debug: overfit\n")
        (problem,) = problems_of("+recipe=mine")
        assert "Multiple values for debug" in problem.what and "- override /GROUP: NAME" in problem.fix

    def test_a_misspelled_section_suggests_the_section(self) -> None:
        write_recipe("mine", "# @package _global_\nmemroy:\n  io_tiles: 32\n")
        (problem,) = problems_of("+recipe=mine")
        assert problem.fix == "write memory"

    @pytest.mark.parametrize(
        ("typed", "advice"),
        [
            ("optimizer=[adam,adamw]", "optimizer.groups"),
            ("model=[digit_net,clothes_net]", "-m model=digit_net,clothes_net"),
            ("data=[mnist,synthetic]", "-m data=mnist,synthetic"),
            ("schedule=[cosine,linear]", "-m schedule=cosine,linear"),
        ],
    )
    def test_a_group_for_one_object_takes_one_choice(self, typed: str, advice: str) -> None:
        group = typed.partition("=")[0]
        with pytest.raises(ConfigError) as caught:
            points(["+recipe=mnist", typed])
        (problem,) = caught.value.problems
        assert problem.what == f"`{group}` takes one choice, not a list" and problem.key == group
        assert advice in problem.fix

    def test_one_choice_in_the_defaults_list_of_a_file(self) -> None:
        write_recipe("mine", "# @package _global_\ndefaults:\n  - override /optimizer: [adam, adamw]\n")
        (problem,) = problems_of("+recipe=mine")
        assert problem.where == "conf/recipe/mine.yaml:3" and "optimizer.groups" in problem.fix

    def test_several_loggers_are_fine(self) -> None:
        config = one(["+recipe=mnist", "logger=[csv,tensorboard]"]).config
        assert {"csv", "tensorboard"} <= set(config.logger)

    def test_a_list_for_a_key_that_takes_one_number(self) -> None:
        (problem,) = problems_of("+recipe=mnist", "devices=[1,2]")
        assert problem.what == "`devices` takes one number, not a list"

    def test_all_problems_are_reported_together(self) -> None:
        found = problems_of("+recipe=mnist", "device=8", "epochs=many", "engine=gpu", "micro_batch_size=0", "loose")
        assert [problem.what for problem in found] == [
            "unknown key `device`",
            "`epochs` takes a whole number or null",
            "`loose` is not an override",
            "`micro_batch_size` must be 1 or more",
            "`engine` cannot be `gpu`",
        ]

    def test_a_recipe_without_its_key_is_recognized(self) -> None:
        found = problems_of("mnist")
        assert (found[0].what, found[0].fix) == ("`mnist` is a recipe, not an override", "+recipe=mnist")

    def test_an_unknown_recipe_lists_the_existing_ones(self) -> None:
        (problem,) = problems_of("+recipe=mnits")
        assert problem.what == "unknown recipe `mnits`"
        assert {"fashion_mnist", "mnist"} <= set(problem.known.split(", "))
        assert problem.fix == "+recipe=mnist"

    @pytest.mark.parametrize("value", ["true", "abc", "1.5", "[1]"])
    def test_a_number_must_be_a_number(self, value: str) -> None:
        (problem,) = problems_of("+recipe=mnist", f"device_iterations={value}")
        assert problem.what == "`device_iterations` takes a whole number"

    def test_malformed_yaml_names_file_line_and_column(self) -> None:
        write_recipe("mine", "# @package _global_\nepochs: 1\nmodel: [unclosed\nseed: 3\n")
        (problem,) = problems_of("+recipe=mine")
        assert problem.what.startswith("malformed YAML")
        assert problem.where == "conf/recipe/mine.yaml:4:5"
        assert problem.seen == "seed: 3"

    def test_unknown_keys_and_wrong_types_in_yaml_name_file_and_line(self) -> None:
        write_recipe("mine", "# @package _global_\nepoch: 1\nseed: soon\nloader:\n  shufle: true\n")
        found = problems_of("+recipe=mine")
        assert [(p.what, p.where) for p in found] == [
            ("unknown key `epoch`", "conf/recipe/mine.yaml:2"),
            ("`seed` takes a whole number", "conf/recipe/mine.yaml:3"),
            ("unknown key `loader.shufle`", "conf/recipe/mine.yaml:5"),
        ]
        assert "epochs" in found[0].known
        assert "loader.shuffle" in found[2].known

    def test_a_key_set_twice_in_one_file(self) -> None:
        write_recipe("mine", "# @package _global_\nseed: 1\nepochs: 2\nseed: 3\n")
        (problem,) = problems_of("+recipe=mine")
        assert problem.what == "malformed YAML: found duplicate key seed"
        assert problem.where == "conf/recipe/mine.yaml:4:1"

    def test_a_recipe_without_its_package_line(self) -> None:
        write_recipe("mine", "epochs: 1\n")
        (problem,) = problems_of("+recipe=mine")
        assert "@package _global_" in problem.fix

    def test_a_user_recipe_with_the_name_of_a_built_in_is_refused(self) -> None:
        write_recipe("mnist", "# @package _global_\nepochs: 1\n")
        (problem,) = problems_of("+recipe=mnist")
        assert "has the name of a built-in" in problem.what
        assert "my_mnist.yaml" in problem.fix

    def test_a_missing_file_in_a_defaults_list(self) -> None:
        write_recipe("mine", "# @package _global_\ndefaults:\n  - override /optimizer: nope\n")
        (problem,) = problems_of("+recipe=mine")
        assert "`nope`" in problem.what
        assert "adamw" in problem.known

    def test_an_interpolation_of_a_missing_key(self) -> None:
        (problem,) = problems_of("+recipe=mnist", "name=${nowhere}")
        assert "`name`" in problem.what
        assert "nowhere" in problem.what

    def test_a_missing_mandatory_value(self) -> None:
        write_recipe("mine", "# @package _global_\nmodel:\n  _target_: a.B\n  width: ???\n")
        (problem,) = problems_of("+recipe=mine")
        assert problem.what == "`model.width` has no value"
        assert problem.fix == "model.width=VALUE"

    def test_foreign_launchers_are_refused_rather_than_ignored(self) -> None:
        (problem,) = problems_of("-m", "+recipe=mnist", "hydra/launcher=ray")
        assert problem.what == "`hydra/launcher` cannot be `ray`"
        assert problem.known == "basic, joblib, submitit_local, submitit_slurm"

    def test_an_unknown_flag(self) -> None:
        (problem,) = problems_of("+recipe=mnist", "--resum")
        assert problem.what == "unknown flag `--resum`"

    def test_a_missing_config_dir(self) -> None:
        (problem,) = problems_of("+recipe=mnist", "--config-dir", "nowhere")
        assert "--config-dir" in problem.what


class TestOddValues:
    @pytest.mark.parametrize(
        ("typed", "fix"),
        [
            ("devices=[1,2]", "devices=1, or one run for each: -m devices=1,2"),
            ("device_iterations=null", "device_iterations=1"),
            ("loader.shuffle=maybe", "loader.shuffle=true"),
            ("epochs=0.5", "epochs=1"),
            ("metrics=null", "metrics.NAME=VALUE"),
            ("loss=null", "loss.name=VALUE, or another key of `loss`"),
        ],
    )
    def test_a_value_of_the_wrong_type_suggests_a_valid_one(self, typed: str, fix: str) -> None:
        (problem,) = problems_of("+recipe=mnist", typed)
        assert problem.what.startswith(f"`{typed.partition('=')[0]}` takes ")
        assert (problem.where, problem.fix) == (f"command line: {typed}", fix)

    def test_a_seed_beyond_the_range_of_generators(self) -> None:
        (problem,) = problems_of("+recipe=mnist", f"seed={2**63}")
        assert (problem.what, problem.fix) == (f"`seed` must be {2**63 - 1} or less", f"seed={2**63 - 1}")

    @pytest.mark.parametrize(
        ("typed", "fix"),
        [("model=null", "remove it with ~model"), ("profile=null", "profile=none"), ("+recipe=", "ipurun ls")],
    )
    def test_a_group_without_a_name(self, typed: str, fix: str) -> None:
        (problem,) = problems_of(typed)
        assert "takes the name of a config" in problem.what
        assert problem.fix == fix

    def test_a_recipe_that_is_not_text(self) -> None:
        write_recipe("binary", "").write_bytes(b"\xff\xfe\x00")
        (problem,) = problems_of("+recipe=binary")
        assert "not UTF-8 text" in problem.what
        assert problem.where.startswith("conf/recipe/binary.yaml")


class TestInvalidFiles:
    """Each message names its file, even if others are broken, too."""

    @pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"# @package _global_\nname: caf\xe9\n"])
    def test_not_utf8(self, content: bytes) -> None:
        write_recipe("another", "a: [\n")
        write_recipe("mine", "").write_bytes(content)
        (problem,) = problems_of("+recipe=mine")
        assert "not UTF-8" in problem.what
        assert problem.where == "conf/recipe/mine.yaml"
        assert "UTF-8" in problem.fix

    def test_a_byte_order_mark(self) -> None:
        write_recipe("mine", "").write_bytes(b"\xef\xbb\xbf# @package _global_\nepochs: 2\n")
        (problem,) = problems_of("+recipe=mine")
        assert "byte order mark" in problem.what
        assert problem.where == "conf/recipe/mine.yaml:1"

    @pytest.mark.parametrize("text", ["- 1", "5"])
    def test_a_list_or_a_single_value(self, text: str) -> None:
        write_recipe("mine", f"# @package _global_\n{text}\n")
        (problem,) = problems_of("+recipe=mine")
        assert "must contain keys" in problem.what
        assert problem.where == "conf/recipe/mine.yaml:1"

    def test_a_machine_may_begin_with_another(self) -> None:
        Path("conf/machine").mkdir(parents=True)
        Path("conf/machine/mine.yaml").write_text("defaults:\n  - bow\n  - _self_\nhost_cpus: 64\n")
        machine = one(["+recipe=mnist", "machine=mine"]).config.machine
        assert (machine.name, machine.clock_hz, machine.host_cpus) == ("Bow", 1.85e9, 64)

    @pytest.mark.parametrize("defaults", ["5", "[{a: b, c: d}]"])
    def test_a_malformed_defaults_list(self, defaults: str) -> None:
        write_recipe("mine", f"# @package _global_\ndefaults: {defaults}\n")
        (problem,) = problems_of("+recipe=mine")
        assert problem.where == "conf/recipe/mine.yaml"

    def test_a_file_that_includes_itself(self) -> None:
        write_recipe("mine", "# @package _global_\ndefaults:\n  - /recipe: mine\n")
        (problem,) = problems_of("+recipe=mine")
        assert "include each other" in problem.what

    def test_an_unknown_option_names_file_and_line(self) -> None:
        write_recipe("mine", "# @package _global_\ndefaults:\n  - override /optimizer: nope\n")
        (problem,) = problems_of("+recipe=mine")
        assert problem.where == "conf/recipe/mine.yaml:3"
        assert "adamw" in problem.known

    def test_an_unknown_group_lists_the_existing_ones(self) -> None:
        write_recipe("mine", "# @package _global_\ndefaults:\n  - override /optimiser: adam\n")
        (problem,) = problems_of("+recipe=mine")
        assert "`optimiser`" in problem.what
        assert problem.where == "conf/recipe/mine.yaml"
        assert "optimizer" in problem.known

    def test_a_folder_with_the_name_of_a_recipe_is_ignored(self) -> None:
        Path("conf/recipe/mine.yaml").mkdir(parents=True)
        (problem,) = problems_of("+recipe=mine")
        assert "unknown recipe `mine`" in problem.what


class TestInvalidValues:
    @pytest.mark.parametrize(
        ("typed", "what"),
        [
            ("machine.clock_hz=-1", "must be above 0"),
            ("machine.mixed_macs_per_cycle=0", "must be above 0"),
            ("machine.op_cycles=-1", "must be 0 or more"),
            ("machine.tight_margin=nan", "must be a finite number"),
            ("machine.tight_margin=1.5", "must be 1 or less"),
            ("machine.link_bytes_per_second=1e400", "must be a finite number"),
            ("sweep.timeout_seconds=-1", "must be above 0"),
            ("metrics={a: 1}", "`metrics.a` takes a mapping"),
            ("metrics.accuracy=true", "`metrics.accuracy` takes a mapping"),
            ("logger.a=5", "`logger.a` takes a mapping"),
        ],
    )
    def test_each_is_reported_with_its_place(self, typed: str, what: str) -> None:
        (problem,) = problems_of("+recipe=mnist", typed)
        assert what in problem.what
        assert problem.where == f"command line: {typed}"

    @pytest.mark.parametrize(
        ("typed", "fix"),
        [
            ("machine.host_core_seconds=-1", "machine.host_core_seconds=0.0048"),
            ("machine.host_cpus=-1", "machine.host_cpus=1"),
        ],
    )
    def test_a_value_that_is_too_small_gets_one_of_its_kind(self, typed: str, fix: str) -> None:
        (problem,) = problems_of("+recipe=mnist", typed)
        assert problem.fix == fix


class TestGiven:
    def test_typed_keys_count_even_if_equal_to_the_default(self) -> None:
        given = one(["+recipe=mnist", "seed=0", "+pipeline.strategy=pipelined"]).given
        assert given is not None
        assert given["seed"] == "command line: seed=0"
        assert given["pipeline.strategy"] == "command line: +pipeline.strategy=pipelined"

    def test_keys_of_recipes_and_chosen_groups_have_their_lines(self) -> None:
        write_recipe("mine", "# @package _global_\nseed: 0\noutput:\n  mode: auto\n")
        given = one(["+recipe=mine", "cache=on"]).given
        assert given is not None
        assert given["seed"] == "conf/recipe/mine.yaml:2" and given["output.mode"] == "conf/recipe/mine.yaml:4"
        assert given["cache.enabled"] == "ipurun/conf/cache/on.yaml:2"

    def test_defaults_of_every_config_do_not_count(self) -> None:
        given = one(["gradient_accumulation=null"]).given
        assert given is not None
        assert not {"cache.enabled", "profile.kind", "gradient_accumulation", "pipeline.split"} & set(given)

    def test_a_mapping_sets_the_keys_inside_it(self) -> None:
        given = one(["+recipe=mnist", "options={deviceIterations: 3, Training: {gradientAccumulation: 2}}"]).given
        assert given is not None
        assert {"options.deviceIterations", "options.Training.gradientAccumulation"} <= set(given)

    def test_removed_keys_do_not_count(self) -> None:
        write_recipe("mine", "# @package _global_\noptions:\n  deviceIterations: 3\n")
        given = one(["+recipe=mine", "~options.deviceIterations"]).given
        assert given is not None and "options.deviceIterations" not in given

    def test_a_chosen_group_replaces_the_keys_of_the_recipe_inside_it(self) -> None:
        write_recipe("mine", "# @package _global_\npipeline:\n  strategy: sharded\n")
        given = one(["+recipe=mine", "pipeline=none"]).given
        assert given is not None and "pipeline.strategy" not in given
        assert given["pipeline.split"] == "ipurun/conf/pipeline/none.yaml:2"


@pytest.mark.parametrize(
    "more",
    [
        ["micro_batch_size=4", "global_batch_size=null"],
        ["pipeline.blocks=null", "pipeline.blocks={predictions.decoder: 0}"],
        ["pipeline.blocks={predictions.decoder: 0}"],
        ["optimizer.accum_type=float16", "memory.serialize={predictions.decoder: 6}"],
        ["memory.available_proportion=0.2", "seed=x", "no_such_key=1"],
    ],
)
def test_more_words_give_the_point_of_the_whole_line(more: List[str]) -> None:
    words = ["+recipe=bert", "pipeline=bert_demo_4ipu", "pipeline.blocks={pooler: 1}", "schedule.warmup_steps=${seed}"]
    before = points(words, "plan").points[0]
    kept = to_yaml(before.config)
    try:
        expected = points([*words, *more], "plan").points[0]
    except ConfigError as error:
        with pytest.raises(ConfigError, match=error.problems[0].key or "seed"):
            with_words(before, more)
    else:
        assert with_words(before, more) == expected
    assert with_words(before, []) == before and to_yaml(before.config) == kept


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["seed=1", "epochs=2", "seed=3"], ("epochs=2", "seed=3")),
        (["+data.x=1", "~data.y", "++data.x=2"], ("~data.y", "++data.x=2")),
        (["loss={a:1}", "loss={b:2}", "loss.a=3"], ("loss={a:1}", "loss={b:2}", "loss.a=3")),
    ],
)
def test_words_that_have_no_effect_are_left_out(words: List[str], kept: Tuple[str, ...]) -> None:
    assert each_key_once(words) == kept


def test_a_key_given_twice_has_its_last_value_and_is_kept_once() -> None:
    point = one(["+recipe=mnist", "seed=1", "seed=2"])
    assert point.config.seed == 2 and point.overrides == ("+recipe=mnist", "seed=2")
