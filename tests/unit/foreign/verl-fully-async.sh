#!/usr/bin/env bash
MODEL_PATH=models/tiny
staleness_threshold=0.5
train_prompt_mini_bsz=16
python -m verl.experimental.fully_async_policy.fully_async_main \
    --config-name='fully_async_ppo_megatron_trainer.yaml' \
    data.train_files="${TRAIN_FILE}" data.train_batch_size=0 data.gen_batch_size=1 data.return_raw_chat=True \
    data.max_prompt_length=$((1024 * 1)) data.max_response_length=$(((1024 + 1024) * 2)) \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.ppo_mini_batch_size=${train_prompt_mini_bsz} \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.param_offload=False \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.calculate_log_probs=True \
    algorithm.adv_estimator=rloo \
    rollout.nnodes=1 rollout.n_gpus_per_node=4 rollout.total_rollout_steps=10000 rollout.total_epochs=2 \
    rollout.test_freq=10 trainer.nnodes=1 trainer.n_gpus_per_node=4 \
    async_training.staleness_threshold="${staleness_threshold}" async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=2 async_training.partial_rollout=True
