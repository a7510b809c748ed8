"""Fixtures and settings of all tests."""

import signal

# Shells have a command in the background ignore Ctrl-C, and nohup a lost connection, and so would every program that a
# test starts.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
