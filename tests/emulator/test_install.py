"""``import poptorch`` imports the emulator, here and in child processes, and in programs that it runs."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

RUN = "import sys; from ipurun.emulator import exec; sys.exit(exec.run_{}(sys.argv[1], sys.argv[2:]))"


@pytest.fixture
def run(tmp_path, child_environment):
    def run_child(arguments, **variables):
        child_environment.update(variables)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=str(tmp_path),
            env=child_environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run_child


def write(folder, name, text):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_install_provides_poptorch_and_submodules(run):
    ran = run(
        [
            "-c",
            """if True:
            from ipurun import emulator
            emulator.install()
            emulator.install()
            import poptorch, poptorch.optim, poptorch.poptorch_core, poptorch._impl
            from poptorch.options import Options
            import poptorch.testing as testing
            assert poptorch is emulator
            assert poptorch.optim is emulator.optim
            assert isinstance(emulator.Options(), Options)
            assert poptorch.poptorch_core.Error is emulator.Error
            assert emulator.optim.__spec__.name == "ipurun.emulator.optim"
            import ipurun.emulator.testing as real
            assert testing is real
            import torch
            layer = torch.nn.Linear(1, 1)
            assert layer.autocast() is layer
            try:
                import poptorch.no_such_module
            except ModuleNotFoundError as error:
                print(error)
            """,
        ]
    )
    assert ran.returncode == 0, ran.stderr
    assert "poptorch.no_such_module" in ran.stdout


def test_install_refuses_when_the_real_one_is_loaded(run, tmp_path):
    (tmp_path / "poptorch").mkdir()
    write(tmp_path / "poptorch", "__init__.py", "")
    ran = run(["-c", "import poptorch; from ipurun import emulator; emulator.install()"])
    assert ran.returncode == 1
    assert "RuntimeError: poptorch was imported before install()" in ran.stderr


def test_real_poptorch_is_found(run, tmp_path):
    code = """if True:
        from ipurun import emulator
        from ipurun.emulator.install import find_real_poptorch
        emulator.install()
        print(find_real_poptorch())
    """
    assert run(["-c", code]).stdout.strip() == "None"
    (tmp_path / "poptorch").mkdir()
    assert run(["-c", code]).stdout.strip() == "None"
    path = write(tmp_path / "poptorch", "__init__.py", "")
    assert os.path.samefile(run(["-c", code]).stdout.strip(), path)


def test_modules_can_be_loaded_as_poptorch_geometric_does(run):
    program = """if True:
        from ipurun import emulator
        emulator.install()
        import importlib.util, torch, poptorch

        class Replaced:
            def replace(self):
                self.original, torch.nn.functional.relu = torch.nn.functional.relu, lambda x, inplace: x + 1

            def restore(self):
                torch.nn.functional.relu = self.original

        for _ in range(2):  # before and after the first import by this name
            loader = importlib.util.find_spec("poptorch._poplar_executor").loader
            module = loader.load_module()
            assert module.PoplarExecutor is poptorch.PoplarExecutor
            module._OverwriteContextManager.registerSubsitutionManager(Replaced)
            import poptorch._poplar_executor
        print(poptorch.inferenceModel(torch.nn.ReLU())(torch.tensor([-2.0])).item(), torch.relu(torch.ones(1)).item())
        print(torch.nn.ReLU()(torch.tensor([-2.0])).item())
        """
    ran = run(["-c", program])
    assert ran.stdout == "-1.0 1.0\n0.0\n", ran.stderr


CHILDREN = """
    import multiprocessing
    import subprocess
    import sys
    import poptorch

    def child(queue):
        import poptorch.options
        from ipurun import emulator
        queue.put(poptorch is emulator and poptorch.options.Options is emulator.Options)

    if __name__ == "__main__":
        for method in ("spawn", "forkserver", "fork"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(method, queue.get(timeout=60))
            process.join()
        subprocess.run([sys.executable, "-c", "import poptorch; print(poptorch.__name__)"], check=True)
"""


def test_child_processes_import_poptorch(run, tmp_path):
    script = write(tmp_path, "children.py", CHILDREN)
    ran = run(["-c", RUN.format("script"), script])
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.split("\n")) == ["", "fork True", "forkserver True", "ipurun.emulator", "spawn True"]


def test_child_of_a_module_imports_poptorch(run, tmp_path):
    write(tmp_path, "children.py", CHILDREN.replace('("spawn", "forkserver", "fork")', '("spawn",)'))
    ran = run(["-c", RUN.format("module"), "children"])
    assert ran.returncode == 0, ran.stderr
    assert "spawn True" in ran.stdout


def test_script_runs_in_the_same_environment_as_with_python(run, tmp_path):
    write(tmp_path, "beside.py", "NAME = 'beside'")
    script = write(
        tmp_path,
        "program.py",
        """
        import sys, beside
        main = sys.modules["__main__"]
        print(sys.argv[1:], __name__, __file__ == sys.argv[0], beside.NAME, main.__file__ == __file__)
        """,
    )
    ran = run(["-c", RUN.format("script"), script, "--flag", "x"])
    assert ran.stdout == "['--flag', 'x'] __main__ True beside True\n", ran.stderr
    ran = run(["-c", RUN.format("module"), "program", "y"])
    assert ran.stdout == "['y'] __main__ True beside True\n", ran.stderr


@pytest.mark.parametrize(
    ("how", "ending", "code", "stderr"),
    [
        ("script", "raise SystemExit", 0, ""),
        ("script", "raise SystemExit(7)", 7, ""),
        ("script", "import sys; sys.exit('no data')", 1, "no data\n"),
        ("module", "raise SystemExit(7)", 7, ""),
    ],
)
def test_exit_codes(run, tmp_path, how, ending, code, stderr):
    path = write(tmp_path, "ending.py", ending)
    ran = run(["-c", RUN.format(how), path if how == "script" else "ending"])
    assert (ran.returncode, ran.stderr) == (code, stderr)


def test_traceback_shows_only_the_program(run, tmp_path):
    script = write(tmp_path, "failing.py", "def f():\n    raise ValueError('boom')\n\nf()\n")
    ran = run(["-c", RUN.format("script"), script])
    plain = run([script])
    assert ran.returncode == 1
    assert ran.stderr == plain.stderr


def test_syntax_error_is_shown_as_by_python(run, tmp_path):
    script = write(tmp_path, "broken.py", "x = (\n")
    ran = run(["-c", RUN.format("script"), script])
    assert ran.returncode == 1
    assert "SyntaxError" in ran.stderr
    assert "emulator/exec.py" not in ran.stderr


def test_a_folder_runs_as_with_python(run, tmp_path):
    folder = tmp_path / "program"
    folder.mkdir()
    missing = run(["-c", RUN.format("script"), "program"])
    assert missing.returncode == 1 and "__main__" in missing.stderr
    write(folder, "beside.py", "WORD = 'beside'\n")
    write(folder, "__main__.py", "import sys, beside, poptorch\nprint(beside.WORD, sys.argv[1], poptorch.__name__)\n")
    ran = run(["-c", RUN.format("script"), "program", "word"])
    assert ran.stdout.split() == ["beside", "word", "ipurun.emulator"], ran.stderr


def test_missing_programs(run):
    ran = run(["-c", RUN.format("script"), "none.py"])
    assert ran.returncode == 2
    assert "none.py" in ran.stderr
    ran = run(["-c", RUN.format("module"), "no_such.module"])
    assert ran.returncode == 1
    assert "No module named no_such" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("cause", "shown"),
    [("import no_such_library", "No module named 'no_such_library'"), ("raise ValueError('boom')", "ValueError: boom")],
)
def test_an_error_in_a_package_has_its_traceback(run, tmp_path, cause, shown):
    (tmp_path / "package").mkdir()
    path = write(tmp_path / "package", "__init__.py", cause)
    write(tmp_path / "package", "run.py", "")
    ran = run(["-c", RUN.format("module"), "package.run"])
    assert ran.returncode == 1
    lines = ran.stderr.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{path}", line 1, in <module>']
    assert shown in lines[-1]


def test_a_package_without_main_cannot_be_run(run, tmp_path):
    (tmp_path / "package").mkdir()
    write(tmp_path / "package", "__init__.py", "")
    ran = run(["-c", RUN.format("module"), "package"])
    plain = run(["-m", "package"])
    assert (ran.returncode, ran.stderr) == (1, plain.stderr)


def test_pytest_runs_poptorch_tests(run, tmp_path):
    write(
        tmp_path,
        "test_it.py",
        "import poptorch\n\ndef test_it():\n    assert poptorch.Options().device_iterations == 1\n",
    )
    ran = run(["-c", RUN.format("module"), "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


def test_a_program_starts_the_same_python(run, tmp_path):
    other = tmp_path / "other" / "python3"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho another python\n")
    other.chmod(0o755)
    script = write(
        tmp_path,
        "parent.py",
        """
        import subprocess
        subprocess.run(["python3", "-c", "import poptorch; print(poptorch.Options.__module__)"], check=True)
        """,
    )
    ran = run(["-c", RUN.format("script"), script], PATH=os.pathsep.join([str(other.parent), os.defpath]))
    assert ran.stdout == "ipurun.emulator.options\n", ran.stderr


def test_whole_models_can_be_loaded_as_with_torch_2_0(run, tmp_path):
    program = """
        import io, torch
        stream = io.BytesIO()
        torch.save(torch.nn.Linear(1, 2), stream)
        stream.seek(0)
        print(torch.load(stream))
        """
    ran = run(["-c", RUN.format("script"), write(tmp_path, "load.py", program)])
    assert ran.stdout == "Linear(in_features=1, out_features=2, bias=True)\n", ran.stderr
    assert ran.stderr == ""


@pytest.mark.skipif(not hasattr(torch.serialization, "add_safe_globals"), reason="torch reads whole objects anyway")
def test_a_user_can_forbid_loading_whole_models(run, tmp_path):
    program = """
        import io, torch
        stream = io.BytesIO()
        torch.save(torch.nn.Linear(1, 2), stream)
        stream.seek(0)
        torch.load(stream)
        """
    script = write(tmp_path, "load.py", program)
    ran = run(["-c", RUN.format("script"), script], TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="0")
    assert ran.returncode == 1
    assert "Weights only load failed" in ran.stderr


def test_samplers_accept_a_data_source_as_in_torch_2_0(run, tmp_path):
    program = """
        import poptorch
        from torch.utils.data import DataLoader, Sampler

        class Backwards(Sampler):
            def __init__(self, source):
                super().__init__(source)
                self.source = source

            def __iter__(self):
                return iter(reversed(range(len(self.source))))

        numbers = [10, 20, 30]
        print([int(item) for item in DataLoader(numbers, sampler=Backwards(numbers))])
        """
    ran = run(["-c", RUN.format("script"), write(tmp_path, "sampler.py", program)])
    assert ran.stdout == "[30, 20, 10]\n", ran.stderr


def test_pva_can_be_imported_and_refuses_to_open_reports(run):
    program = """if True:
        from ipurun import emulator
        emulator.install()
        import pva, poptorch
        try:
            pva.openReport("profile.pop")
        except poptorch.Error as error:
            print(error)
        """
    ran = run(["-c", program])
    assert "does not write PopVision reports" in ran.stdout, ran.stderr


POPDIST = """if True:
    from ipurun import emulator
    emulator.install()
    import popdist, popdist.poptorch
    assert not popdist.isPopdistEnvSet()
    popdist.init()
    assert (popdist.getInstanceIndex(), popdist.getReplicaIndexOffset(), popdist.getDeviceId()) == (0, 0, 0)
    assert {popdist.getNumInstances(), popdist.getNumLocalReplicas(), popdist.getNumTotalReplicas()} == {1}
    opts = popdist.poptorch.Options(ipus_per_replica=2)
    """


def test_popdist_reports_a_single_process(run):
    program = """
    import copy, poptorch, torch
    assert isinstance(opts, poptorch.Options)
    opts.deviceIterations(2)
    opts = copy.deepcopy(opts)
    print(opts.Distributed.processId, opts.Distributed.numProcesses, opts.replication_factor)
    print(poptorch.inferenceModel(torch.nn.Flatten(), opts)(torch.ones(4, 1, 3)).shape)
    """
    ran = run(["-c", POPDIST + program], OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="3")
    assert ran.stdout == "0 1 1\ntorch.Size([4, 3])\n", ran.stderr


def test_popdist_options_refuse_settings_of_the_launcher(run):
    program = """
    distributed = opts.Distributed
    for call in (
        lambda: opts.useIpuId(1),
        lambda: opts.replicationFactor(2),
        lambda: distributed.disable(),
        lambda: distributed.setEnvVarNames("SIZE", "RANK"),
        lambda: distributed.configureProcessId(1, 2),
    ):
        try:
            call()
        except RuntimeError as error:
            print(str(error).split("`")[1])
    """
    ran = run(["-c", POPDIST + program])
    refused = ["useIpuId", "replicationFactor", "Distributed.disable", "Distributed.setEnvVarNames"]
    assert ran.stdout.split() == [*refused, "Distributed.configureProcessId"], ran.stderr


COMPANIONS = """
import subprocess, sys

for program in ("import popdist.poptorch; print(popdist.poptorch.Options())", "import pva; print(pva.openReport)"):
    subprocess.run([sys.executable, "-c", program], check=True)
"""


def test_children_may_import_companions_before_poptorch(run, tmp_path):
    ran = run(["-c", RUN.format("script"), write(tmp_path, "parent.py", COMPANIONS)])
    assert ran.returncode == 0, ran.stderr
    assert "device_iterations" in ran.stdout
    assert "openReport" in ran.stdout


@pytest.mark.parametrize("in_child", [False, True])
@pytest.mark.parametrize("kind", ["module", "package"])
def test_companions_that_are_installed_are_used(run, tmp_path, kind, in_child):
    installed = tmp_path / "site"
    if kind == "module":
        written = installed / "pva.py"
    else:
        (installed / "pva").mkdir(parents=True)
        write(installed / "pva", "part.py", "name = 'a part'")
        written = installed / "pva" / "__init__.py"
    installed.mkdir(exist_ok=True)
    written.write_text("name = 'the real one'")
    child = "import pva, sys; print(pva.name, pva.__name__, 'torch' in sys.modules)"
    if kind == "package":
        child += "; import pva.part; print(pva.part.name)"
    program = f"""if True:
        import os, subprocess, sys
        from ipurun import emulator
        emulator.install()
        sys.path.append({str(installed)!r})  # after the emulator's folder, as site-packages are
        os.environ["PYTHONPATH"] += os.pathsep + {str(installed)!r}
        if {in_child}:
            subprocess.run([sys.executable, "-c", {child!r}], check=True)
        else:
            exec({child!r})
        """
    ran = run(["-c", program])
    expected = f"the real one pva {not in_child}\n"
    assert ran.stdout == (expected if kind == "module" else expected + "a part\n"), ran.stderr
