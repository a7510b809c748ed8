"""What holds for all tests."""

import signal

# A shell that starts a command in the background has it ignore Ctrl-C, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
