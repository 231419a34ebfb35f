"""A resources server of the real NeMo-Gym as its authors wrote it: `python nemo_gym_server.py NAME PORT` in its
environment. NeMo-Gym's own command would start a Ray cluster and install an environment for each server first."""

from __future__ import annotations

import importlib
import sys

import uvicorn
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig

if __name__ == "__main__":
    name, port = sys.argv[1], int(sys.argv[2])
    module = importlib.import_module(f"resources_servers.{name}.app")
    [kind] = [
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, SimpleResourcesServer) and found.__module__ == module.__name__
    ]
    config = kind.model_fields["config"].annotation(host="127.0.0.1", port=port, entrypoint="app.py", name=name)
    client = ServerClient(head_server_config=BaseServerConfig(host="", port=0), global_config_dict=DictConfig({}))
    server = kind(config=config, server_client=client)
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
