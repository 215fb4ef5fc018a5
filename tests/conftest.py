"""What all tests share."""

from contextlib import suppress
from pathlib import Path

from hypothesis import settings

# How long an example takes says nothing on a machine that does other things, too.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")


def pytest_sessionstart() -> None:
    """Removes what processes that were killed earlier left of libfabric's shm provider, named by process id: whoever is
    given the id again can't open an endpoint (EBUSY)."""
    for segment in Path("/dev/shm").glob("[0-9]*:*"):
        if not Path("/proc", segment.name.partition(":")[0]).exists():
            with suppress(OSError):
                segment.unlink()
