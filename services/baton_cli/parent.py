"""The net below a clean shutdown: a service whose supervisor is gone ends too."""

import os
import select
import signal
import threading


def end_with_parent(parent: int, stop_seconds: float) -> None:
    """SIGTERM to this process when process ``parent`` ends, and the end of it if that has not helped in time.

    A thread that sleeps on the parent's pidfd, and not PR_SET_PDEATHSIG: this asks for a clean end first, works when
    the service's event loop is stuck, and has no race with a parent that died before it was asked for.
    """
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        raise SystemExit(f"the supervisor (process {parent}) has ended") from None

    def watch() -> None:
        # Signals are the main thread's, which may hold them off for a while.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(stop_seconds)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
