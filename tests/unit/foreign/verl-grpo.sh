set -x
# a comment that doesn't close a quote
MODEL_PATH=${MODEL_PATH:-"models/tiny"}
DATA=${DATA_HOME:-"${ROOT:-data}"}
prompt=$((512 * 2))
answer=$((1024 * 2))

python3 -m verl.trainer.main_ppo \
    --config-path=config --config-name=ppo_trainer \
    algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=True algorithm.use_kl_in_reward=False \
    data.train_files="['$DATA/train.parquet']" data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 data.max_prompt_length=$prompt data.max_response_length=$answer \
    data.filter_overlong_prompts=True data.truncation=error data.seed=7 data.image_key=images \
    actor_rollout_ref.model.path=$MODEL_PATH actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 actor_rollout_ref.actor.optim.warmup_style=cosine \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0.01 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.actor.fsdp_config.fsdp_size=8 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.temperature=0.9 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.free_cache_engine=True \
    actor_rollout_ref.rollout.val_kwargs.n=4 actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=256 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 \
    +reward_model.reward_kwargs.max_resp_len=2048 \
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3.0 \
    trainer.logger='["console","wandb"]' trainer.project_name=p trainer.experiment_name=e trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 trainer.save_freq=20 trainer.test_freq=5 trainer.total_training_steps=100 \
    trainer.val_before_train=True trainer.resume_mode=auto trainer.critic_warmup=0 $@
