"""The configuration of a buffer that stands alone: no model, no prompts, small groups and batches.

`buffer_lab` (a real service) and `sim_config` (the simulator) add their own lines: first those of `[buffer]`, then
further sections.
"""

BARE = """
[model]
path = "none"
[data]
path = "none.jsonl"
max_prompt_tokens = 16
[sampling]
group_size = 2
max_new_tokens = 16
[learner]
steps = 4
[[reward]]
function = "m:f"
[buffer]
batch_groups = 2
"""
