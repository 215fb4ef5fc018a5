"""Prints what fabric there is, and then becomes the command given: ``describe.py COMMAND...``."""

import os
import platform
import sys

from baton_fabric._native import Engine, libfabric_version

engine = Engine("verbs", [os.environ["BATON_TEST_NODE"]])
(capabilities,) = engine.capabilities()
engine.close()
version = ".".join(map(str, libfabric_version()))
print(f"Linux {platform.release()}, libfabric {version}, {capabilities['provider']} on {capabilities['domain']}:")
print(", ".join(f"{name} {value}" for name, value in capabilities.items() if name not in ("provider", "domain")))
sys.stdout.flush()
os.execvp(sys.argv[1], sys.argv[1:])
