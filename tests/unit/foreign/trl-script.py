from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

rows = load_dataset("some/rows", split="train")
args = GRPOConfig(
    output_dir="runs/trl",
    learning_rate=1e-5,
    adam_beta2=0.99,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_prompt_length=256,
    max_completion_length=512,
    num_iterations=1,
    beta=0.04,
    epsilon=0.2,
    epsilon_high=0.28,
    delta=4.0,
    loss_type="bnpo",
    scale_rewards="batch",
    mask_truncated_completions=True,
    temperature=0.9,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.3,
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_cap=2.0,
    max_steps=200,
    warmup_ratio=0.05,
    lr_scheduler_type="cosine",
    optim="adamw_torch_fused",
    bf16=True,
    logging_steps=1,
    save_strategy="steps",
    save_steps=50,
    report_to=["wandb"],
    deepspeed="zero3.json",
    push_to_hub=True,
    sync_ref_model=True,
    ref_model_sync_steps=64,
    repetition_penalty=1.1,
)
peft = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
GRPOTrainer(model="models/tiny", args=args, reward_funcs=[len], train_dataset=rows, peft_config=peft).train()
