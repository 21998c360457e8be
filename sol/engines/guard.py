"""The process that outlives us by a moment, so that no server that we started outlives us at all.

    python -I -S guard.py PARENT_PID

It leads the process group that the server joins, and waits for the death of the process that started it, however that
came about: the kernel tells it through a process descriptor. Then it asks the whole group to end, and kills what is
left of it, itself included. Ctrl-C in a terminal goes to another group; when to end is the parent's decision.

A parent-death signal (prctl) would be shorter, but it is sent when the *thread* that started the server ends, and
reaches the first process alone and not the server's own children, which hold the GPU's memory.

Only the standard library, and no site-packages: it is there in some 10 ms.
"""

import os
import select
import signal
import sys
import time

GRACE_SECONDS = 5.0
"""Between asking and killing."""


def main() -> None:
    parent = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if os.getpgrp() != os.getpid():
        sys.exit("guard.py has to lead a process group of its own: it would kill yours")
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        pass  # it died before we had run a line
    else:
        if os.getppid() == parent:  # else its number is somebody else's by now
            select.select([descriptor], [], [])
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
