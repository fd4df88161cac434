"""Ending with the process that started this one. As a program, given that one's id: become the command that follows it."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when the thread that started it ends


def end_with_parent() -> None:
    """Let this process, and what it is replaced by, be killed when its parent ends, even where that is killed; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    if os.getppid() == int(sys.argv[1]):  # or else it ended before that
        os.execvp(sys.argv[2], sys.argv[2:])
