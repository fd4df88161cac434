"""Ending with the process that started this one. As a program: become the command that follows its id."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when the thread that started it ends


def end_with_parent() -> None:
    """Let this process, and what replaces it, be killed when its parent ends or is killed; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    if os.getppid() == int(sys.argv[1]):  # or else it ended before that
        os.execvp(sys.argv[2], sys.argv[2:])
