"""Which families, features and layouts the tests of each back-end run, and which checkpoint loads where.

`docs/generate.py` writes docs/matrix.md from this table; `ranks` takes the pairs of checkpoints from it, and
`test_matrix.py` looks up every test that a cell names. Standard library alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Job = tuple[int, str]  # number of ranks, name in `ranks.LAUNCHES`


class Row(NamedTuple):
    """A family or a feature: what asks for it, and by back-end and layout the test that runs it (file and id)."""

    settings: tuple[str, ...]
    model: dict[str, Any]
    fsdp2: dict[str, str]
    megatron: dict[str, str]


#: Layout -> settings. What has no further setting shares the batch between the ranks.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one rank": (),
    "shares": ("learner.ranks=2",),
    "replicate": ("learner.ranks=4", "learner.parallel.replicate=2"),
    "tensor": ("learner.ranks=2", "learner.parallel.tensor=2"),
    "sequence": ("learner.ranks=2", "learner.parallel.sequence=2"),
    "context": ("learner.ranks=4", "learner.parallel.sequence=4"),
    "pipeline": ("learner.ranks=2", "learner.parallel.pipeline=2"),
    "expert": ("learner.ranks=2", "learner.parallel.expert=2"),
    "tensor, shares": ("learner.ranks=4", "learner.parallel.tensor=2"),
    "tensor, pipeline": ("learner.ranks=4", "learner.parallel.tensor=2", "learner.parallel.pipeline=2"),
    "tensor, sequence": ("learner.ranks=4", "learner.parallel.tensor=2", "learner.parallel.sequence=2"),
    "expert, shares": ("learner.ranks=4", "learner.parallel.expert=2"),
    "expert, replicate": ("learner.ranks=4", "learner.parallel.expert=2", "learner.parallel.replicate=2"),
    "expert, sequence": ("learner.ranks=4", "learner.parallel.expert=2", "learner.parallel.sequence=2"),
    "expert, pipeline": ("learner.ranks=4", "learner.parallel.expert=2", "learner.parallel.pipeline=2"),
    "expert, tensor": ("learner.ranks=4", "learner.parallel.expert=2", "learner.parallel.tensor=2"),
}
#: Layouts with the job in `ranks` that runs all that is asked of a back-end there.
JOBS: dict[str, dict[str, str]] = {
    "fsdp2": {
        "shares": "backend_contract", "sequence": "ulysses", "replicate": "hsdp", "tensor, shares": "tensor",
        "expert, shares": "expert",
    },
    "megatron": {
        "shares": "megatron_shares", "tensor": "megatron_tensor", "pipeline": "megatron_pipeline",
        "expert": "megatron_expert", "tensor, shares": "megatron_mixed", "tensor, pipeline": "megatron_both",
    },
}  # fmt: skip
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8}
#: Families of mixtures, with the name of their number of experts.
MIXTURES = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}


def _contract(backend: str, test: str, *, case: str = "", experts: bool | None = None) -> dict[str, str]:
    """The test in every job of the contract; `experts`: in those of a mixture alone, or of a dense model alone."""
    return {
        layout: f"test_backend_contract.py::{test}[{job}{'-' * bool(case)}{case}]"
        for layout, job in JOBS[backend].items()
        if experts is None or ("expert" in job) is experts
    }


def _composed(**cases: str) -> dict[str, str]:
    """By layout, the case of `composed_cases` on four ranks; _ stands for a comma."""
    test = "test_composed_ranks.py::test_steps_equal_one_process"
    return {layout.replace("_", ", "): f"{test}[4-{case}]" for layout, case in cases.items()}


def _split(case: str, *layouts: str) -> dict[str, str]:
    return {layout: f"test_split_ranks.py::test_two_ranks_equal_one_process[{layout}-{case}]" for layout in layouts}


def _moe(family: str) -> dict[str, str]:
    cases = {
        "one rank": "alone", "expert": "expert", "tensor": "tensor", "expert, shares": "expert_shares",
        "expert, pipeline": "expert_pipeline", "expert, tensor": "expert_tensor",
    }  # fmt: skip
    return {
        layout: f"test_moe_ranks.py::test_layouts_train_as_transformers[{family}-{case}]"
        for layout, case in cases.items()
    }


def _megatron(test: str, case: str, *layouts: str) -> dict[str, str]:
    return {layout: f"test_megatron_ranks.py::{test}[{case}-{layout}]" for layout in layouts}


COMPOSED_EXPERTS = {"expert_replicate": "expert_replicate", "expert_sequence": "expert_sequence"}
STEPS, ONE_RANK = "test_steps_equal_one_process", "test_a_checkpoint_continues_on_one_rank"
BITWISE, HALF = "test_a_checkpoint_continues_bitwise_in_its_layout", "test_half_precision_has_narrow_exports"
FROZEN = ("learner.vision.tower=false", "learner.vision.projector=false")
SAME = "test_settings_give_what_they_give_with_fsdp2"
OTHERS = "test_other_families_train_as_with_fsdp2"
STREAMED = "producers.engine=dataset"
FAMILIES: dict[str, Row] = {
    "qwen3": Row((), {"model_type": "qwen3"}, {
        "one rank": "test_fsdp2.py::test_one_rank_equals_plain_torch",
        **_contract("fsdp2", STEPS, case="plain", experts=False),
        **_composed(context="two_heads", tensor_sequence="tensor_sequence"),
    }, {
        "one rank": f"test_backend_contract.py::{ONE_RANK}[megatron_shares-megatron]",
        **_contract("megatron", STEPS, case="plain", experts=False),
    }),
    **{
        family: Row((), {"model_type": family}, {}, _megatron(OTHERS, family, "tensor", "pipeline"))
        for family in ("qwen2", "llama", "gemma")
    },
    **{
        family: Row((), {"model_type": family, count: 8}, {
            "one rank": f"test_moe_ranks.py::test_layouts_train_as_transformers[{family}-alone]",
            **(_contract("fsdp2", STEPS, case="plain", experts=True) if family == "qwen3_moe" else {}),
            **(_composed(**COMPOSED_EXPERTS) if family == "qwen3_moe" else {}),
        }, _moe(family))
        for family, count in MIXTURES.items()
    },
    **{
        family: Row(FROZEN, {"model_type": family, "vision_config": {"hidden_size": 8}}, {
            "shares": f"test_vision_ranks.py::test_two_ranks_equal_one[{family}]"}, {})
        for family in ("qwen2_5_vl", "qwen3_vl", "llava")
    },
}  # fmt: skip
FEATURES: dict[str, Row] = {
    "mini-batches": Row(
        ("learner.algorithm.minibatches=2",), {},
        _contract("fsdp2", STEPS, case="minibatches"), _contract("megatron", STEPS, case="minibatches")),
    "padded rows": Row(("learner.packing=false",), {}, {
        "shares": f"test_backend_contract.py::{STEPS}[backend_contract-padded]",
        "sequence": f"test_backend_contract.py::{STEPS}[ulysses-padded]",
        **_composed(context="padded"),
    }, _megatron(SAME, "padded", "tensor", "pipeline")),
    "gradient checkpointing": Row(("learner.gradient_checkpointing=true",), {}, {
        "shares": f"test_backend_contract.py::{STEPS}[backend_contract-checkpointing]",
        "sequence": f"test_backend_contract.py::{STEPS}[ulysses-checkpointing]",
        "tensor, shares": f"test_backend_contract.py::{STEPS}[tensor-checkpointing]",
        **_composed(context="checkpointing", tensor_sequence="tensor_checkpointing"),
    }, _megatron(SAME, "checkpointing", "tensor", "pipeline")),
    "bfloat16": Row(("model.dtype=bfloat16",), {}, _contract("fsdp2", HALF), _contract("megatron", HALF)),
    "float16": Row(("model.dtype=float16",), {}, {
        "one rank": "test_float16_ranks.py::test_steps_go_as_in_float32[one]",
        "shares": "test_float16_ranks.py::test_steps_go_as_in_float32[two]",
    }, {}),
    "cpu_offload": Row(("learner.cpu_offload=true",), {}, {
        "shares": f"test_backend_contract.py::{STEPS}[backend_contract-offload]"}, {}),
    "muon": Row(("learner.optim.name=muon",), {}, {
        "shares": f"test_backend_contract.py::{STEPS}[backend_contract-muon]",
        "replicate": f"test_backend_contract.py::{STEPS}[hsdp-muon]"}, {}),
    "adamw_8bit": Row(("learner.optim.name=adamw_8bit",), {}, {
        "shares": "test_eight_bit_ranks.py::test_two_ranks_walk_as_one[shard]",
        "tensor": "test_eight_bit_ranks.py::test_two_ranks_walk_as_one[tensor]",
    }, {}),
    "critic": Row(("learner.algorithm.advantage=gae",), {}, {
        "shares": "test_critic_ranks.py::test_two_ranks_equal_one[plain]",
        **_split("critic", "sequence", "tensor", "replicate", "expert"),
        **_composed(context="two_heads", tensor_sequence="tensor_sequence", **COMPOSED_EXPERTS),
    }, {
        layout: f"test_critic_ranks.py::test_megatron_equals_fsdp2_and_its_checkpoint_loads_there[{case}_{layout}]"
        for layout, case in (("tensor", "minibatches"), ("pipeline", "bootstrap"))
    }),
    "process rewards": Row(("learner.algorithm.advantage=prime",), {}, {
        "shares": "test_process_ranks.py::test_two_ranks_equal_one[plain]",
        **_split("process", "sequence", "tensor", "replicate", "expert"),
    }, {}),
    "mode sft": Row(("learner.mode=sft", STREAMED, "sampling.group_size=1"), {}, {
        "shares": "test_supervised_ranks.py::test_two_ranks_equal_one[sft]",
        **_split("sft", "sequence", "tensor"),
    }, {"tensor": "test_supervised_ranks.py::test_megatron_equals_fsdp2[sft_tensor]"}),
    "mode dpo": Row(("learner.mode=dpo", STREAMED, "sampling.group_size=2"), {}, {
        "shares": "test_supervised_ranks.py::test_two_ranks_equal_one[dpo]",
        **_split("dpo", "sequence", "tensor", "replicate"),
    }, {"pipeline": "test_supervised_ranks.py::test_megatron_equals_fsdp2[dpo_pipeline]"}),
    "mode kto": Row(("learner.mode=kto", STREAMED, "sampling.group_size=1"), {}, {
        "shares": "test_supervised_ranks.py::test_two_ranks_equal_one[kto]",
    }, {"tensor": "test_supervised_ranks.py::test_megatron_equals_fsdp2[kto_tensor]"}),
    "mode reward_model": Row(("learner.mode=reward_model", STREAMED, "sampling.group_size=2"), {}, {
        "shares": "test_supervised_ranks.py::test_two_ranks_equal_one[reward_model]",
        **_split("reward_model", "sequence", "tensor"),
    }, {}),
    "LoRA": Row(("learner.lora.rank=4",), {}, {
        "shares": "test_lora_ranks.py::test_two_ranks_equal_one[plain]",
        "sequence": "test_lora_ranks.py::test_two_ranks_equal_one[sequence]",
        "replicate": "test_lora_ranks.py::test_four_ranks_that_hold_the_weights_twice_equal_one",
    }, {}),
    "router replay": Row(("learner.router_replay=true",), EXPERTS, {
        "shares": "test_routing_ranks.py::test_two_ranks_replay_as_one[shard]",
        "expert": "test_routing_ranks.py::test_two_ranks_replay_as_one[expert]",
    }, {
        layout: f"test_routing_ranks.py::test_two_ranks_replay_as_one[megatron_{layout}]"
        for layout in ("expert", "tensor", "pipeline")
    }),
    "compiled layers": Row(("learner.compile=true",), {}, {
        "one rank": "test_fsdp2.py::test_every_layer_is_compiled_where_asked"}, {}),
    "Liger kernels": Row(("learner.liger=true",), {}, {}, {}),
    "attention varlen": Row(("model.attn_implementation=varlen", "model.dtype=bfloat16"), {}, {}, {}),
    "own checkpoint, bit by bit": Row((), {}, _contract("fsdp2", BITWISE), _contract("megatron", BITWISE)),
}  # fmt: skip
#: Checkpoints of other layouts that a job loads. A launch loads those of smaller ones, and of its own earlier jobs; one
#: rank of either back-end loads all.
CHECKPOINTS: dict[Job, tuple[Job, ...]] = {
    (2, "backend_contract"): ((1, "alone"),),
    (2, "ulysses"): ((1, "megatron_alone"),),
    (4, "hsdp"): ((2, "backend_contract"), (2, "megatron_shares")),
    (4, "tensor"): ((2, "backend_contract"), (2, "megatron_pipeline")),
    (4, "expert"): ((1, "expert_alone"), (2, "megatron_expert")),
    (2, "megatron_tensor"): ((2, "backend_contract"),),
    (2, "megatron_pipeline"): ((1, "alone"), (2, "megatron_tensor")),
    (2, "megatron_shares"): ((1, "megatron_alone"), (2, "megatron_pipeline")),
    (2, "megatron_expert"): ((1, "expert_alone"),),
    (4, "megatron_both"): ((2, "megatron_tensor"), (2, "ulysses")),
    (4, "megatron_mixed"): ((2, "megatron_pipeline"), (4, "tensor")),
}
WRITERS: dict[Job, str] = {
    (1, "alone"): "fsdp2, one rank",
    (1, "expert_alone"): "fsdp2, one rank, a mixture of experts",
    (1, "megatron_alone"): "megatron, one rank",
}


def name_of(job: Job) -> str:
    """A job as the page names it."""
    if job in WRITERS:
        return WRITERS[job]
    [(backend, layout)] = [
        (backend, layout) for backend, jobs in JOBS.items() for layout, name in jobs.items() if name == job[1]
    ]
    return f"{backend}, {layout}, {job[0]} ranks"


def named_tests() -> set[str]:
    """Every test that a cell names."""
    rows = [*FAMILIES.values(), *FEATURES.values()]
    cells = {test for row in rows for test in (*row.fsdp2.values(), *row.megatron.values())}
    pairs = {
        f"test_backend_contract.py::test_a_checkpoint_of_another_layout_continues[{reader[1]}-{writer[1]}]"
        for reader, writers in CHECKPOINTS.items()
        for writer in writers
    }
    alone = {
        f"test_backend_contract.py::{ONE_RANK}[{reader[1]}-{backend}]" for reader in CHECKPOINTS for backend in JOBS
    }
    return cells | pairs | alone
