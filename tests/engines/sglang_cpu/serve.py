"""A test rig: SGLang's own server on a CPU. `python serve.py --model-path DIR --port N [arguments of SGLang]`.

The arguments that a CPU needs are added here; see `prelude` for what is replaced, and docs/engines.md for how the
environment is made (`make sglang`).
"""

import sys

import prelude
import seeds

CPU = [
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--disable-cuda-graph",
    "--skip-server-warmup",
    "--mem-fraction-static",
    "0.05",
]


prelude.install()  # in the children too, which import this file
seeds.install()


def main() -> None:
    """Serve until it is killed."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args([*CPU, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
