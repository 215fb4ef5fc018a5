"""Read by every Python of scripts/sanitize.sh: the native core is the instrumented one that BATON_NATIVE names."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec


class _Instrumented:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "baton_fabric._native":
            return None
        return importlib.util.spec_from_file_location(name, os.environ["BATON_NATIVE"])


sys.meta_path.insert(0, _Instrumented)  # type: ignore[arg-type]
