"""A test rig: lets SGLang be imported where there is no GPU. Not for production, and nothing that SGLang supports.

SGLang's wheel is mostly Python, but imports packages that exist for GPUs alone. What of them is never called on a CPU
is answered here by modules without content: `torchvision` (its CPU build is not in an environment made for another
torch) and `flashinfer`. Import this before sglang, in its child processes too (they import the script that started
them, `serve.py`, which does). With it these arguments run: `--device cpu --attention-backend torch_native
--sampling-backend pytorch --disable-cuda-graph`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

ABSENT = ("torchvision", "flashinfer")


class _Nothing(ModuleType):
    """A module in which every name is there and is nothing that works."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": self.__name__})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of the absent packages and of anything below them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """From now on the absent packages can be imported. Once is enough."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    import transformers.utils.import_utils

    # transformers must go on believing what is true: it picks its own way without torchvision.
    transformers.utils.import_utils.is_torchvision_available = lambda: False
    transformers.utils.is_torchvision_available = lambda: False
    from transformers import AutoProcessor

    del AutoProcessor  # imported now, it does not meet the stand-ins
    sys.meta_path.append(_Finder())


install()
