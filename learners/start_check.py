"""Checks what a learner builds before it reads weights: the model of `model.path`, and where its adapters go.

`asyncrl check` runs it as `python -m learners.start_check`, with the resolved configuration on standard input. It calls
the functions that a learner calls, on a model without memory (torch's device "meta"); output as in
`asyncrl.runtime.start_report`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runtime.model_folder import build_model, load_config
from asyncrl.runtime.start_report import read_settings, say_error
from learners.backends.fsdp2.loading import decoder_layers
from learners.backends.fsdp2.lora import find_targets


def check_model(config: Config) -> None:
    """Raise if the learner cannot build its model.

    Raises:
        ConfigError: `config.trust`, `config.model`.
    """
    path = config.model.path
    kind: Any = "classifier" if config.learner.mode == "reward_model" else "language"
    try:
        shape = load_config(path, trust_remote_code=config.model.trust_remote_code)
        with torch.device("meta"):
            model = build_model(shape, kind, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError("config.model", what, where=f"model.path = {path!r}") from error
    if config.learner.lora.rank and config.learner.backend == "fsdp2":
        find_targets(model, decoder_layers(model), config.learner.lora.target_modules)


def main() -> int:
    config = read_settings()
    try:
        check_model(config)
    except AsyncRLError as error:
        say_error(error, f"model.path = {config.model.path!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
