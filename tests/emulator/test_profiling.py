"""profiling.Channel: does nothing without PVTI, and its calls of PVTI."""

import subprocess
import sys
import textwrap

from ipurun import emulator as poptorch


class Worker:
    def work(self):
        return 3


def test_channel_does_nothing_by_default():
    channel = poptorch.profiling.Channel("mine")
    worker = Worker()
    assert channel.instrument(worker, "work") is worker
    with channel.tracepoint("step"):
        assert worker.work() == 3


FAKE_PVTI = """
    def createTraceChannel(name):
        return "channel:" + name

    def instrument(obj, methods, channel):
        print("instrument", type(obj).__name__, list(methods), channel)

    class Tracepoint:
        def __init__(self, channel, name):
            self.name = name
            print("tracepoint", channel, name)

        def __enter__(self):
            print("enter", self.name)

        def __exit__(self, *exc):
            print("exit", self.name)
"""


def test_channel_traces_through_pvti(tmp_path, child_environment):
    (tmp_path / "libpvti.py").write_text(textwrap.dedent(FAKE_PVTI))
    code = """if True:
        from ipurun.emulator.profiling import Channel
        channel = Channel("mine")
        channel.instrument([], "append", "pop")
        with channel.tracepoint("step"):
            print("inside")
    """

    def run(**variables):
        command = [sys.executable, "-c", code]
        environment = {**child_environment, **variables}
        return subprocess.run(command, cwd=str(tmp_path), env=environment, capture_output=True, text=True, check=True)

    assert run(PVTI_OPTIONS='{"enable":"true"}').stdout.splitlines() == [
        "instrument list ['append', 'pop'] channel:mine",
        "tracepoint channel:mine mine.step",
        "enter mine.step",
        "inside",
        "exit mine.step",
    ]
    assert run().stdout.splitlines() == ["inside"]
