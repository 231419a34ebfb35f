"""The environment of a process that runs code of a user, a model, a data set or an agent.

It is made from an explicit list: names that programs need (paths, language, threads, devices, caches), and those that
the configuration names for this process. Guarantees:
1. a variable whose name looks like that of a secret passes only by its full name, whatever its prefix is: keys of
   trackers and judges, tokens of hubs and engines, the password of Redis stay where they were given;
2. nothing else is inherited: no proxies (their addresses may hold passwords), no agents of ssh, no cloud accounts.

>>> here = {"PATH": "/bin", "HF_HOME": "/data", "HF_TOKEN": "hf_x", "WANDB_API_KEY": "w", "MY_KEY": "m"}
>>> child_environment(source=here)
{'PATH': '/bin', 'HF_HOME': '/data'}
>>> child_environment(["MY_KEY"], more={"OPENAI_API_KEY": "of this session"}, source=here)["MY_KEY"]
'm'
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

NEEDED = """
PATH HOME USER LOGNAME SHELL TERM LANG LANGUAGE TZ TMPDIR VIRTUAL_ENV NO_COLOR NO_PROXY no_proxy DO_NOT_TRACK
XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR
SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE TOKENIZERS_PARALLELISM
"""
SETTINGS = """
LC_ LD_ PYTHON OMP_ MKL_ KMP_ GOMP_ OPENBLAS_ NUMEXPR_ MALLOC_
CUDA_ CUBLAS_ CUDNN_ NVIDIA_ ROCR_ ROCM_ HIP_ HSA_ ASCEND_ ATB_ HCCL_ NCCL_ GLOO_
TORCH PYTORCH_ TRITON_ VLLM_ SGLANG_ SGL_ FLASHINFER_ HF_ TRANSFORMERS_ CONDA_ ASYNCRL_
"""
NAMES = frozenset(NEEDED.split())  # what any program may need
PREFIXES = tuple(SETTINGS.split())  # of interpreters, libraries, accelerators and engines
SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)


def is_inherited(name: str) -> bool:
    """Whether every child gets this variable."""
    return name in NAMES or (name.startswith(PREFIXES) and SECRET.search(name) is None)


def child_environment(
    names: Collection[str] = (), *, more: Mapping[str, str] | None = None, source: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a child: what all get, what `names` lists for this one, and `more`. `source`: of this process,
    if it is not given.
    """
    here = os.environ if source is None else source
    mine = {name: value for name, value in here.items() if is_inherited(name) or name in names}
    return {**mine, **(more or {})}
