"""A test rig: SGLang's own server on a CPU. `python serve.py --model-path DIR --port N [arguments of SGLang]`.

The arguments that a CPU needs are added here; see `prelude` for what is replaced, and docs/engines.md for how the
environment is made (`make sglang`).
"""

import sys

import prelude  # also in the children, which import this file

CPU = [
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
    "--skip-server-warmup", "--mem-fraction-static", "0.05",
]  # fmt: skip


def deterministic_on_a_cpu() -> None:
    """Seeds count in deterministic mode alone, which SGLang has for GPUs: their kernels must not depend on the batch.
    On a CPU its own samplers do what they do on a GPU, and results differ by float noise with the batch."""
    import sglang.srt.batch_invariant_ops as kernels
    from sglang.srt.arg_groups import choices

    kernels.enable_batch_invariant_mode = lambda *_args, **_kwargs: None
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


prelude.install()
deterministic_on_a_cpu()  # in the children too


def main() -> None:
    """Serve until it is killed."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args([*CPU, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
