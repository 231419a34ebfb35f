#!/bin/bash
WORK_DIR=$(cd "$(dirname "$0")/.." && pwd)
CKPT_ARGS=(
   --actor.model_name_or_path models/tiny
   # --reward.model_name_or_path not/used
   --ckpt.load_enable
   --ckpt.output_dir ${WORK_DIR}/exp
   --ckpt.save_steps 10
   --ckpt.max_num 3
)
ROLLOUT_ARGS=(
   --train.agent_func_path agent.py
   --data.prompt_dataset some/rows
   --data.input_key prompt
   --data.label_key label
   --data.apply_chat_template
   --data.max_len 4096
   --rollout.max_new_tokens 1024
   --rollout.batch_size 32
   --rollout.n_samples_per_prompt 8
   --train.batch_size 128
   --train.micro_batch_size 1
   --algo.dynamic_filtering_enable
   --algo.dynamic_filtering_range 0.0 1.0
   --train.max_tokens_per_gpu 16192
   --ds.packing_samples
)
ENGINE_ARGS=(
   --train.async_enable --train.partial_rollout_enable
   --actor.num_nodes 1 --actor.num_gpus_per_node 4
   --vllm.num_engines 2 --vllm.tensor_parallel_size 2 --vllm.enforce_eager --vllm.sync_backend nccl
   --ds.zero_stage 3 --ds.param_dtype bf16 --actor.gradient_checkpointing_enable --ds.ring_attn_size 2
   --algo.advantage.estimator reinforce_baseline --actor.adam.lr 5e-7 --actor.entropy_coef 0.001
   --algo.kl.init_coef 1e-5 --algo.kl.use_loss --algo.kl.estimator k2 --actor.eps_clip_low_high 0.2 0.27
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop
   --algo.advantage.is_correction_threshold 0.5 5.0
   --logger.logging_steps 1 --eval.steps -1 --logger.wandb.key KEY --logger.wandb.project p)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/x"}' \
   -- python3 -m openrlhf.cli.train_ppo_ray ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${ENGINE_ARGS[@]}
