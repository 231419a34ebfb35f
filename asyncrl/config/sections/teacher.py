"""`[[teacher]]`: language models whose log-probs the policy learns from; `[learner.distillation]` says how."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Seconds, Section, Share


class TeacherConfig(Section, frozen=True):
    """`[[teacher]]`: a language model that tells the log-probs of every sample's tokens."""

    name: str  # letters, digits and _; unlike the names of judges
    model: str  # folder of the model, with the policy's vocabulary; with a url its name on the server
    url: str = ""  # address of its server, such as http://127.0.0.1:8000; empty: the model runs on this host
    api: Literal["vllm", "sglang", "openai"] = "vllm"  # interface of the server; openai: no loss that needs top_k
    data_sources: tuple[str, ...] = ()  # it teaches rows of these; empty: all rows
    count: Positive = 1  # processes on this host
    device: str = "auto"  # like producers.device
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: model.dtype
    trust_remote_code: bool = False  # run code that is part of its model folder
    max_tokens: Positive = 32768  # longest prompt and response; a longer sample is a failure
    batch_samples: Positive = 64  # samples leased at once
    concurrency: Positive = 16  # samples of one forward pass, or simultaneous requests
    timeout_s: Seconds = 300.0  # time limit of one sample
    attempts: Positive = 4  # attempts of a request after 429, 5xx, an invalid answer or none
    retries: Count = 2  # on other workers of this teacher; then the group is quarantined with the reason
    restarts: Count = 5  # in 10 minutes
    api_key_env: str = ""  # environment variable with the key of the server
    api_key_file: str = ""  # or a file that only its owner can read


class DistillationConfig(Section, frozen=True):
    """`[learner.distillation]`: how the policy learns from the log-probs of teachers (`[[teacher]]`)."""

    loss: Literal["reverse_kl", "jsd"] = "reverse_kl"  # on sampled tokens, or on the teacher's likeliest tokens (GKD)
    coeff: Annotated[float, Meta(ge=0)] = 1.0  # weight next to the loss by reward
    estimator: Literal["k1", "k3"] = "k1"  # reverse_kl: estimator of the divergence; k3 has less variance
    beta: Share = 0.0  # jsd: 0 is KL(teacher || policy), 1 is KL(policy || teacher), between them the generalised JSD
    top_k: Positive = 32  # jsd: likeliest tokens of the teacher; all others count as one

    @property
    def asked_top_k(self) -> int:
        """Likeliest tokens that teachers are asked for; 0: none."""
        return self.top_k if self.loss == "jsd" else 0
